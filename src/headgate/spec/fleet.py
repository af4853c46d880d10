"""A router by name for a plan, and a stochastic network run under it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.core.errors import InputError, unknown
from headgate.core.fleet import RoutePolicy
from headgate.drivers.books import Window
from headgate.drivers.network import Network
from headgate.drivers.source import LAWS, Poisson, uniforms
from headgate.planners.fluid_plan import FluidPlan
from headgate.policies import ROUTE
from headgate.workloads.streams import stream

GIVEN = ("plan", "engines", "draw")  # what the run itself brings; the rest are settings


def make_router(
    name: str, plan: FluidPlan, engines: int, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> RoutePolicy:
    """A router by name; chance comes from the seed's stream for routers."""
    if name not in ROUTE:
        raise unknown("router", name, ROUTE)
    wanted = inspect.signature(ROUTE[name]).parameters
    own = [word for word in wanted if word not in GIVEN]
    for word in settings or {}:
        if word not in own:
            raise (
                unknown(f"parameter of router {name}", word, own)
                if own
                else InputError(f"router {name} has no parameters; drop {word}")
            )
    have = {"plan": plan, "engines": engines, "draw": uniforms(stream(seed, "router"))}
    return ROUTE[name](**{word: have[word] for word in GIVEN if word in wanted}, **(settings or {}))


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
