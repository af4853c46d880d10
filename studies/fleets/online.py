"""Estimated against known rates: `online` after a shift, beside routers that know or never learn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

import numpy as np

from headgate.core.fleet import Fleet, Move, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.experiment.fleet import make_router
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.online import HALF_LIFE
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.network.counts import Window
from headgate_papers.network.network import Network
from headgate_papers.network.source import Shifting
from studies.fleets.worlds import CODE, SUMMARY, instance

SEEDS = 3
WHEN = 300.0  # seconds until the shift
CONSTANT = HALF_LIFE / log(2)
WINDOW = 600.0  # seconds that are looked at, from two time constants after the shift on
STEP = 30.0


@dataclass(frozen=True)
class Shift:
    """What changes."""

    label: str
    before: Instance
    after: Instance
    engines: int = 20


def _longer(base: Instance, outputs: tuple[float, ...]) -> Instance:
    flows = tuple(replace(flow, output=d) for flow, d in zip(base.flows, outputs, strict=True))
    return replace(base, flows=flows)


SHIFTS = {
    "mix": Shift(
        "code 1.0 to 0.2, paper 0.2 to 1.2 arrivals per second and engine",
        instance((CODE, SUMMARY), (1.0, 0.2)),
        instance((CODE, SUMMARY), (0.2, 1.2)),
    ),
    "load": Shift(
        "both 0.3 to 1.0 arrivals per second and engine",
        instance((CODE, SUMMARY), (0.3, 0.3)),
        instance((CODE, SUMMARY), (1.0, 1.0)),
    ),
    "outputs": Shift(
        "outputs of code 1,000 to 300 tokens, of paper 400 to 1,500; both 0.6 arrivals",
        instance((CODE, SUMMARY), (0.6, 0.6)),
        _longer(instance((CODE, SUMMARY), (0.6, 0.6)), (300.0, 1500.0)),
    ),
    "closed": Shift(
        "outputs of code, which nobody serves, 1,000 to 20 tokens; both 2 arrivals",
        instance((CODE, SUMMARY), (2.0, 2.0)),
        _longer(instance((CODE, SUMMARY), (2.0, 2.0)), (20.0, 400.0)),
    ),
}


class Knowing(RoutePolicy):
    """The right plan from the first moment: the router and all roles change when the traffic does."""

    def __init__(self, first: RoutePolicy, second: RoutePolicy, when: float) -> None:
        self.inner, self.second, self.when = first, second, when
        self.sends_at_once, self.hands_over = first.sends_at_once, first.hands_over

    def roles(self, engines: int) -> tuple[str, ...]:
        """Those of the plan in force."""
        return self.inner.roles(engines)

    def arrived(self, request: Request, now: float) -> None:
        """Passed on."""
        self.inner.arrived(request, now)

    def moved(self, request: Request, move: Move, now: float) -> None:
        """Passed on."""
        self.inner.moved(request, move, now)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Passed on."""
        self.inner.prefilled(request, replica, now)

    def finished(self, request: Request, replica: int, now: float) -> None:
        """Passed on."""
        self.inner.finished(request, replica, now)

    def left(self, request: Request, now: float, how: End) -> None:
        """Passed on."""
        self.inner.left(request, now, how)

    def route(self, fleet: Fleet) -> Routing:
        """The router of the day; at the shift the other one takes over, with all its roles at once."""
        if fleet.now >= self.when:
            self.when = float("inf")
            self.second.adopt(fleet, self.inner)
            self.inner = self.second
            return Routing(roles=tuple(enumerate(self.inner.roles(len(fleet.replicas)))))
        return self.inner.route(fleet)


def router(name: str, shift: Shift, inner: str, seed: int) -> RoutePolicy:
    """`online`, one that `knows`, or one that keeps its `first plan`."""
    before, after = plan_fluid(shift.before), plan_fluid(shift.after)
    if name == "online":
        return make_router("online", before, shift.engines, seed, {"router": inner})
    first = make_router(inner, before, shift.engines, seed)
    if name == "first plan":
        return first
    return Knowing(first, make_router(inner, after, shift.engines, seed), WHEN)


def revenues(name: str, shift: Shift, inner: str, seed: int, marks: list[float]) -> list[float]:
    """Per second and engine, between the marks, at the values of the instance after the shift."""
    source = Shifting(shift.before, shift.after, WHEN, shift.engines, seed)
    made = router(name, shift, inner, seed)
    pages = Network(shift.before, shift.engines, made, source).run(marks[-1], marks[:-1])
    windows = pairwise(pages)
    return [Window(shift.after, shift.engines, one, two).revenue() for one, two in windows]


def settled(shift: Shift, inner: str, seed: int, seconds: float = WINDOW) -> tuple[float, float, float]:
    """Revenue from two time constants after the shift on: online, knowing, never learning."""
    start = WHEN + 2 * CONSTANT
    found = [
        revenues(n, shift, inner, seed, [start, start + seconds])[0]
        for n in ("online", "knows", "first plan")
    ]
    return found[0], found[1], found[2]


def main(quick: bool) -> None:
    for inner in ("gate-and-route+", "token-bucket", "density-first"):
        start = f"from {2 * CONSTANT:.0f} s after the shift on"
        print(f"\nRouter `{inner}`, revenue per second and engine {start}:\n")
        print("| shift | optimum after it | knows | online | online / knows, by seed | first plan / knows |")
        print("|---|---|---|---|---|---|")
        for shift in SHIFTS.values():
            rows = np.array(
                [settled(shift, inner, seed, WINDOW / (10 if quick else 1)) for seed in range(SEEDS)]
            )
            ratios = ", ".join(f"{online / knows:.3f}" for online, knows, _ in rows.tolist())
            online, knows, stale = rows.mean(axis=0).tolist()
            best = plan_fluid(shift.after).revenue
            told = f"{best:.1f} | {knows:.1f} | {online:.1f} | {ratios} | {stale / knows:.3f}"
            print(f"| {shift.label} | {told} |", flush=True)
    _course()


def _course() -> None:
    """How fast it gets there."""
    shift, inner = SHIFTS["mix"], "gate-and-route+"
    marks = [WHEN - STEP + STEP * n for n in range(12)]
    names = ("knows", "online", "first plan")
    rows = {n: np.mean([revenues(n, shift, inner, s, marks) for s in range(SEEDS)], axis=0) for n in names}
    print(f"\nThe first shift by time, `{inner}`, mean of {SEEDS} seeds, share of the optimum after it:\n")
    print("| seconds after the shift | " + " | ".join(names) + " |")
    print("|---" * (1 + len(names)) + "|")
    best = plan_fluid(shift.after).revenue
    for place in range(1, len(marks) - 1):
        cells = " | ".join(f"{rows[name][place] / best:.3f}" for name in names)
        print(f"| {marks[place] - WHEN:.0f} to {marks[place + 1] - WHEN:.0f} | {cells} |")
