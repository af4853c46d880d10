"""Figure 9 of the gate-and-route paper: revenue and TPOT against slots, alpha, beta and gamma."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any

from headgate.core.errors import unknown
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.frontier import Point
from headgate_papers.fluid.network_runs import NetworkJob
from headgate_papers.fluid.published import FIG9_ALPHA_REVENUE, FIG9_SATURATES, LIKELY_SLOTS, two_classes
from headgate_papers.report import Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig9"
ABOUT = "revenue and time per token against slots, alpha, beta and gamma"
VALUES: dict[str, tuple[float, ...]] = {
    "slots": (1, 2, 4, 8, 12, 16, 17, 24, 32),
    "mixed_fixed": (0.001, 0.02, 0.04, 0.06, 0.08, 0.1),
    "mixed_per_token": (1e-5, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3),
    "solo_speed": (0.1, 10, 20, 30, 40, 45.45, 50),
}
TITLES = {
    "slots": "Slots B",
    "mixed_fixed": "alpha, s",
    "mixed_per_token": "beta, s/token",
    "solo_speed": "gamma, tokens/s",
}
PACE = ("slots", "chunk", "mixed_fixed", "mixed_per_token", "solo_speed")
PARAMETERS = (*PACE, "prompt_price", "output_price")
ENOUGH = 0.999  # of the revenue with plenty of slots


def jobs(options: Options) -> list[NetworkJob]:
    """Linear programs only."""
    return []


def judge(results: Outcomes, options: Options) -> Report:
    """One table per panel."""
    panels = {name: _panel(name, values) for name, values in VALUES.items()}
    saturates = _saturation()
    low, high = FIG9_ALPHA_REVENUE
    stated = [point.revenue for point in sensitivity(two_classes(), "mixed_fixed", VALUES["mixed_fixed"])]
    return Report(
        NAME,
        "sensitivity of the plan to the engine",
        (
            "Base instance, 0.5 arrivals per second, engine and class; linear programs with a queue before "
            f"decode allowed. Panels of alpha, beta and gamma: {LIKELY_SLOTS} slots, which their axes fit.",
        ),
        (
            Section(
                "Slots from which more bring nothing",
                "",
                ("slots",),
                (Row("saturation", (Cell(FIG9_SATURATES, saturates),)),),
            ),
            *panels.values(),
        ),
        _counts(panels, saturates),
        (
            f"Below gamma = {_condition():.1f} (with {LIKELY_SLOTS} slots) the paper's own condition for its "
            "policy does not hold, for decoding beside a prompt is then faster than alone by more than the "
            "slot it costs; the printed axis goes down to 0.",
            f"With 16 slots the alpha panel would run from {stated[-1]:.0f} to {stated[0]:.0f}, outside its "
            f"printed axis {low:.0f} to {high:.0f}.",
        ),
    )


def _counts(panels: dict[str, Section], saturates: float) -> tuple[Count, ...]:
    fixed = [row.cells[0].ours for row in panels["mixed_fixed"].rows]
    low, high = FIG9_ALPHA_REVENUE
    return (
        Count("saturates near 16 slots (within 2)", int(abs(saturates - FIG9_SATURATES) <= 2), 1),
        Count(
            "revenue falls with alpha and beta",
            sum(map(_falls, (panels["mixed_fixed"], panels["mixed_per_token"]))),
            2,
        ),
        Count("revenue rises with gamma", int(_falls(panels["solo_speed"], -1)), 1),
        Count(
            f"alpha panel within its printed axis, {low:.0f} to {high:.0f} (give or take 10)",
            sum(low - 10 <= value <= high + 10 for value in fixed),
            len(fixed),
        ),
    )


def _panel(name: str, values: tuple[float, ...]) -> Section:
    slots = 16 if name == "slots" else LIKELY_SLOTS
    points = sensitivity(two_classes(slots=slots), name, [int(v) if name == "slots" else v for v in values])
    rows = [
        Row(f"{point.value:g}", (Cell(nan, point.revenue), Cell(nan, point.plan.tpot if point.plan else nan)))
        for point in points
    ]
    return Section(
        f"{TITLES[name]}: revenue per engine and TPOT", TITLES[name], ("revenue", "TPOT, s"), tuple(rows)
    )


def _saturation() -> float:
    points = sensitivity(two_classes(), "slots", range(1, 36))
    return next(point.value for point in points if point.revenue >= ENOUGH * points[-1].revenue)


def _condition() -> float:
    """The solo speed at which Proposition 1 begins to hold."""
    return (LIKELY_SLOTS - 1) / LIKELY_SLOTS / two_classes().pace.mixed_step


def _falls(section: Section, sign: int = 1) -> bool:
    values = [sign * row.cells[0].ours for row in section.rows]
    return all(after <= before + 1e-9 for before, after in pairwise(values))


def sensitivity(instance: Instance, parameter: str, values: Iterable[float]) -> list[Point]:
    """A plan for each value of the parameter, all else as it is."""
    return [Point(value, plan_fluid(with_parameter(instance, parameter, value)), 0.0) for value in values]


def with_parameter(instance: Instance, parameter: str, value: float) -> Instance:
    if parameter not in PARAMETERS:
        raise unknown("parameter", parameter, PARAMETERS)
    change: dict[str, Any] = {parameter.removesuffix("_price"): value}
    if parameter in PACE:
        return replace(instance, pace=replace(instance.pace, **change))
    return replace(instance, prices=replace(instance.prices, **change))
