"""One run of the stochastic network under a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headgate.core.errors import unknown
from headgate.experiment.fleet import make_router
from headgate.methods.fluid.plan import FluidPlan
from headgate_papers.network.counts import Window
from headgate_papers.network.network import Network
from headgate_papers.network.source import LAWS, Poisson


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
