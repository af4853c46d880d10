"""What a service level costs, and how a plan depends on the engine and the prices: sweeps of fluid plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import NO_LEVELS, FluidPlan, FluidPlanner, plan_fluid

CAPS = ("prefill_fairness", "decode_fairness", "tpot")
PACE = ("seats", "chunk", "mixed_fixed", "mixed_per_token", "solo_speed")
PRICES = ("prompt_price", "output_price")
WHOLE = ("seats", "chunk")
PARAMETERS = (*PACE, *PRICES)


class Point(NamedTuple):
    """One plan of a sweep; None where the level cannot be kept."""

    value: float
    plan: FluidPlan | None
    slope: float  # dR/d(value) at a service level; 0 in other sweeps

    @property
    def revenue(self) -> float:
        """R of this plan, 0 where there is none."""
        return self.plan.revenue if self.plan else 0.0


def frontier(
    instance: Instance, level: str, values: Iterable[float], others: Levels = NO_LEVELS
) -> list[Point]:
    """R(η) along one cap, Pareto-optimal by construction; slopes are the caps' shadow prices."""
    if level not in CAPS:
        raise unknown("service level", level, CAPS)
    planner, points = FluidPlanner(), []
    for value in values:
        cap: dict[str, Any] = {level: value}
        planner.levels = replace(others, **cap)
        try:
            plan = planner.plan(instance)
        except InputError:
            points.append(Point(value, None, 0.0))
        else:
            points.append(Point(value, plan, plan.shadows.levels[level]))
    return points


def sensitivity(instance: Instance, parameter: str, values: Iterable[float]) -> list[Point]:
    """The best plan for each value of one parameter of the engine or the prices, all else equal."""
    planner = FluidPlanner()
    return [Point(value, planner.plan(with_parameter(instance, parameter, value)), 0.0) for value in values]


def with_parameter(instance: Instance, parameter: str, value: float) -> Instance:
    """The same with one number changed."""
    if parameter not in PARAMETERS:
        raise unknown("parameter", parameter, PARAMETERS)
    change: dict[str, Any] = {parameter.removesuffix("_price"): value}
    if parameter in PACE:
        return replace(instance, pace=replace(instance.pace, **change))
    return replace(instance, prices=replace(instance.prices, **change))


def elasticity(instance: Instance, parameter: str, levels: Levels = NO_LEVELS, step: float = 1e-4) -> float:
    """Percent of revenue per percent of a parameter, from both sides; whole numbers change by one."""
    owner = instance.pace if parameter in PACE else instance.prices
    old = float(getattr(owner, parameter.removesuffix("_price")))
    here = plan_fluid(instance, levels).revenue
    if old <= 0 or here <= 0:
        return 0.0
    change = 1 if parameter in WHOLE else step * old
    low, high = max(old - change, 1 if parameter in WHOLE else 0.0), old + change
    ends = [plan_fluid(with_parameter(instance, parameter, value), levels).revenue for value in (low, high)]
    return (ends[1] - ends[0]) / (high - low) * old / here
