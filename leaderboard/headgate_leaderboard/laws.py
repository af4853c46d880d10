"""The laws that every policy and every router must keep, tried on one of them in many small random worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError, RunError
from headgate.core.fleet import RoutePolicy
from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.request import Request, Slo
from headgate.core.view import View
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.fleet import FleetSetup, finished
from headgate.methods.make import make_policy
from headgate.methods.mixed.mixed import Mixed
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import Simulator
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.workload import OPEN_LOOP, Kind, Workload
from headgate_leaderboard.stingy_engine import serve_stingily

Make = Callable[[], BatchPolicy]  # a fresh policy for the world in hand
Progress = Callable[[int], None]  # worlds done so far
Laws = Mapping[str, Callable[[Callable[[], Any], Any], None]]  # given what makes a fresh one, and a world
TOOK_OVER = 12  # the most steps before a fresh policy takes over


@dataclass
class Verdict:
    law: str
    says: str
    worlds: int = 0  # tried in
    broken: int = 0
    first: str = ""  # where and how it was first broken


@dataclass
class LawTrial:
    policy: str
    worlds: int
    seed: int
    refused: int = 0  # worlds whose engine the policy's parameters do not fit
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return not any(verdict.broken for verdict in self.verdicts)

    def keeps(self, verdict: Verdict) -> bool:
        return not verdict.broken and 0 < verdict.worlds == self.worlds - self.refused


def try_laws(
    name: str, settings: dict[str, Any], worlds: int, seed: int, progress: Progress = lambda done: None
) -> LawTrial:
    trial = LawTrial(name, worlds, seed)
    return _try_worlds(trial, LAWS, world, lambda at: make_policy(name, settings, at.engine)[0], progress)


def try_router_laws(
    name: str, settings: dict[str, Any], worlds: int, seed: int, progress: Progress = lambda done: None
) -> LawTrial:
    trial = LawTrial(name, worlds, seed)
    return _try_worlds(trial, ROUTER_LAWS, fleet_world, lambda at: at.router(name, settings), progress)


def _try_worlds(
    trial: LawTrial, laws: Laws, drawn: Callable[[int], Any], make: Callable[[Any], Any], progress: Progress
) -> LawTrial:
    trial.verdicts = [Verdict(law, (holds.__doc__ or "").strip()) for law, holds in laws.items()]
    for number in range(trial.worlds):
        at = drawn(trial.seed + number)
        try:
            make(at)
        except InputError:
            trial.refused += 1
        else:
            _try_all(trial, laws, at, partial(make, at))
        progress(number + 1)
    if trial.refused == trial.worlds:
        make(drawn(trial.seed))
    return trial


def _try_all(trial: LawTrial, laws: Laws, at: Any, make: Callable[[], Any]) -> None:
    """Every law in one world; where the first is broken the others would only say the same."""
    for verdict in trial.verdicts:
        verdict.worlds += 1
        try:
            laws[verdict.law](make, at)
        except (BrokenLawError, RunError, InputError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, BrokenLawError) else error
            verdict.broken += 1
            verdict.first = verdict.first or f"{at}: {cause}"
            if verdict is trial.verdicts[0]:
                return


class BrokenLawError(Exception):
    """A law was broken; the text says how."""


# -- policies


def same_again(make: Make, at: World) -> None:
    """The same history gives the same plans."""
    first, second = _served(make(), at), _served(make(), at)
    _alike(first.plans, second.plans, "two runs of the same requests")
    _alike(first.schedule, second.schedule, "two runs of the same requests")


def asked_twice(make: Make, at: World) -> None:
    """Asked twice with nothing between, it gives equal plans."""
    policy = make()
    plan = policy.plan

    def twice(view: View) -> Plan:
        first, second = plan(view), plan(view)
        if first != second:
            raise BrokenLawError(f"at {view.now:.3f} s first {first}, then {second}")
        return first

    policy.plan = twice  # type: ignore[method-assign]
    _served(policy, at)


def lease(make: Make, at: World) -> None:
    """Asked more often than its leases say, it does the same."""
    kept, asked = _served(make(), at), _served(make(), at, leases=False)
    _alike(kept.schedule, asked.schedule, "with leases and asked at every step")


def ends(make: Make, at: World) -> None:
    """Every plan makes sense; everybody is served or leaves."""
    _all_left(_served(make(), at), at)


def refusal(make: Make, at: World) -> None:
    """An engine that gives less than asked: nobody is lost."""
    diary = Diary()
    mood = np.random.default_rng(at.number).random
    serve_stingily(at.engine, make(), at.workload, (diary,), mood)
    _all_left(diary, at)


def take_over(make: Make, at: World) -> None:
    """A fresh one that takes over half-way serves everybody."""
    left = int(np.random.default_rng(at.number).integers(1, TOOK_OVER + 1))

    class TakenOver(VirtualEngine):
        def advance(self, wake: float = np.inf) -> bool:
            nonlocal left
            left -= 1
            if left == 0:
                self.take_over(make())
                self.ask()
            return super().advance(wake)

    mixed = Mixed(at.engine.running, at.engine.batch_tokens)
    simulator = Simulator(at.engine, mixed, at.workload, (diary := Diary(),), kind=TakenOver)
    simulator.run()
    _all_left(diary, at)


LAWS: dict[str, Callable[[Make, World], None]] = {
    "ends": ends,
    "same again": same_again,
    "asked twice": asked_twice,
    "lease": lease,
    "refusal": refusal,
    "take-over": take_over,
}


def _served(policy: BatchPolicy, at: World, leases: bool = True) -> Diary:
    Simulator(at.engine, policy, at.workload, (diary := Diary(),), leases=leases).run()
    return diary


def _all_left(diary: Diary, at: World) -> None:
    comes = diary.came if at.workload.beside else len(at.workload)  # clients stop with the open loop
    if diary.gone != comes or comes < int((at.workload.clients == OPEN_LOOP).sum()):
        raise BrokenLawError(f"{diary.gone} of {comes} requests were served or left")


def _alike(one: list[Any], other: list[Any], what: str) -> None:
    for first, second in zip_longest(one, other):
        if first != second:
            raise BrokenLawError(f"{what} differ: {first} and {second}")


class Diary(Observer):
    def __init__(self) -> None:
        self.schedule: list[tuple[Any, ...]] = []
        self.plans: list[tuple[float, Plan]] = []
        self.came = self.gone = 0

    def arrived(self, request: Request, now: float) -> None:
        self.came += 1

    def admitted(self, request: Request, now: float) -> None:
        self.schedule.append(("admitted", request.id, now))

    def evicted(self, request: Request, now: float) -> None:
        self.schedule.append(("evicted", request.id, now))

    def finished(self, request: Request, now: float, how: End) -> None:
        self.gone += 1
        self.schedule.append((how.value, request.id, now, request.generated))

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self.plans.append((now, plan))

    def stepped(self, steps: Steps) -> None:
        """One entry per step: runs of equal steps are cut differently when a policy is asked more often."""
        self.schedule += [
            ("step", float(end), steps.decodes, steps.context + place * steps.decodes, steps.prefill)
            for place, end in enumerate(steps.ends)
        ]


class World(NamedTuple):
    number: int
    engine: Engine
    workload: Workload

    def __str__(self) -> str:
        engine = self.engine
        return (
            f"world {self.number}: {len(self.workload)} requests, {engine.running} slots, "
            f"{engine.batch_tokens} tokens a step, {engine.kv_tokens} KV tokens"
        )


# -- routers

MOST_ENGINES, MOST_KINDS = 4, 3
TRANSFER = Transfer(0.4, 0.01)


class FleetWorld(NamedTuple):
    setup: FleetSetup
    workload: Workload
    alone: World

    def __str__(self) -> str:
        return f"{self.alone}, {self.setup.engines} engines, {len(self.workload.kinds)} kinds"

    def router(self, name: str, settings: dict[str, Any]) -> RoutePolicy:
        return self.setup.router(name, settings, self.workload, self.alone.number)[0]

    def serve(self, router: RoutePolicy) -> Run:
        slots, budget = self.setup.engine.running, self.setup.engine.batch_tokens
        return finished(self.setup.run(lambda role: Mixed(slots, budget), router, self.workload))


def fleet_world(number: int) -> FleetWorld:
    alone = world(number)
    draw = np.random.default_rng((number, 1))
    engine = alone.engine
    running = max(2, engine.running)  # a prompt beside a decode
    engine = engine._replace(running=running, batch_tokens=max(running, engine.batch_tokens))
    kinds = tuple(Kind(f"kind{place}") for place in range(int(draw.integers(1, MOST_KINDS + 1))))
    one_loop = alone.workload.beside  # of a class drawn for each request, none is both open and closed
    workload = alone.workload.subset(alone.workload.clients == OPEN_LOOP) if one_loop else alone.workload
    workload = replace(workload, kinds=kinds, kind=draw.integers(0, len(kinds), len(workload)))
    setup = FleetSetup(engine, int(draw.integers(1, MOST_ENGINES + 1)), TRANSFER)
    return FleetWorld(setup, workload, alone)


MakeRouter = Callable[[], RoutePolicy]  # a fresh router for the fleet in hand


def router_ends(make: MakeRouter, at: FleetWorld) -> None:
    """Every move makes sense; every request is served or leaves."""
    run = at.serve(make())
    left = int((run.requests["how"] < 0).sum())
    if left:
        raise BrokenLawError(f"{left} of {len(at.workload)} requests neither served nor gone")


def router_same_again(make: MakeRouter, at: FleetWorld) -> None:
    """The same history gives the same moves."""
    first, second = at.serve(make()).requests, at.serve(make()).requests
    for column, values in first.items():
        if not np.array_equal(values, second[column], equal_nan=values.dtype.kind == "f"):
            raise BrokenLawError(f"two runs of the same requests differ in {column}")


ROUTER_LAWS: dict[str, Callable[[MakeRouter, FleetWorld], None]] = {
    "ends": router_ends,
    "same again": router_same_again,
}


# -- random worlds

COST = LinearCost(
    DecodeTerms(constant=1.0, per_decode=0.05, per_context=0.001),
    PrefillTerms(constant=0.4, per_token=0.01),
    MixedTerms(constant=1.2, per_prefill=0.012, per_decode=0.06, per_context=0.001),
)
MOST_REQUESTS, MOST_SLOTS, MOST_TOKENS = 25, 8, 64
LONGEST_PROMPT = 60
NEVER = np.inf
CLASSES = (
    Kind("none"),
    Kind("chat", Slo(6.0, 4.0)),
    Kind("gold", Slo(6.0, 4.0, weight=10.0)),
    Kind("urgent", Slo(first_token=0.5), priority=-1),
    Kind("background", Slo(background=True)),
)
TENANTS = ("", "good", "flood")


def world(number: int) -> World:
    draw = np.random.default_rng(number)
    slots = int(draw.integers(1, MOST_SLOTS + 1))
    kv_tokens = int(draw.integers(20, 120) if draw.random() < 0.5 else draw.integers(64, 600))
    longest, budget = int(draw.choice([50, 100, 10_000])), int(draw.integers(slots, MOST_TOKENS + 1))
    engine = Engine(COST, kv_tokens, longest, budget, slots, block=int(draw.choice([1, 4, 16])))
    return World(number, engine, _beside(draw, _workload(draw)))


def _workload(draw: np.random.Generator) -> Workload:
    count = int(draw.integers(1, MOST_REQUESTS + 1))
    columns: dict[str, Any] = {"limit": draw.choice([2**31 - 1, 1, 7], count)}
    if draw.random() < 0.5:
        columns["clients"] = draw.integers(1, 9, count)
    else:
        columns["arrival"] = np.cumsum(draw.choice([0.0, 0.0, 0.3, 1.7, 12.25, 60.5], count))
    if draw.random() < 0.5:
        columns["patience"] = draw.choice([NEVER, 0.1, 0.5, 2.5, 20.0], count)
        columns["abort"] = draw.choice([NEVER, NEVER, 0.1, 3.5, 30.0], count)
    prompts, outputs = draw.integers(1, LONGEST_PROMPT + 1, count), draw.choice([1, 2, 3, 9, 30, 140], count)
    if draw.random() < 0.5:
        columns["kind"], columns["kinds"] = draw.integers(0, len(CLASSES), count), CLASSES
    if draw.random() < 0.5:
        columns["tenant"], columns["tenants"] = draw.integers(0, len(TENANTS), count), TENANTS
    return Workload.of(prompts, outputs, **columns)


def _beside(draw: np.random.Generator, workload: Workload) -> Workload:
    if workload.closed or draw.random() < 0.5:
        return workload
    count = int(draw.integers(1, MOST_REQUESTS + 1))
    prompts, outputs = draw.integers(1, LONGEST_PROMPT + 1, count), draw.choice([1, 2, 3, 9, 30], count)
    kinds = [Kind("clients", Slo(background=bool(draw.random() < 0.5)))]
    columns: dict[str, Any] = {"clients": int(draw.integers(1, 5))}
    columns["tenant"] = draw.integers(0, len(TENANTS), count)
    return workload.merge(Workload.of(prompts, outputs, kinds=kinds, tenants=TENANTS, **columns))
