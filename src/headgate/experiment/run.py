"""An experiment is carried out, one policy and one seed a run; and what its answer rests on: the card, the
kind of engine, arrivals, outages, and how much of it the card did not measure.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headgate.core.build import build_name
from headgate.core.durations import duration
from headgate.core.errors import InputError, unknown
from headgate.core.policy import BatchPolicy
from headgate.core.version import VERSION
from headgate.cost.card import Card, load_card
from headgate.cost.laws.terms import HostTerms
from headgate.cost.likeness import error_bar, throughput_error
from headgate.experiment import build
from headgate.experiment.fleet import FleetSetup, outcome_of, prices_of, transfer_time
from headgate.experiment.settings import Experiment, at_once, experiment, without_clients
from headgate.experiment.workers import Workers, as_they_end
from headgate.methods.make import make_policy, policy_parameters, router_parameters, split_name
from headgate.methods.scaling import read_scaling
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.sim.fleet.fleet import Outage, check_outages
from headgate.workloads.workload import Workload

DEFAULT_ROUTER = "least-loaded"
Routed = tuple[str, dict[str, Any]]  # a router's name and its settings
Faults = dict[str, list[InputError]]  # of policies, by what the user called them
Kept = TypeVar("Kept")


class Maker:
    """The first policy is made at once, so that a mistake costs no run, and handed out first."""

    def __init__(self, name: str, settings: dict[str, Any], engine: Engine) -> None:
        self.name, self.settings, self.engine = name, settings, engine
        first, self.parameters = make_policy(name, settings, engine)
        self._ready = [first]

    def __call__(self) -> BatchPolicy:
        return self._ready.pop() if self._ready else make_policy(self.name, self.settings, self.engine)[0]


class Prepared:
    def __init__(self, words: Experiment) -> None:
        self.words = words
        self.card: Card = load_card(words.card)
        self.engine: Engine = build.make_engine(words, self.card)
        self.asynchronous = composes_ahead(words.asynchronous, self.card.host)
        self.workload, self.bad_rows = build.make_workload(words)
        self.too_long = build.too_long(self.workload, self.engine)
        self.seeds: dict[int, Workload] = {words.seed: self.workload}

    def notes(self) -> list[str]:
        words = self.words
        notes = [*error_bar(self.card), *partly(words, self.card, words.engines is not None)]
        notes += build.speculation_notes(self.engine, self.card, words)
        notes += self.workload.remarks
        if self.bad_rows.count:
            line, reason = self.bad_rows.first[0]
            notes.append(f"left out {self.bad_rows.count} bad rows; the first, line {line}: {reason}")
        for away in parse_outages(words.outages, words.engines or 1):
            what = "drains" if away.drain else "fails"
            notes.append(f"engine {away.engine} {what} at {away.start:g} s and is back at {away.end:g} s")
        if self.too_long:
            notes.append(
                f"{self.too_long:,} of {len(self.workload):,} requests cannot be served: their prompts reach "
                f"the {self.engine.longest:,} tokens that model length and KV allow; --cap-prompt cuts them"
            )
        return [*filter(None, notes)]

    def fleet(self) -> FleetSetup | None:
        words = self.words
        if words.engines is None:
            return None
        between, outages = transfer_time(words, self.card.send), parse_outages(words.outages, words.engines)
        scaling = read_scaling(words.autoscale, words.engines) if words.autoscale else None
        how = between, prices_of(words), words.watchdog, self.asynchronous, outages, words.lock_step, scaling
        return FleetSetup(self.engine, words.engines, *how)

    def requests(self, seed: int) -> Workload:
        if seed not in self.seeds:
            self.seeds[seed], _ = build.make_workload(self.words, seed)
        return self.seeds[seed]


def carry_out(
    prepared: Prepared,
    policy: str,
    settings: dict[str, Any],
    seed: int | None = None,
    label: str = "",
    progress: Callable[[int], None] | None = None,
    router: Routed | None = None,
    make: Maker | None = None,
) -> Run:
    """Serve the requests under the policy. An interrupted or failed run comes back too, marked as such.

    `make` makes the policy, where the caller has tried name and settings before.
    """
    seed = prepared.words.seed if seed is None else seed
    workload = prepared.requests(seed)
    make = make or Maker(policy, settings, prepared.engine)
    about = _meta(prepared, workload, policy, make.parameters, seed) | {"label": label or policy}
    setup = prepared.fleet()
    if setup is None:
        recorder = Recorder([kind.name for kind in workload.kinds])
        how: dict[str, Any] = {"asynchronous": prepared.asynchronous, "watchdog": prepared.words.watchdog}
        simulator = Simulator(prepared.engine, make(), workload, (recorder,), progress=progress, **how)
        outcome = outcome_of(simulator.run)
        about |= {**build.cache_record([simulator.replica]), "outcome": outcome}
        run = Run(about, **build.by_tenant(recorder.tables(), workload, simulator.arrivals.rows))
    else:
        name, wanted = router or (DEFAULT_ROUTER, {})
        chosen, values = setup.router(name, wanted, workload, seed)
        about |= {"driver": "fleet", "router": name, "router_parameters": values}
        run = setup.run(lambda role: make(), chosen, workload, progress, about)
    run.meta["outside_card"] = outside(run, prepared.card)
    if silent := build.ran_out(run, workload):
        run.meta["clients_ran_out"] = silent
    return run


def _meta(
    prepared: Prepared, workload: Workload, policy: str, parameters: dict[str, Any], seed: int
) -> dict[str, Any]:
    engine, card, words = prepared.engine, prepared.card, prepared.words
    about = build.described(workload)
    run = {
        "headgate": VERSION,
        "driver": "simulator",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "policy": policy,
        "parameters": parameters,
        "seed": seed,
        "card": card.name,
        "model": card.model,
        "gpu": card.gpu,
        "provenance": card.provenance.source,
        "engine": engine.limits,
        "asynchronous": prepared.asynchronous,
        "arrivals": arrivals_said(words),
        "kv_tokens": engine.kv_tokens,
        "longest": engine.longest,
        "rate": words.rate if about["load"] == "open" else None,
        "burstiness": words.burstiness or 1.0,
        "versions": {"build": build_name(), "python": platform.python_version(), "numpy": np.__version__},
    }
    if card.expected_error:
        run["expected_error"] = card.expected_error.model_dump()
    if engine.speculation:
        run["speculation"] = engine.speculation.said()
    return run | about


# -- asynchronous engines

IN_FLEETS = (
    "--asynchronous in a fleet is a part of it: arrivals and slots are known a step late, but tokens are "
    "seen and KV comes free at once; one engine without --engines has all of it"
)
WITHOUT_HOST = (
    "--asynchronous: card {} does not say how long the host takes, so tokens are seen as soon as the GPU has "
    "them; the cal-... cards and those of headgate calibrate say it"
)


def composes_ahead(asked: bool | None, host: HostTerms | None) -> bool:
    """As asked; by default as vLLM does if the card knows its host, for only then is it measured."""
    return host is not None if asked is None else asked


def engine_kind(asynchronous: bool, fleet: bool) -> str:
    ahead = "asynchronous engines (tokens seen at once)" if fleet else "asynchronous engine"
    return ahead if asynchronous else "synchronous engine"


def partly(settings: Experiment, card: Card, fleet: bool) -> list[str]:
    if not settings.asynchronous or (card.host and not fleet):
        return []
    return [IN_FLEETS if fleet else WITHOUT_HOST.format(card.name)]


# -- what an answer rests on

FORMULAS = "formulas of step times, no run"
CLOSED = f"{build.DEFAULT_CLIENTS} clients in a closed loop"
SATURATED = "a queue that never empties"


def arrivals_said(settings: Experiment, otherwise: str = CLOSED) -> str:
    said = otherwise
    if settings.stages:
        said = "a load that changes from stage to stage"
    elif at_once(settings):
        said = "all requests there at the start"
    elif settings.clients:
        said = f"{settings.clients:,} clients in a closed loop"
    elif settings.rate:
        name = settings.arrivals or ("gamma" if settings.burstiness else "poisson")
        law = {"poisson": "Poisson", "constant": "evenly spaced"}.get(name, name)
        said = f"{law} arrivals, {settings.rate:,.4g} requests/s"
    elif settings.trace:
        faster = f", {settings.scale_rate:g} times as fast" if settings.scale_rate else ""
        said = f"arrivals as recorded{faster}"
    beside = Counter[str]()
    for share in settings.classes:
        beside[share.name] += share.clients or 0  # a class may be there once for each tenant
    clients = (f", beside {number:,} clients of {name}" for name, number in beside.items() if number)
    return said + "".join(clients)


def tried_arrivals(as_recorded: bool, rate: float | None = None) -> str:
    law = "arrivals as recorded, faster or slower" if as_recorded else "Poisson arrivals"
    return f"{law}, {'at the rates tried' if rate is None else f'{rate:,.4g} requests/s'}"


def assumed(
    settings: Experiment, arrivals: str, *, fleet: bool = False, run: bool = True, limits: bool = True
) -> str:
    """One line for a plan. Without `run` nothing is simulated; without `limits` they are its answer."""
    card = load_card(settings.card)
    engine = build.make_engine(settings, card)
    kind = engine_kind(composes_ahead(settings.asynchronous, card.host), fleet) if run else FORMULAS
    off = f"; derived, throughput ±{100 * throughput_error(card):.0f} %" if card.expected_error else ""
    shown = f"{card.name} ({card.model} on {card.gpu}{off})"
    return said([shown], [kind], [engine.limits], [arrivals], limits)


def said(
    cards: Iterable[str],
    kinds: Iterable[str],
    engines: Iterable[Mapping[str, Any]],
    arrivals: Iterable[str],
    limits: bool = True,
) -> str:
    limits_of = list(engines)
    names = {"running": "slots", "batch_tokens": "tokens a step", "max_model_len": "tokens a request at most"}
    parts = [_either(cards), _either(kinds)]
    for key, word in names.items():
        if limits or key == "max_model_len":
            value = _either(f"{one[key]:,}" for one in limits_of if isinstance(one.get(key), int))
            parts.append(f"{value} {word}" if value else "")
    shown = ", ".join(filter(None, parts))
    laws = dict[str, list[str]]()  # the rates of a law, which is said once
    for text in arrivals:
        law, comma, rate = text.rpartition(", ")
        laws.setdefault(law + comma, []).append(rate)
    come = _either(law + _either(rates) for law, rates in laws.items())
    return f"Card {shown}{f'; {come}' if come else ''}." if shown else ""


def _either(values: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(value for value in values if value))


# -- outside the card

WORTH_SAYING = 0.05  # share of the time in steps
WORDS = {"behind": "prompt tokens already computed"}  # where a feature's name says too little


def outside(run: Run, card: Card) -> dict[str, float]:
    """For each feature of a step, the share of the time in steps in which it lay outside; only where > 0.

    Where a card does not say how many tokens stood before the chunks it timed, they cannot have been more
    than its longest request; the simulator prices more by the product of chunk and start (`per_attention`).
    """
    steps = run.steps
    region = {name: getattr(card.region, name) for name in ("decodes", "context", "prefill")}
    region["behind"] = card.region.behind or (0, card.max_model_len)
    total = float(steps["seconds"].sum())
    shares: dict[str, float] = {}
    for name, (low, high) in region.items():
        values = steps[name]
        if name == "context":  # it grows along the row; its middle stands for the row
            values = values + steps["decodes"] * (steps["count"] - 1) // 2
        missed = (values > 0) & ((values < low) | (values > high))
        share = float(steps["seconds"][missed].sum()) / total if total else 0.0
        if share > 0:
            shares[name] = round(share, 4)
    return shares


def warning(run: Run) -> str | None:
    """One line for the user when a good part of the run is extrapolation, or its clients fell silent."""
    silent: dict[str, int] = run.meta.get("clients_ran_out", {})
    lines = [
        f"clients of {name} sent all {number:,} requests drawn for them and were silent from there on; ask "
        "for a shorter run"
        for name, number in silent.items()
    ]
    shares: dict[str, float] = run.meta.get("outside_card", {})
    said = {WORDS.get(name, name): share for name, share in shares.items() if share > WORTH_SAYING}
    parts = ", ".join(f"{name} in {100 * share:.0f} % of the step time" for name, share in said.items())
    if parts:
        lines.append(f"outside what card {run.meta['card']} measured: {parts}; extrapolated there")
    return "; ".join(f"{run.meta['label']}: {line}" for line in lines) or None


FORM = "write ENGINE:START:END, with :drain if requests there may end, such as 0:30s:60s,2:40s:50s:drain"


def parse_outages(text: str | None, engines: int) -> tuple[Outage, ...]:
    outages = []
    for part in text.split(",") if text else ():
        engine, *times = part.strip().split(":")
        drain = times[2:] == ["drain"]
        try:
            start, end = times[:-1] if drain else times
            outages.append(Outage(int(engine), duration(start), duration(end), drain))
        except ValueError:
            raise InputError(f"outages: {part.strip()!r} is not an outage; {FORM}") from None
    check_outages(tuple(outages), engines)
    return tuple(outages)


OTHER_LOADS = ("scale_rate", "clients", "arrivals", "burstiness", "engines")
MIXED = "mixed"  # what plans without a policy of their own are probed with
REQUESTS = 500  # enough to see long prompts, few enough to take no time


def outside_said(settings: Experiment, policy: str, rate: float) -> str:
    """From a short run at the rate a plan found: one sentence where a good part of its step time lies outside
    what the card measured, else ""; of one engine, without promises.
    """
    if not rate > 0:
        return ""
    load = dict.fromkeys(OTHER_LOADS) | {"rate": rate, "stages": ()}
    settings = without_clients(settings)
    words = settings.model_copy(update={**load, "requests": None if settings.trace else REQUESTS})
    prepared = Prepared(words)
    prepared.seeds = {words.seed: prepared.workload.head(min(REQUESTS, len(prepared.workload)))}
    name, values, _ = set_up("policy", policy, words.set)
    outside_card = warning(carry_out(prepared, name, values, label=policy))
    return f"Not measured: {outside_card}." if outside_card else ""


def choose_routers(texts: list[str], prepared: Prepared) -> dict[str, Routed]:
    words, setup = prepared.words, prepared.fleet()
    if setup is None:
        if texts:
            raise InputError(f"--router {texts[0]} needs engines to choose from; give --engines or drop it")
        return {}

    def tried(name: str, settings: dict[str, Any]) -> tuple[Routed, dict[str, Any]]:
        return (name, settings), setup.router(name, settings, prepared.workload, words.seed)[1]

    return each_once("router", texts or [words.router or DEFAULT_ROUTER], words.set_router, tried)


def set_up(what: str, text: str, common: Mapping[str, Any]) -> tuple[str, dict[str, Any], Collection[str]]:
    """Its name, settings and parameters: a setting of all goes to those that have such a parameter."""
    name, own = split_name(text, what)
    parameters = policy_parameters(name) if what == "policy" else router_parameters(name)
    return name, {key: common[key] for key in common if key in parameters} | own, parameters


def each_once(
    what: str,
    texts: Sequence[str],
    common: Mapping[str, Any],
    make: Callable[[str, dict[str, Any]], tuple[Kept, dict[str, Any]]],
    faults: Faults | None = None,
) -> dict[str, Kept]:
    """Every policy or router by what the user called it, made once: a mistake should not cost time. With
    `faults`, those that cannot be made are left out and their errors go there.
    """
    many = {"policy": "policies", "router": "routers"}[what]
    chosen, known, made = dict[str, Kept](), set[str](), list[tuple[str, dict[str, Any]]]()
    for text in texts:
        name, values, parameters = set_up(what, text, common)
        known |= {*parameters}
        try:
            chosen[text], values = make(name, values)
        except InputError as fault:
            if faults is None:
                raise
            faults[text].append(fault)
        if (name, values) in made:
            raise InputError(f"{what} {text!r} is there twice; drop one")
        made.append((name, values))
    if wrong := next((setting for setting in common if setting not in known), None):
        raise unknown(f"parameter of any of these {many}", wrong, known)
    return chosen


# -- a grid of runs

NOT_SWEPT = frozenset({"policy", "policies", "set", "classes", "stages", "seed", "routers", "set_router"})
MOST = 10_000  # runs of one sweep


class Axis(NamedTuple):
    word: str
    values: tuple[Any, ...]


class SweepTask(NamedTuple):
    at: Any  # None: there is no such axis
    label: str
    words: Experiment
    policy: str
    settings: dict[str, Any]
    router: Routed | None
    seed: int

    @property
    def fingerprint(self) -> str:
        words = self.words.model_dump(mode="json", exclude={"policy", "policies", "set", "seed"})
        settings = {key: str(value) for key, value in self.settings.items()}
        whole = [words, self.policy, settings, self.router, self.seed]
        file, own, _ = self.policy.partition(".py:")
        for path in filter(None, (self.words.trace, self.words.card, file + ".py" if own else None)):
            if Path(path).is_file():
                about = Path(path).stat()
                whole.append(_digest(Path(path).absolute(), about.st_mtime_ns, about.st_size))
        return sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _digest(file: Path, changed: int, size: int) -> str:
    return sha256(file.read_bytes()).hexdigest()


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    def value(text: str) -> Any:
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        return text

    axes: dict[str, Axis] = {}
    for text in texts:
        word, equals, rest = text.partition("=")
        values = tuple(map(value, filter(None, map(str.strip, rest.split(",")))))
        if not equals or not word.strip() or not values:
            raise InputError(f"--over {text!r} is not NAME=VALUE,VALUE,...; write it as --over rate=2,4,8")
        if len(set(values)) < len(values):
            raise InputError(f"--over {text!r} has a value twice; drop one of the two")
        name = word.strip().replace("-", "_")
        if name in NOT_SWEPT:
            raise InputError(f"--over {word}: give several --policy, --seeds or --router instead")
        if name in axes:
            raise InputError(f"--over {name} is there twice; give all its values in one: --over {name}=2,4,8")
        axes[name] = Axis(name, values)
    return list(axes.values())


def is_word(axis: Axis) -> bool:
    return axis.word in Experiment.model_fields


def expand_policies(policies: Sequence[str], axes: Sequence[Axis]) -> list[str]:
    for word, values in axes:
        expanded: list[str] = []
        known = set(Experiment.model_fields)
        for text in policies:
            name, settings = split_name(text)
            parameters = set(policy_parameters(name))
            known |= parameters
            if word in settings:
                raise InputError(f"policy {text!r} sets {word}, which is swept over; drop one of the two")
            if word not in parameters:
                expanded.append(text)
                continue
            join = "," if settings else ":"
            expanded += [f"{text}{join}{word}={value}" for value in values]
        if expanded == list(policies):
            raise unknown("setting of a run or parameter of these policies", word, known)
        policies = expanded
    return list(policies)


def with_value(words: Experiment, axis: Axis, value: Any) -> Experiment:
    kind = str(Experiment.model_fields[axis.word].annotation)
    if "float" in kind and isinstance(value, int):
        value = float(value)
    elif "bool" in kind:
        value = {"true": True, "false": False}.get(value, value)
    try:
        return experiment(words.model_dump(exclude_unset=True) | {axis.word: value})
    except InputError as error:
        raise InputError(f"--over {error}".removesuffix(", without quotes")) from None


def variants(words: Experiment, axes: Sequence[Axis]) -> dict[str, Experiment]:
    experiments = {"": words}
    for axis in axes:
        experiments = {
            f"{name}, {axis.word.replace('_', '-')}={value}": with_value(one, axis, value)
            for name, one in experiments.items()
            for value in axis.values
        }
    return experiments


def _run(task: SweepTask, command: Sequence[str]) -> Run:
    run = carry_out(
        Prepared(task.words), task.policy, task.settings, task.seed, task.label, None, task.router
    )
    run.meta.update(sweep=task.fingerprint, command=list(command))
    return run


def carry_out_all(
    tasks: Sequence[SweepTask], workers: Workers, command: Sequence[str]
) -> Iterator[tuple[SweepTask, Run]]:
    with workers.start(partial(_run, command=command), len(tasks)) as pool:
        yield from as_they_end(pool, tasks)


def by_place(runs: Sequence[tuple[SweepTask, Run]]) -> dict[Any, dict[str, list[Run]]]:
    places: dict[Any, dict[str, list[Run]]] = {}
    for task, run in runs:
        places.setdefault(task.at, {}).setdefault(task.label, []).append(run)
    return places
