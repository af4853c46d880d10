"""Panels of a fleet: how evenly its engines work, and what they do over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headgate.report.charts.bars import Bar, Bars
from headgate.report.charts.chart import Axis, Chart, Series
from headgate.report.document import Cell, Figure, Grid
from headgate.report.charts.scales import Floats
from headgate.report.charts.thinning import over_time
from headgate.report.runs.timeline import engine_name
from headgate.record.tables import Run
from headgate.report.terminal.tables import number, percent

COLUMNS = 140
MOST_BARS = 16


def fleet_blocks(runs: Mapping[str, Run]) -> list[Grid | Figure]:
    """Of runs with several engines; nothing for the others."""
    held = {name: run for name, run in runs.items() if len(_engines(run)) > 1}
    if not held:
        return []
    return [_spread(held), *_over_time(held), *(_busy(name, run) for name, run in held.items())]


def _engines(run: Run) -> list[int]:
    return [int(number) for number in np.unique(run.steps["replica"])]


def _shares(run: Run) -> Floats:
    """The share of the run that each engine was busy."""
    low, high = run.span()
    seconds = [float(run.steps["seconds"][run.steps["replica"] == number].sum()) for number in _engines(run)]
    return np.array(seconds) / max(high - low, 1e-9)


def _spread(runs: Mapping[str, Run]) -> Grid:
    heads = (
        "run",
        "engines",
        "busy, mean\nof the time",
        "least",
        "most",
        "requests per engine\nmean",
        "least",
        "most",
    )
    rows = []
    for name, run in runs.items():
        busy = _shares(run)
        served = np.array([int(np.sum(run.requests["replica"] == number)) for number in _engines(run)])
        shares = [
            Cell(percent(value), 100 * value)
            for value in (float(busy.mean()), float(busy.min()), float(busy.max()))
        ]
        counts = [Cell(number(float(served.mean())), float(served.mean()))]
        counts += [Cell(f"{value:,}", float(value)) for value in (int(served.min()), int(served.max()))]
        rows.append((Cell(name), Cell(str(len(busy)), float(len(busy))), *shares, *counts))
    note = "Of the whole run, its start and end included. A request counts on the engine it ended on."
    return Grid("How even the fleet is", heads, tuple(rows), (note,))


def _over_time(runs: Mapping[str, Run]) -> list[Figure]:
    """Engines that run prompts, and seats in use: their mean, least and most over the engines."""
    prefilling, seats = [], []
    for colour, (name, run) in enumerate(runs.items()):
        low, high = run.span()
        edges = np.linspace(low, max(high, low + 1e-9), COLUMNS + 1)
        middle = (edges[:-1] + edges[1:]) / 2
        prompts, decodes = [], []
        for engine in _engines(run):
            rows = run.steps["replica"] == engine
            start, seconds = (run.steps[word][rows].astype(float) for word in ("start", "seconds"))
            prompts.append(over_time(start, seconds, (run.steps["prefill"][rows] > 0) * 1.0, edges).mean)
            decodes.append(over_time(start, seconds, run.steps["decodes"][rows].astype(float), edges).mean)
        prefilling.append(Series(name, middle, np.sum(prompts, axis=0), colour))
        level = np.array(decodes)
        seats.append(
            Series(name, middle, level.mean(axis=0), colour, "band", level.min(axis=0), level.max(axis=0))
        )
        seats.append(Series(name, middle, level.mean(axis=0), colour))
    time = Axis("time since the start", "s")
    first = Chart(time, Axis("engines running prompts", "engines", low=0.0), prefilling)
    second = Chart(time, Axis("decoding", "requests per engine", low=0.0), seats)
    return [
        first.figure("Engines that take prompts", "How much of the fleet prefills, and whether that swings."),
        second.figure(
            "Seats in use across the fleet", "A wide band means some engines idle while others are full."
        ),
    ]


def _busy(name: str, run: Run) -> Figure:
    """Every engine's time by phase; the first of a large fleet."""
    bars = []
    low, high = run.span()
    steps = run.steps
    decodes, prompts = steps["decodes"] > 0, steps["prefill"] > 0
    phases = {"prefill": prompts & ~decodes, "decode": decodes & ~prompts, "mixed": decodes & prompts}
    for engine in _engines(run)[:MOST_BARS]:
        mine = steps["replica"] == engine
        parts = tuple(
            (phase, phase, 100 * float(steps["seconds"][mine & rows].sum()) / max(high - low, 1e-9))
            for phase, rows in phases.items()
        )
        bars.append(Bar(engine_name(run, engine), parts))
    note = f"The first {MOST_BARS} of {len(_engines(run))} engines." if len(_engines(run)) > MOST_BARS else ""
    look = "Engines of one role should look alike; a short bar is an engine that waits for work."
    return Bars("time in steps", "% of the run", bars).figure(f"What each engine did: {name}", look, note)
