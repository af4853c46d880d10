"""What policies thought while they ran: thresholds, estimates and modes over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from headgate.record.tables import Run
from headgate.report.charts.chart import Axis, Chart, Series
from headgate.report.charts.marks import Mark
from headgate.report.charts.thinning import changes
from headgate.report.document import Figure
from headgate.report.numbers import number

POINTS = 400
PREFIX = "gauge."


class Gauge(NamedTuple):
    """How a gauge is shown."""

    title: str
    axis: str
    unit: str
    look: str


KNOWN = {
    "exclusive": Gauge("Mode", "0: mixed, 1: exclusive", "", "Which batches ran; switches follow the load."),
    "refill": Gauge("Refill threshold", "refill", "requests", "It should settle; drift: traffic changes."),
    "share": Gauge("Refill threshold as a share", "θ*", "share of seats", "The optimum for lengths so far."),
    "slots": Gauge("Seats that are used", "seats", "requests", "Below the engine's seats: memory limits."),
    "gain": Gauge("Predicted gain of exclusive batches", "gain", "share", "Above its margin: exclusive."),
    "demand": Gauge("Requests in the system, smoothed", "demand", "requests", "The mode follows from it."),
    "output": Gauge("Estimated output length", "output", "tokens", "It should approach the workload's mean."),
    "prompt": Gauge("Estimated prompt length", "prompt", "tokens", "It should approach the workload's mean."),
    "step": Gauge("Predicted step", "step", "s", "How long the next full step is thought to take."),
    "crowded": Gauge("Memory is crowded", "0: no, 1: yes", "", "While it is 1, decodes wait for no prompt."),
    "pace": Gauge("Pace", "pace", "s", "The least time between two batches of prompts."),
    "segments": Gauge("Segments that moved", "segments", "", "How many the newest batch moved together."),
    "started": Gauge("Prompts of the cycle", "prompts", "requests", "How far the prefill cycle is."),
}
SKIPPED = ("refilling",)  # it swings with every refill and says nothing


MODES = ("mixed", "exclusive")  # what the gauge of this name counts into


def gauge_blocks(runs: Mapping[str, Run]) -> list[Figure | str]:
    """One figure for each gauge that changes in some run; a mode that never changes, in words."""
    names = dict.fromkeys(
        column.removeprefix(PREFIX)
        for run in runs.values()
        for column in run.plans
        if column.startswith(PREFIX)
    )
    figures = [figure for name in names if name not in SKIPPED and (figure := _figure(name, runs))]
    return [*_kept_mode(runs), *figures]


def _kept_mode(runs: Mapping[str, Run]) -> list[str]:
    """Policies that could choose a mode and stayed with one."""
    kept: dict[int, list[str]] = {}
    for name, run in runs.items():
        found = np.unique(run.plans.get(PREFIX + "exclusive", np.empty(0)))
        if len(found) == 1 and found[0] in (0, 1):
            kept.setdefault(int(found[0]), []).append(name)
    return [
        f"{', '.join(names)} ran {MODES[mode]} batches all the time: the mode never changed."
        for mode, names in kept.items()
    ]


def _mean_length(name: str, runs: Mapping[str, Run]) -> list[Mark]:
    """What an estimate of lengths should approach."""
    if name not in ("prompt", "output"):
        return []
    run = next(iter(runs.values()))
    lengths = run.requests[name][run.completed()]
    mean = float(lengths.mean()) if len(lengths) else np.nan
    return [Mark(f"mean: {number(mean)}", mean, "y")] if len(lengths) else []


def _figure(name: str, runs: Mapping[str, Run]) -> Figure | None:
    held = {label: run.plans for label, run in runs.items() if PREFIX + name in run.plans}
    series, moved = [], False
    for label, plans in held.items():
        time, value = plans["time"].astype(float), plans[PREFIX + name].astype(float)
        known = np.isfinite(value)
        time, value = time[known], value[known]
        if not len(time):
            continue
        moved = moved or bool(np.ptp(value) > 0)
        x, y = changes(time, value, POINTS)
        series.append(Series(label, x, y, list(runs).index(label), "step"))
    if not moved:
        return None
    about = KNOWN.get(name, Gauge(name.capitalize(), name, "", "As the policy reports it."))
    along, marks = Axis("time since the start", "s"), _mean_length(name, runs)
    return Chart(along, Axis(about.axis, about.unit), series, marks).figure(about.title, about.look)
