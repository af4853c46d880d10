"""The laws every batch policy must keep, tried on one policy in many small random worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from headgate.core.errors import InputError, RunError
from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.experiment.worlds import World, world
from headgate.methods.make import make_policy
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.replica import Replica
from headgate.sim.engine.simulator import Simulator
from headgate.sim.engine.stingy_engine import serve_stingily

Make = Callable[[], BatchPolicy]  # a fresh policy for the world in hand
TOOK_OVER = 12  # the most steps before a fresh policy takes over


class BrokenLawError(Exception):
    """A law was broken; the text says how."""


class Diary(Observer):
    """What happened, one entry after the other, so that two runs can be compared."""

    def __init__(self) -> None:
        self.schedule: list[tuple[Any, ...]] = []
        self.plans: list[tuple[float, Plan]] = []
        self.gone = 0

    def admitted(self, request: Request, now: float) -> None:
        self.schedule.append(("admitted", request.id, now))

    def evicted(self, request: Request, now: float) -> None:
        self.schedule.append(("evicted", request.id, now))

    def finished(self, request: Request, now: float, how: End) -> None:
        self.gone += 1
        self.schedule.append((how.value, request.id, now, request.generated))

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """A new plan came into force."""
        self.plans.append((now, plan))

    def stepped(self, steps: Steps) -> None:
        """One entry per step: runs of equal steps are cut differently when a policy is asked more often."""
        self.schedule += [
            ("step", float(end), steps.decodes, steps.context + place * steps.decodes, steps.prefill)
            for place, end in enumerate(steps.ends)
        ]


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
    _everybody(_served(make(), at), at)


def refusal(make: Make, at: World) -> None:
    """An engine that gives less than asked: nobody is lost."""
    diary = Diary()
    mood = np.random.default_rng(at.number).random
    serve_stingily(at.engine, make(), at.workload, (diary,), mood)
    _everybody(diary, at)


def take_over(make: Make, at: World) -> None:
    """A fresh one that takes over half-way serves everybody."""
    left = int(np.random.default_rng(at.number).integers(1, TOOK_OVER + 1))

    class TakenOver(Replica):
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
    _everybody(diary, at)


LAWS: dict[str, Callable[[Make, World], None]] = {
    "ends": ends,
    "same again": same_again,
    "asked twice": asked_twice,
    "lease": lease,
    "refusal": refusal,
    "take-over": take_over,
}


@dataclass
class Verdict:
    """What became of one law."""

    law: str
    says: str
    worlds: int = 0  # tried in
    broken: int = 0
    first: str = ""  # where and how it was first broken


@dataclass
class Trial:
    """All laws on one policy."""

    policy: str
    worlds: int
    seed: int
    refused: int = 0  # worlds whose engine the policy's parameters do not fit
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return not any(verdict.broken for verdict in self.verdicts)

    def keeps(self, verdict: Verdict) -> bool:
        """Whether a law was tried in every world that fits, and held there."""
        return not verdict.broken and 0 < verdict.worlds == self.worlds - self.refused


def try_laws(
    name: str,
    settings: dict[str, Any],
    worlds: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Trial:
    """Every law in worlds `seed`, `seed + 1`, ..."""

    def make(at: World) -> BatchPolicy:
        return make_policy(name, settings, at.engine)[0]

    return try_worlds(Trial(name, worlds, seed), LAWS, world, make, progress)


def try_worlds(
    trial: Trial,
    laws: Mapping[str, Callable[[Callable[[], Any], Any], None]],
    drawn: Callable[[int], Any],
    make: Callable[[Any], Any],
    progress: Callable[[int], None],
) -> Trial:
    """Every law of policies or routers in every world; where none fits, the first says why."""
    trial.verdicts = [Verdict(law, (holds.__doc__ or "").strip()) for law, holds in laws.items()]
    for number in range(trial.worlds):
        _try_all(trial, laws, drawn(trial.seed + number), make)
        progress(number + 1)
    if trial.refused == trial.worlds:
        make(drawn(trial.seed))
    return trial


def _try_all(
    trial: Trial,
    laws: Mapping[str, Callable[[Callable[[], Any], Any], None]],
    at: Any,
    make: Callable[[Any], Any],
) -> None:
    """Every law in one world; where the first is broken the others would only say the same."""
    try:
        make(at)
    except InputError:
        trial.refused += 1
        return
    for verdict in trial.verdicts:
        verdict.worlds += 1
        try:
            laws[verdict.law](lambda: make(at), at)
        except (BrokenLawError, RunError, InputError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, BrokenLawError) else error
            verdict.broken += 1
            verdict.first = verdict.first or f"{at}: {cause}"
            if verdict is trial.verdicts[0]:
                return


def _served(policy: BatchPolicy, at: World, leases: bool = True) -> Diary:
    Simulator(at.engine, policy, at.workload, (diary := Diary(),), leases=leases).run()
    return diary


def _everybody(diary: Diary, at: World) -> None:
    if diary.gone != len(at.workload):
        raise BrokenLawError(f"{diary.gone} of {len(at.workload)} requests were served or left")


def _alike(one: list[Any], other: list[Any], what: str) -> None:
    for first, second in zip_longest(one, other):
        if first != second:
            raise BrokenLawError(f"{what} differ: {first} and {second}")
