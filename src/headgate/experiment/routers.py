"""A router for a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headgate.core.fleet import RoutePolicy
from headgate.methods import make
from headgate.methods.balance.prefix_index import Sharing
from headgate.methods.fluid.plan import FluidPlan
from headgate.workloads.streams import stream, uniforms

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
