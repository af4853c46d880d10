"""A router for a fleet that is simulated, and a stochastic network run under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.core.errors import unknown
from headgate.core.fleet import RoutePolicy
from headgate.methods import make
from headgate.methods.balance.prefix_index import Sharing
from headgate.methods.fluid.plan import FluidPlan
from headgate.sim.fleet.network.counts import Window
from headgate.sim.fleet.network.network import Network
from headgate.sim.fleet.network.source import LAWS, Poisson, uniforms
from headgate.workloads.streams import stream

Planned = FluidPlan | Callable[[], FluidPlan]  # a plan, or how to make one if the router wants it


def make_router(
    name: str,
    plan: Planned,
    engines: int,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    sharing: Callable[[], Sharing | None] = lambda: None,
) -> RoutePolicy:
    """A router by name; chance comes from the seed's stream for routers."""
    given: dict[str, Callable[[], Any]] = {
        "plan": plan if callable(plan) else lambda: plan,
        "engines": lambda: engines,
        "draw": lambda: uniforms(stream(seed, "router")),
        "sharing": sharing,
    }
    return make.make_router(name, given, settings or {})


def run_network(
    plan: FluidPlan,
    router: str,
    engines: int,
    seed: int = 0,
    marks: Sequence[float] = (0.0,),
    until: float = 1000.0,
    law: str = "exponential",
    settings: Mapping[str, Any] | None = None,
) -> list[Window]:
    """Arrivals of the plan's classes to so many engines; the windows between the marks and the end."""
    if law not in LAWS:
        raise unknown("law of phases", law, LAWS)
    made = make_router(router, plan, engines, seed, settings)
    source = Poisson(plan.instance, engines, seed, law)
    return Network(plan.instance, engines, made, source).windows(until, marks)
