"""The report of `plan capacity --find engines`: who is served in time, by the number of engines."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan

import numpy as np

from headgate.advisor.capacity.slo import Level
from headgate.advisor.engines.plan import EnginesPlan, Size
from headgate.report.charts.chart import Axis, Chart, Mark, Series
from headgate.report.document import Block, Cell, Chapter, Figure, Grid, Page, Printed, Section
from headgate.report.runs.origin import plan_made
from headgate.report.terminal.tables import interval, number, percent

ENOUGH = "Enough means that every level is kept with every seed; other requests of the same kind may differ."


def fewest_page(plan: EnginesPlan, verdict: str, printed: str, command: Sequence[str]) -> Page:
    """The whole report."""
    checked = [level for level in plan.levels if level.statistic]
    blocks: list[Block] = [_sizes(plan, checked), *(_in_time(plan, level) for level in checked)]
    sections = (
        Section("What was tried", tuple(blocks)),
        Section("The whole plan, as printed", (Printed(printed),), closed=True),
    )
    about = f"card {plan.card}, {plan.workload}, {number(plan.rate)} requests/s"
    chapter = Chapter("", verdict, sections, (*plan.notes, ENOUGH))
    return Page("How few engines", about, (chapter,), plan_made(command), "plan")


def _sizes(plan: EnginesPlan, checked: Sequence[Level]) -> Grid:
    heads = (
        *("router, policy", "engines", "seeds that kept\nevery level"),
        *(f"{level}\nin time [95 %]" for level in checked),
        *("seats\nwith a decode", "load\nof λ*"),
    )
    rows = []
    for found in plan.found:
        for size in found.sizes:
            enough = found.engines is not None and size.engines >= found.engines
            kept = Cell(f"{size.kept} of {size.seeds}", float(size.kept), "good" if enough else "")
            used = (Cell(percent(share), 100 * share) for share in (size.seats.value, size.load))
            shares = (_share(size, level) for level in checked)
            engines = Cell(f"{size.engines:,}", float(size.engines))
            rows.append((Cell(found.name), engines, kept, *shares, *used))
    most = f"one engine serves at most λ* = {number(plan.bound.rate)} requests/s"
    least = f"No fleet of fewer than {plan.least} keeps up: {most}."
    fluid = f"As a fluid, gate-and-route serves everybody with {number(plan.fluid)} engines."
    return Grid("Every number of engines tried", heads, tuple(rows), (least, fluid))


def _share(size: Size, level: Level) -> Cell:
    share = size.shares[str(level)]
    if isnan(share.value):
        return Cell("-")
    span = "" if share.low is None else f" {interval(share.as_share(), 100)}"
    return Cell(f"{100 * share.value:.1f} %{span}", 100 * share.value)


def _in_time(plan: EnginesPlan, level: Level) -> Figure:
    series = []
    for place, found in enumerate(plan.found):
        shares = [size.shares[str(level)].as_share() for size in found.sizes]
        ends = [[nan if end is None else 100 * end for end in (each.low, each.high)] for each in shares]
        low, high = np.array(ends, float).reshape(-1, 2).T
        engines = np.array([size.engines for size in found.sizes], float)
        values = np.array([100 * each.value for each in shares], float)
        series.append(Series(found.name, engines, values, place, "linked", low, high))
    wanted = level.statistic.removeprefix("p") if level.statistic.startswith("p") else ""
    marks = [Mark(f"wanted: {wanted} %", float(wanted), "y")] if wanted else []
    whose = "gaps" if level.metric == "tbt" else "requests"
    chart = Chart(Axis("fleet", "engines", whole=True), Axis("in time", f"% of {whose}"), series, marks)
    look = "The first point that lies above what is wanted, with its interval, is a fleet to trust."
    return chart.figure(f"{level}, by engines", look)
