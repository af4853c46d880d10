"""Figure 8 of the gate-and-route paper: what prefill fairness, decode fairness and TPOT caps cost."""

from __future__ import annotations

from math import nan

from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.frontier import Point, frontier
from headgate_papers.fluid.network_runs import NetworkJob
from headgate_papers.fluid.published import (
    FIG8_AXES,
    FIG8_LEAST_TPOT,
    LIKELY_SLOTS,
    STATED_SLOTS,
    two_classes,
)
from headgate_papers.report import Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes

NAME = "gr-fig8"
ABOUT = "Pareto frontiers of revenue against prefill fairness, decode fairness and time per token"
POINTS = 7
SLOTS = (LIKELY_SLOTS, STATED_SLOTS)
TITLES = {
    "prefill_fairness": "Prefill fairness η1",
    "decode_fairness": "Decode fairness η2",
    "tpot": "TPOT η3",
}


def jobs(options: Options) -> list[NetworkJob]:
    """Linear programs only."""
    return []


def judge(results: Outcomes, options: Options) -> Report:
    """Each frontier over its printed axis, for both numbers of slots."""
    swept = {level: {slots: _sweep(level, slots) for slots in SLOTS} for level in FIG8_AXES}
    lost = {level: _lost(points[LIKELY_SLOTS]) for level, points in swept.items()}
    return Report(
        NAME,
        "what service levels cost",
        (
            "Base instance, 0.5 arrivals per second, engine and class; linear programs, no simulation. The "
            f"printed axes fit {LIKELY_SLOTS} slots; the text says {STATED_SLOTS}.",
            "No numbers are printed but axes; TPOT is the mean over slots, (47).",
        ),
        (_least(), *(_section(level, points) for level, points in swept.items())),
        (
            Count(
                "prefill fairness is steep: its tightest cap costs half or more",
                int(lost["prefill_fairness"] > 0.5),
                1,
            ),
            Count("decode fairness is nearly flat: below 5 %", int(lost["decode_fairness"] < 0.05), 1),
            Count("TPOT is steep towards 0.022", int(swept["tpot"][LIKELY_SLOTS][4].slope > 5e4), 1),
        ),
        (
            f"Decode fairness is nearly free with {LIKELY_SLOTS} slots (at η2 = 0 it costs "
            f"{100 * lost['decode_fairness']:.1f} %) but not with {STATED_SLOTS} "
            f"({100 * _lost(swept['decode_fairness'][STATED_SLOTS]):.1f} %).",
            "Prefill fairness is dear because x is engine time: code can use at most 0.0195 of it, so η1 = 0 "
            "drags summaries down to that.",
        ),
    )


def _sweep(level: str, slots: int) -> list[Point]:
    low, high = FIG8_AXES[level]
    values = [low + (high - low) * step / (POINTS - 1) for step in range(POINTS)]
    return frontier(two_classes(slots=slots), level, values)


def _lost(points: list[Point]) -> float:
    """What the tightest cap that can be kept costs, as a share."""
    first = next(point for point in points if point.plan)
    return 1 - first.revenue / plan_fluid(first.plan.instance).revenue if first.plan else nan


def _least() -> Section:
    least = 1 / two_classes().pace.solo_speed
    return Section(
        "Where TPOT becomes impossible", "", ("seconds",), (Row("least", (Cell(FIG8_LEAST_TPOT, least),)),)
    )


def _section(level: str, points: dict[int, list[Point]]) -> Section:
    rows = []
    for place, point in enumerate(points[LIKELY_SLOTS]):
        cells = []
        for slots in SLOTS:
            each = points[slots][place]
            cells += [Cell(nan, each.revenue), Cell(nan, round(each.slope, 6))]
        rows.append(Row(f"{point.value:.3g}", tuple(cells)))
    columns = tuple(f"{what}, {slots} slots" for slots in SLOTS for what in ("revenue", "slope"))
    return Section(f"{TITLES[level]}: revenue and slope (0: cannot be kept)", "cap", columns, tuple(rows))
