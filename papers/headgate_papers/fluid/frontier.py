"""Revenue along one service level: the Pareto frontiers of figure 8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.plan import NO_LEVELS, FluidPlan
from headgate.methods.fluid.planner import plan_fluid

CAPS = ("prefill_fairness", "decode_fairness", "tpot")


class Point(NamedTuple):
    value: float
    plan: FluidPlan | None
    slope: float  # dR/d(value) at a service level; 0 in other sweeps

    @property
    def revenue(self) -> float:
        return self.plan.revenue if self.plan else 0.0


def frontier(
    instance: Instance, level: str, values: Iterable[float], others: Levels = NO_LEVELS
) -> list[Point]:
    """R(η) along one cap, Pareto-optimal by construction; slopes are the caps' shadow prices."""
    if level not in CAPS:
        raise unknown("service level", level, CAPS)
    points = []
    for value in values:
        cap: dict[str, Any] = {level: value}
        try:
            plan = plan_fluid(instance, replace(others, **cap))
        except InputError:
            points.append(Point(value, None, 0.0))
        else:
            points.append(Point(value, plan, plan.shadows.levels[level]))
    return points
