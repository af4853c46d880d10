"""A grid of runs: words that take several values, in processes of their own, each run by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.experiment.run import Prepared, Routed, carry_out
from headgate.experiment.settings import Experiment, experiment
from headgate.experiment.workers import Workers, as_they_end
from headgate.methods.make import current_names, policy_parameters, split_name
from headgate.record.tables import Run

NOT_SWEPT = frozenset({"policy", "policies", "set", "classes", "stages", "seed", "routers", "set_router"})
MOST = 10_000  # runs of one sweep


class Axis(NamedTuple):
    """One axis of the grid: a setting of a run, or a parameter of policies, and its values."""

    word: str
    values: tuple[Any, ...]

    def text(self, value: Any) -> str:
        return f"{self.word.replace('_', '-')}={value}"


class SweepTask(NamedTuple):
    """One run: where on the first axis it stands, what it is called there, and all that decides it."""

    at: Any  # None: there is no such axis
    label: str
    words: Experiment
    policy: str
    settings: dict[str, Any]
    router: Routed | None
    seed: int

    @property
    def fingerprint(self) -> str:
        """Equal for tasks that give the same run."""
        words = self.words.model_dump(mode="json", exclude={"policy", "policies", "set", "seed"})
        settings = {key: str(value) for key, value in self.settings.items()}
        whole = [words, self.policy, settings, self.router, self.seed]
        file, own, _ = self.policy.partition(".py:")
        files = (self.words.trace, self.words.card, file + ".py" if own else None)
        whole += [_content(Path(name)) for name in files if name and Path(name).is_file()]
        return sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    about = file.stat()
    return _digest(file.absolute(), about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=64)
def _digest(file: Path, changed: int, size: int) -> str:
    """Read once as long as it does not change."""
    return sha256(file.read_bytes()).hexdigest()


def parse_over(text: str) -> Axis:
    """`rate=2,4,8` as an axis."""
    word, equals, rest = text.partition("=")
    values = tuple(_value(part.strip()) for part in rest.split(",") if part.strip())
    if not equals or not word.strip() or not values:
        raise InputError(f"--over {text!r} is not NAME=VALUE,VALUE,...; write it as --over rate=2,4,8")
    if len(set(values)) < len(values):
        raise InputError(f"--over {text!r} has a value twice; drop one of the two")
    name = word.strip().replace("-", "_")
    if name in NOT_SWEPT:
        raise InputError(f"--over {word}: give several --policy, --seeds or --router instead")
    return Axis(name, values)


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """All axes; none may be there twice."""
    axes = [parse_over(text) for text in texts]
    words = [axis.word for axis in axes]
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise InputError(f"--over {twice} is there twice; give all its values in one: --over {twice}=2,4,8")
    return axes


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def is_word(axis: Axis) -> bool:
    """Whether it is a setting of a run; else it is a parameter of policies."""
    return axis.word in Experiment.model_fields


def expand_policies(policies: Sequence[str], axes: Sequence[Axis]) -> list[str]:
    """Every policy with every value of the parameters it has; the others once."""
    for word, values in axes:
        expanded: list[str] = []
        known = set(Experiment.model_fields)
        for text in policies:
            name, settings = split_name(text)
            known |= set(policy_parameters(name))
            (axis,) = current_names(name, {word: None})
            if axis in current_names(name, settings):
                raise InputError(f"policy {text!r} sets {word}, which is swept over; drop one of the two")
            if axis not in policy_parameters(name):
                expanded.append(text)
                continue
            join = "," if settings else ":"
            expanded += [f"{text}{join}{axis}={value}" for value in values]
        if expanded == list(policies):
            raise unknown("setting of a run or parameter of these policies", word, known)
        policies = expanded
    return list(policies)


def with_value(words: Experiment, axis: Axis, value: Any) -> Experiment:
    """The same experiment with one word changed, checked as if the user had written it."""
    kind = Experiment.model_fields[axis.word].annotation
    value = float(value) if "float" in str(kind) and isinstance(value, int) else value
    return experiment(words.model_dump(exclude_unset=True) | {axis.word: value})


def variants(words: Experiment, axes: Sequence[Axis]) -> dict[str, Experiment]:
    """Every combination of the axes after the first, by the words that name it ("" when there is none)."""
    experiments = {"": words}
    for axis in axes:
        experiments = {
            f"{name}, {axis.text(value)}": with_value(one, axis, value)
            for name, one in experiments.items()
            for value in axis.values
        }
    return experiments


def carry_out_all(
    tasks: Sequence[SweepTask], workers: Workers, command: Sequence[str]
) -> Iterator[tuple[SweepTask, Run]]:
    """Every task, in whatever order they end; what has not begun is dropped when the caller stops."""
    with workers.start(partial(_run, command=command), len(tasks)) as pool:
        yield from as_they_end(pool, tasks)


def _run(task: SweepTask, command: Sequence[str]) -> Run:
    prepared = Prepared(task.words)
    run = carry_out(prepared, task.policy, task.settings, task.seed, task.label, None, task.router)
    run.meta["sweep"] = task.fingerprint
    run.meta["command"] = list(command)
    return run


def by_place(runs: Sequence[tuple[SweepTask, Run]]) -> dict[Any, dict[str, list[Run]]]:
    """Runs by their place on the first axis, then by name, seeds in order."""
    places: dict[Any, dict[str, list[Run]]] = {}
    for task, run in runs:
        places.setdefault(task.at, {}).setdefault(task.label, []).append(run)
    return places
