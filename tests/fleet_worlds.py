"""Small fleets that tests share: finite lists of requests, random plans, and a router that writes a log."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from headgate.core.fleet import Fleet, Move, RoutePolicy, Routing, Stage
from headgate.core.roster import Roster
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import FluidPlan, plan_fluid
from headgate.methods.make import router_class
from headgate.methods.names import ROUTE
from headgate.workloads.streams import uniforms
from headgate_papers.network.network import Network
from headgate_papers.network.source import Block

# Of headgate-papers, found by their entry points.
BASELINES = ("fi-wsp", "gi-wsp", "gf-wsp", "fg-sp", "prioritize-and-route")
ROUTERS = (*ROUTE, *BASELINES)


class Listed:
    """A source of these requests: (time, kind, prompt seconds, output tokens, patience, decode patience)."""

    def __init__(self, *rows: tuple[float, int, float, float, float, float]) -> None:
        self.rows = list(rows)

    def next_block(self) -> Block | None:
        rows, self.rows = self.rows[:7], self.rows[7:]  # short blocks, so that turning pages is tested too
        return Block(*map(list, zip(*rows, strict=True))) if rows else None


def carry_out(move: Move, roster: Roster, router: RoutePolicy) -> Move:
    """Do with a request what the move says, and tell the router."""
    request, slot = roster.find(move)
    if move.stage is Stage.DECODE:
        roster.start_decode(request, slot)
    else:
        roster.start_prompt(request, slot, move.stage)
    router.moved(request, move, 0.0)
    return move


class Watched(RoutePolicy):
    """Passes everything on, and writes down what happens."""

    def __init__(self, inner: RoutePolicy) -> None:
        self.inner = inner
        self.sends_at_once, self.hands_over = inner.sends_at_once, inner.hands_over
        self.log: list[tuple[Any, ...]] = []

    def roles(self, engines):
        self.began = self.inner.roles(engines)
        return self.began

    def arrived(self, request, now):
        self.log.append(("arrived", now, request.id, request.kind))
        self.inner.arrived(request, now)

    def moved(self, request, move, now):
        self.log.append(("moved", now, request.id, move.replica, move.stage))
        self.inner.moved(request, move, now)

    def prefilled(self, request, replica, now):
        self.log.append(("prefilled", now, request.id, replica))
        self.inner.prefilled(request, replica, now)

    def finished(self, request, replica, now):
        self.log.append(("finished", now, request.id, replica))
        self.inner.finished(request, replica, now)

    def left(self, request, now, how):
        self.log.append(("left", now, request.id, how))
        self.inner.left(request, now, how)

    def returned(self, request, now):
        self.log.append(("returned", now, request.id))
        self.inner.returned(request, now)

    def route(self, fleet: Fleet) -> Routing:
        return self.inner.route(fleet)

    def adopt(self, fleet, before=None):
        self.inner.adopt(fleet, before.inner if isinstance(before, Watched) else before)

    def engines_changed(self, fleet):
        self.log.append(("engines", fleet.now, -1, [replica.role for replica in fleet.replicas]))
        self.inner.engines_changed(fleet)


def draws(seed: int) -> Callable[[], float]:
    return uniforms(np.random.Generator(np.random.PCG64(seed)))


def make_router(
    name: str, plan: FluidPlan, engines: int, draw: Callable[[], float], **more: Any
) -> RoutePolicy:
    """A router by its name, with what its constructor asks for."""
    have = {"plan": plan, "engines": engines, "draw": draw, **more}
    router = router_class(name)
    wanted = inspect.signature(router).parameters
    return router(**{word: value for word, value in have.items() if word in wanted})


class World(NamedTuple):
    """A plan, engines and the requests they meet."""

    plan: FluidPlan
    engines: int
    rows: Sequence[tuple[float, int, float, float, float, float]]

    def run(self, name: str, seed: int = 0, **more: Any) -> tuple[Network, Watched]:
        router = Watched(make_router(name, self.plan, self.engines, draws(seed), **more))
        network = Network(self.plan.instance, self.engines, router, Listed(*self.rows))
        network.run()
        return network, router


PATIENCE = st.sampled_from([0.0, 0.1, 2.0])
LEVELS = st.sampled_from([Levels(), Levels(), Levels(decode_fairness=0.1), Levels(prefill_fairness=0.0)])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to three kinds, five engines and forty requests, with ties in time and kinds nobody serves."""
    flows = tuple(
        Flow(
            f"kind{number}",
            draw(st.sampled_from([10.0, 200.0])),
            draw(st.sampled_from([5.0, 60.0])),
            draw(st.sampled_from([0.0, 0.3, 4.0])) or (0.3 if number == 0 else 0.0),
            draw(PATIENCE),
        )
        for number in range(draw(st.integers(1, 3), label="kinds"))
    )
    pace = EnginePace(
        draw(st.integers(2, 4), label="slots"), 16, 0.05, draw(st.sampled_from([1e-4, 5e-3])), 12.0
    )
    charging = draw(st.sampled_from(["bundled", "bundled", "separate"]))
    plan = plan_fluid(Instance(flows, pace, TokenPrices(0.1, 0.2), charging), draw(LEVELS))
    count = draw(st.integers(0, 40), label="requests")
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.2, 3.0]), min_size=count, max_size=count))
    rows, now = [], 0.0
    for gap in gaps:
        now += gap
        kind = draw(st.integers(0, len(flows) - 1))
        patient = flows[kind].impatience == 0
        rows.append(
            (
                now,
                kind,
                draw(st.sampled_from([0.1, 0.5, 4.0])),
                draw(st.sampled_from([1.0, 12.0, 90.0])),
                inf if patient else draw(st.sampled_from([0.0, 0.5, 8.0])),
                inf if patient else draw(st.sampled_from([0.3, 20.0])),
            )
        )
    return World(plan, draw(st.integers(1, 5), label="engines"), rows)
