"""The leaderboard: every policy on every trace, each run judged by every promise.

A board (leaderboard/policies.toml) says which. The rates tried are shares of the bound on one grid, and a
seed draws the same requests for all policies, so differences between policies are paired by seed. Each run is
a line in results/POLICY.jsonl, and all that is shown is worked out from these lines.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isfinite, log
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from headgate.advisor.capacity.memory import file_of
from headgate.advisor.capacity.search import Progress
from headgate.advisor.capacity.traffic import Level, measure, parse_levels, rows_of_kind, times_of
from headgate.advisor.capacity.trials import Case
from headgate.advisor.set_up import Asked, SetUp, set_up
from headgate.advisor.settings import MOST_SEEDS, SearchSettings
from headgate.core.durations import duration
from headgate.core.errors import InputError, RunError, unknown
from headgate.core.version import VERSION
from headgate.experiment.library import simulate
from headgate.experiment.settings import experiment
from headgate.experiment.workers import Workers, as_they_end
from headgate.methods.make import make_policy, split_name
from headgate.record.tables import write_whole
from headgate.settings_base import Count, SettingsModel, checked, read_toml
from headgate.stats.figures import Estimate, Spread
from headgate.stats.flow import unservable_rows
from headgate.stats.measured import Measured

LOADS = (0.90, 1.06, 1.24)  # shares of the bound at which the share of kept promises is told
FAIR_AT = 1.06  # the one of them at which long prompts are compared with short ones
RATIO = 0.97  # of two neighbours on the grid of rates, which has LOADS[0] at step 0
HIGHEST, LOWEST = -4, 70  # steps of the grid: 1.017 and 0.107 of the bound
FEW = 3  # seeds, below which nothing is said of significance
JUMP = 4  # steps from the first rate to the second
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,39}")
Line = dict[str, Any]
Promised = Mapping[str, tuple[Level, ...]]  # the levels of each promise


class BoardSettings(SettingsModel):
    card: str = "cal-h200-qwen3-8b"
    slots: Count = 1024
    budget: Count = 8192
    requests: Count = 4000
    seeds: int = Field(3, strict=True, ge=1, le=MOST_SEEDS)
    baseline: str
    promises: dict[str, str] = Field(min_length=1)
    traces: dict[str, dict[str, Any]] = Field(min_length=1)
    policies: dict[str, str] = Field(min_length=1)


class BoardTrace(NamedTuple):
    start: SetUp
    bound: float
    promises: Promised
    digest: str  # of the code, the card, the requests, the promises


@dataclass(frozen=True)
class Board:
    file: Path
    settings: BoardSettings
    promises: Promised
    results: Path

    def policy(self, name: str) -> str:
        """As --policy takes it; a file is found from the board's own folder."""
        text = self.settings.policies[name]
        own, *_ = text.partition(".py:")
        return text if own == text or Path(own).is_absolute() else str(self.file.parent / text)

    @cached_property
    def traces(self) -> dict[str, BoardTrace]:
        traces = {}
        for name in self.settings.traces:
            try:
                traces[name] = self._trace(name)
            except InputError as error:
                raise InputError(f"board {self.file}: traces.{name}: {error}") from None
        return traces

    def _trace(self, name: str) -> BoardTrace:
        words = self.settings
        own = {key.replace("-", "_"): value for key, value in words.traces[name].items()}
        recorded, first = own.pop("as_recorded", False) is True, own.pop("ttft", None)
        shared = {name: getattr(words, name) for name in ("card", "slots", "budget", "requests")}
        settings = experiment({**shared, **own}, written=True)
        promises = self.promises
        if first is not None:
            promises = {name: _with_first(levels, first) for name, levels in promises.items()}
        levels = tuple(level for levels in promises.values() for level in levels)
        options = SearchSettings(seeds=words.seeds, as_recorded=recorded)
        start = set_up(settings, Asked(levels, options), words.requests)
        rest = start.asynchronous, start.case().watchdog, promises
        digest = file_of(Path(), start.engine, start.traffic, rest).stem
        return BoardTrace(start, start.bounds()[0].rate, promises, digest)

    def key(self, policy: str, trace: str, seed: int) -> str:
        text = self.policy(policy)
        name, settings = split_name(text)
        file = name.rpartition(":")[0]
        digest = hashlib.sha256(repr((self.traces[trace].digest, sorted(settings.items()), seed)).encode())
        digest.update(name.rpartition("/")[2].encode())
        digest.update(Path(file).read_bytes() if file.endswith(".py") else b"")
        return digest.hexdigest()[:16]


def _with_first(levels: tuple[Level, ...], first: Any) -> tuple[Level, ...]:
    limit = duration(str(first))
    return tuple(level._replace(limit=limit) if level.metric == "ttft" else level for level in levels)


def read_board(
    file: Path, out: Path | None = None, requests: int | None = None, seeds: int | None = None
) -> Board:
    """Checked; results are in `out`, or beside the file. Sizes that are given replace the file's."""
    if not file.is_file():
        raise InputError(f"no board {file}; run this in a clone of the project or name one with --board FILE")
    sizes = {"requests": requests, "seeds": seeds}
    table = read_toml(file, "board") | {name: size for name, size in sizes.items() if size}
    settings = checked(BoardSettings, table, where=f"board {file}: ")
    for what in ("promises", "traces", "policies"):
        for name in getattr(settings, what):
            if not NAME.fullmatch(name):
                raise InputError(
                    f"board {file}: {what}.{name!r}: names have letters, digits and .+_- only, 40 at most"
                )
    if settings.baseline not in settings.policies:
        raise unknown(f"baseline of board {file}: policy", settings.baseline, settings.policies)
    try:
        promises = {name: parse_levels([text]) for name, text in settings.promises.items()}
    except InputError as error:
        raise InputError(f"board {file}: promises: {error}") from None
    return Board(file, settings, promises, (out or file.parent) / "results")


# -- runs


class CellTask(NamedTuple):
    policy: str
    text: str
    trace: str
    seed: int
    key: str


class Cells(NamedTuple):
    cases: Mapping[str, tuple[Case, float, Promised]]  # by trace, with its bound

    def run(self, task: CellTask) -> list[Line]:
        """The lines of a cell. A run is judged by all promises, so searches share runs."""
        lines: dict[int, Line] = {}
        for promise in self.cases[task.trace][2]:
            while True:
                ratios = {step: line["ratio"][promise] for step, line in lines.items()}
                step = next_step(ratios)
                if step is None:
                    break
                lines[step] = self._line(task, LOADS[0] * RATIO**step)
        overloads = [self._line(task, load) for load in LOADS[1:]]
        return [*(lines[step] for step in sorted(lines, reverse=True)), *overloads]

    def _line(self, task: CellTask, load: float) -> Line:
        began = process_time()
        case, bound, promises = self.cases[task.trace]
        name, settings = split_name(task.text)
        policy, _ = make_policy(name, settings, case.engine)
        requests = case.traffic.at(load * bound, task.seed)
        line: Line = {"policy": task.policy, "trace": task.trace, "seed": task.seed, "load": round(load, 6)}
        line |= {"bound": round(bound, 6), "requests": len(requests), "version": VERSION, "key": task.key}
        about: dict[str, Any] = {"asynchronous": case.asynchronous, "watchdog": case.watchdog}
        try:
            run = simulate(case.engine, policy, requests, **about)
        except RunError as error:
            line["stopped"] = str(error)[:200]
            judged = dict.fromkeys(promises, Judgement(inf, 0.0, None))
        else:
            found = Measured(run)
            judged = {name: judge(found, levels) for name, levels in promises.items()}
        for figure in Judgement._fields:
            line[figure] = {name: _plain(getattr(each, figure)) for name, each in judged.items()}
        return line | {"cpu_seconds": round(process_time() - began, 2)}


class Judgement(NamedTuple):
    ratio: float  # of the worst level to its limit; above 1: missed
    kept: float  # share of requests that were kept all they were promised
    # That share among the longest quarter of prompts, over the shortest quarter's.
    long_to_short: float | None


def judge(found: Measured, levels: Sequence[Level]) -> Judgement:
    met = found.run.completed()  # within each limit; tbt: with every gap
    for level in levels:
        times = times_of(found, "gap" if level.metric == "tbt" else level.metric, levels)
        met = met & ~(rows_of_kind(found.run, level.kind) & (times > level.limit))
    window = found.window.keep & ~unservable_rows(found.run)
    prompts = found.run.requests["prompt"]
    short, long = np.quantile(prompts[window], (0.25, 0.75))
    least = float(met[window & (prompts <= short)].mean()) if short < long else 0.0
    fair = float(met[window & (prompts >= long)].mean()) / least if least else None
    return Judgement(measure(found, levels).ratio, float(met[window].mean()), fair)


def next_step(ratios: Mapping[int, float | None]) -> int | None:
    """The next step of the grid to try; None where the crossing is between two neighbours or off the grid."""
    if not ratios:
        return 0
    missed = [step for step, ratio in ratios.items() if ratio is None or not ratio <= 1]
    kept = [step for step in ratios if step > max(missed, default=HIGHEST - 1) and step not in missed]
    width = max(JUMP, max(ratios) - min(ratios))
    if not missed:
        return None if min(kept) <= HIGHEST else max(HIGHEST, min(kept) - width)
    if not kept:
        return None if max(missed) >= LOWEST else min(LOWEST, max(missed) + width)
    return None if min(kept) - max(missed) == 1 else (min(kept) + max(missed)) // 2


def _plain(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.5g}")


def run_board(
    board: Board,
    policies: Sequence[str],
    traces: Sequence[str],
    workers: Workers,
    progress: Progress,
) -> int:
    """Runs what is not known yet, and writes the lines of every policy; how many cells were run.

    A cell is known by its key. Lines are written whenever a cell is done, so what was done before an
    interrupt is kept.
    """
    for name in policies:
        text, settings = split_name(board.policy(name))
        make_policy(text, settings, next(iter(board.traces.values())).start.engine)
    tasks = [
        CellTask(policy, board.policy(policy), trace, seed, board.key(policy, trace, seed))
        for trace in traces
        for policy in policies
        for seed in board.traces[trace].start.seeds
    ]
    current = {(task.policy, task.trace, task.seed): task.key for task in tasks}
    known = {name: read_lines(board.results, name) for name in policies}
    done = {(name, line["key"]) for name, lines in known.items() for line in lines}
    missing = [task for task in tasks if (task.policy, task.key) not in done]
    rows = {name: board.traces[name] for name in traces}
    cells = Cells({name: (row.start.case(), row.bound, row.promises) for name, row in rows.items()})
    board.results.mkdir(parents=True, exist_ok=True)
    with progress("leaderboard", len(tasks)) as report, workers.start(cells.run, len(missing)) as pool:
        report(len(tasks) - len(missing))
        for number, (task, lines) in enumerate(as_they_end(pool, missing), 1 + len(tasks) - len(missing)):
            known[task.policy] = _replaced(known[task.policy], task, lines, current)
            write_lines(board.results, task.policy, known[task.policy])
            report(number)
    return len(missing)


def _replaced(
    lines: Iterable[Line], task: CellTask, new: list[Line], current: Mapping[Any, str]
) -> list[Line]:
    """The lines of a policy with those of one cell anew; lines of its trace that are out of date go."""

    def stays(line: Line) -> bool:
        if line["trace"] != task.trace:
            return True
        own = current.get((task.policy, task.trace, line["seed"]))
        return bool(line["seed"] != task.seed and line["key"] == own)

    return [*filter(stays, lines), *new]


def read_lines(results: Path, policy: str) -> list[Line]:
    file = results / f"{policy}.jsonl"
    if not file.is_file():
        return []
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        _ = [(line["key"], line["trace"], line["seed"], line["load"], line["ratio"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{file} is not a file of results; remove it, and its runs are made again") from None
    return lines


def write_lines(results: Path, policy: str, lines: Iterable[Line]) -> None:
    ordered = sorted(lines, key=lambda line: (line["trace"], line["seed"], line["load"]))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered)
    try:
        write_whole(str(results / f"{policy}.jsonl"), text)
    except OSError as error:
        raise InputError(f"{results}: {error.strerror}; name another folder with --out") from None


# -- what the lines say


class Standing(NamedTuple):
    """One policy on one trace by one promise; rates as shares of the bound."""

    capacity: Estimate
    by_seed: dict[tuple[int, int], float]  # requests of a run, seed
    kept: dict[float, float]  # by load, the mean of the seeds
    long_to_short: float | None


def standing(lines: Sequence[Line], promise: str) -> Standing:
    ratios: dict[tuple[int, int], dict[float, float | None]] = {}
    for line in lines:
        ratios.setdefault((line["requests"], line["seed"]), {})[line["load"]] = line["ratio"][promise]
    by_seed = {run: crossing(ratios[run]) for run in sorted(ratios)}
    kept = {
        load: float(np.mean([line["kept"][promise] for line in lines if line["load"] == load]))
        for load in LOADS
    }
    at = [line["long_to_short"][promise] for line in lines if line["load"] == FAIR_AT]
    fair = [value for value in at if value is not None]
    capacity = Spread.of_values(np.array(list(by_seed.values()))).estimate().as_share()
    return Standing(capacity, by_seed, kept, float(np.mean(fair)) if len(fair) == len(at) and fair else None)


def crossing(ratios: Mapping[float, float | None]) -> float:
    """The load at which the ratio is one, between the highest that kept and the next above it.

    At most the bound, which only runs too short to fall behind exceed.
    """
    missed = min((load for load, ratio in ratios.items() if ratio is None or not ratio <= 1), default=inf)
    kept = max((load for load, ratio in ratios.items() if load < missed), default=0.0)
    if not kept or kept >= 1 or missed == inf:
        return min(kept, 1.0)
    below, above = ratios[kept], ratios[missed]
    if not below or above is None:
        return min((kept + missed) / 2, 1.0)
    share = log(1 / below) / log(above / below)
    return min(exp(log(kept) + share * (log(missed) - log(kept))), 1.0)


def gain(one: Standing, other: Standing) -> Estimate:
    """By how much more load the one keeps its promise, relative; paired by size and seed.

    The interval is wider by a step of the grid, within which a capacity is not known. No interval where there
    are fewer than three pairs.
    """
    runs = sorted(one.by_seed.keys() & other.by_seed.keys())
    pairs = [one.by_seed[run] / other.by_seed[run] - 1 for run in runs if other.by_seed[run]]
    found = Spread.of_values(np.array(pairs)).estimate() if pairs else Estimate(float("nan"))
    if len(pairs) < FEW or found.low is None or found.high is None:
        return Estimate(found.value)
    return Estimate(found.value, found.low - (1 - RATIO), found.high + (1 - RATIO))


def standings(board: Board, policies: Iterable[str]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for policy in policies:
        for line in read_lines(board.results, policy):
            found.setdefault((policy, line["trace"]), []).append(line)
    return found


def chosen(asked: Sequence[str], known: Iterable[str], what: str, file: Path) -> list[str]:
    for name in asked:
        if name not in known:
            raise unknown(f"{what} of board {file}", name, known)
    return list(dict.fromkeys(asked)) or list(known)
