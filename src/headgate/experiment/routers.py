"""A router by name for a fleet, and a stochastic network run under it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headgate.core.errors import InputError, unknown
from headgate.core.fleet import RoutePolicy
from headgate.sim.fleet.network.counts import Window
from headgate.sim.fleet.network.network import Network
from headgate.sim.fleet.network.source import LAWS, Poisson, uniforms
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.names import ROUTE
from headgate.experiment.build import typed
from headgate.workloads.streams import stream

GIVEN = ("plan", "engines", "draw")  # what the run itself brings; the rest are settings
Planned = FluidPlan | Callable[[], FluidPlan]  # a plan, or how to make one if the router wants it


def router_parameters(name: str) -> dict[str, inspect.Parameter]:
    """What one may set of a router."""
    if name not in ROUTE:
        raise unknown("router", name, ROUTE)
    parameters = inspect.signature(ROUTE[name]).parameters
    return {word: each for word, each in parameters.items() if word not in GIVEN}


def router_settings(name: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings in the types their parameters have; unknown ones are refused."""
    own = router_parameters(name)
    for word in settings or {}:
        if word not in own:
            raise (
                unknown(f"parameter of router {name}", word, own)
                if own
                else InputError(f"router {name} has no parameters; drop {word}")
            )
    return {word: typed(f"router {name}", own[word], value) for word, value in (settings or {}).items()}


def make_router(
    name: str, plan: Planned, engines: int, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> RoutePolicy:
    """A router by name; chance comes from the seed's stream for routers."""
    values = router_settings(name, settings)
    wanted = inspect.signature(ROUTE[name]).parameters
    have: dict[str, Any] = {"engines": engines, "draw": uniforms(stream(seed, "router"))}
    if "plan" in wanted:
        have["plan"] = plan() if callable(plan) else plan
    missing = [
        word
        for word, each in router_parameters(name).items()
        if each.default is each.empty and word not in values
    ]
    if missing:
        raise InputError(f"router {name} needs {missing[0]}; write {name}:{missing[0]}=VALUE")
    return ROUTE[name](**{word: have[word] for word in GIVEN if word in wanted}, **values)


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
