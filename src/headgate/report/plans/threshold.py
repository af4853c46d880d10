"""The report of `plan threshold`: the threshold curve with its optimum, and which mode wins at which load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.advisor.threshold import WITHIN_ERROR, ThresholdPlan
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate
from headgate.methods.eb.stationary import phase_share
from headgate.report.charts.chart import LOG, Axis, Chart, Mark, Series
from headgate.report.document import Cell, Chapter, Figure, Grid, Page, Printed, Section
from headgate.report.runs.origin import plan_made
from headgate.report.terminal.tables import number, time_unit

POINTS = 90
SHARES = (0.002, 0.98)  # of the seats: what is drawn
REACH = 12  # phases up to so many times the optimum's


def threshold_page(plan: ThresholdPlan, verdict: str, printed: str, command: Sequence[str]) -> Page:
    """The whole report."""
    about = f"{plan.situation.source}, {plan.situation.workload}"
    sections = (
        Section("The threshold", (_curve(plan), _rates(plan), _crossing(plan))),
        Section("The numbers", (_modes(plan),)),
        Section("The whole plan, as printed", (Printed(printed),), closed=True),
    )
    chapter = Chapter("", verdict, sections, tuple(f"{note[:1].upper()}{note[1:]}." for note in plan.notes))
    return Page("When to refill", about, (chapter,), plan_made(command), "plan")


def _curve(plan: ThresholdPlan) -> Figure:
    """The time a request costs beside what no threshold changes, over its least: (T + g) M(T)."""
    survival, overhead = plan.situation.survival, plan.costs.overhead
    best = plan.thresholds.stationary
    mean = max(survival.mean, 2.0)
    phases = np.unique(np.geomspace(1, REACH * mean, POINTS).astype(np.int64)).tolist()
    shares = np.array([phase_share(survival, phase) for phase in phases])
    costs = np.array([(phase + overhead) * survival.renewals(phase) for phase in phases])
    shown = (shares >= SHARES[0]) & (shares <= SHARES[1]) & (costs <= 3 * costs.min())
    extra = 100 * (costs / costs.min() - 1)
    marks = [
        Mark(f"θ* = {best.share:.3f}", best.share),
        Mark(f"θ0 = {plan.thresholds.base.share:.3f}", plan.thresholds.base.share),
    ]
    chart = Chart(
        Axis("seats refilled at once", "share", LOG),
        Axis("extra time per request", "%", low=0.0),
        [Series("refill and decode phases", shares[shown], extra[shown])],
        marks,
    )
    look = (
        "Time that the threshold alone decides. θ* is its optimum, θ0 the base share; a flat bottom forgives."
    )
    return chart.figure(
        "Threshold curve", look, "Teeth stand where many outputs have nearly the same length."
    )


def _rates(plan: ThresholdPlan) -> Figure:
    about, running = plan.situation, max(plan.exclusive.running, 2)
    shares = np.unique(np.clip(np.geomspace(1 / running, SHARES[1], POINTS), 1e-6, SHARES[1]))
    rates = [
        exclusive_rate(about.cost, about.lengths, running, float(share), about.budget) for share in shares
    ]
    chosen = plan.thresholds.chosen
    marks = [Mark(f"refill {chosen.refill} of {chosen.slots}", chosen.refill * running / chosen.slots)]
    marks.append(Mark("mixed batches", plan.mixed.rate, "y"))
    chart = Chart(
        Axis("prompts refilled at once", "requests", LOG),
        Axis("predicted", "requests/s"),
        [Series("exclusive batches", shares * running, np.array(rates))],
        marks,
    )
    return chart.figure(
        "Requests served against refill", "Above the dashed level exclusive batches serve more than mixed."
    )


def _crossing(plan: ThresholdPlan) -> Figure:
    about, chosen = plan.situation, plan.thresholds.chosen
    seats = min(about.slots, plan.memory.mixed or about.slots)
    top = max(chosen.slots, seats)
    running = np.unique(np.geomspace(2, max(top, 3), 60).astype(np.int64)).tolist()
    share = min(chosen.refill / chosen.slots, SHARES[1])
    mixed = [mixed_rate(about.cost, about.lengths, min(each, seats), about.budget) for each in running]
    alone = [
        exclusive_rate(about.cost, about.lengths, min(each, chosen.slots), share, about.budget)
        for each in running
    ]
    across = np.array(running, float)
    series = [Series("mixed", across, np.array(mixed)), Series("exclusive", across, np.array(alone), 1)]
    marks = (
        [Mark(f"this load: {plan.concurrent:,}", float(plan.concurrent))] if plan.concurrent <= top else []
    )
    chart = Chart(
        Axis("requests in the engine at once", "requests"), Axis("predicted", "requests/s"), series, marks
    )
    look = f"Differences below about {100 * WITHIN_ERROR:.0f} % are within the error of these predictions."
    return chart.figure("Mixed or exclusive, by load", look)


def _modes(plan: ThresholdPlan) -> Grid:
    fields = {
        "requests": "rate",
        "tokens": "tokens",
        "TPOT": "per_token",
        "longest gap": "longest_gap",
        "TTFT": "first_token",
    }
    rows = []
    for name, field in fields.items():
        one, other = getattr(plan.mixed, field), getattr(plan.exclusive, field)
        if one is None or other is None:
            continue
        scale, unit = (1.0, "per s") if name in ("requests", "tokens") else time_unit(max(one, other))
        change = 100 * (other / one - 1) if one > 0 else 0.0
        cells = (Cell(number(one * scale), one * scale), Cell(number(other * scale), other * scale))
        rows.append((Cell(name), Cell(unit, tone="words"), *cells, Cell(f"{change:+.1f} %", change)))
    heads = ("predicted", "unit", "mixed", "exclusive", "difference\n%")
    return Grid("Both modes at this load", heads, tuple(rows))
