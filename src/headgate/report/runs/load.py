"""Throughput, goodput and latency against load, with the rate no policy exceeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headgate.report.charts.chart import LOG, Axis, Chart, Mark, Series
from headgate.report.document import Cell, Figure, Grid
from headgate.report.charts.scales import Floats
from headgate.report.runs.scenes import AT_ONCE, CLIENTS, RATE, Scene, what_differs
from headgate.stats.figures import Estimate
from headgate.stats.metrics import Metrics
from headgate.report.terminal.tables import interval, number, percent, time_unit

Read = Callable[[Metrics], Estimate]
AXES = {RATE: Axis("offered load", "requests/s"), CLIENTS: Axis("closed loop", "clients")}
NOTE = (
    "The bound is for all requests together, the rates are from the middle of each run: where that middle "
    "holds lighter requests, a point may lie a little above it."
)


def against_load(scenes: Sequence[Scene]) -> list[Figure]:
    """Figures over scenes whose load is of one kind and differs."""
    order = list(dict.fromkeys(name for scene in scenes for name in scene.runs))
    bound = _bound(scenes)
    marks = [Mark(f"bound: {number(bound)}", bound, "y")] if bound else []
    kind = scenes[0].load.kind
    offered, what = kind == RATE, "load" if kind in AXES else kind
    served = _series(scenes, order, lambda found: found.request_rate)
    loads = np.array([scene.load.value for scene in scenes])
    diagonal = Series("as offered", loads, loads, 7) if offered else None
    look = "Where a curve bends away from what is offered, the engine is full; dashed: the theoretical bound."
    if not offered:
        look = "Where a curve stops rising, the engine is full; dashed: the theoretical bound."
    along = AXES.get(kind, Axis(kind))
    lines = [*([diagonal] if diagonal else []), *served]
    found = [
        Chart(along, Axis("served", "requests/s", low=0.0), lines, marks).figure(
            f"Requests served against {what}", look, NOTE if bound else ""
        )
    ]
    if any(metrics.goodput for scene in scenes for metrics in scene.metrics.values()):
        kept = _series(scenes, order, _kept)
        lines = [*([diagonal] if diagonal else []), *kept]
        chart = Chart(along, Axis("with every promise kept", "requests/s", low=0.0), lines, marks)
        found.append(
            chart.figure(
                f"Goodput against {what}", "Past its top, more load means fewer requests served well."
            )
        )
    return [*found, *_latencies(scenes, order, along, what)]


def _latencies(scenes: Sequence[Scene], order: Sequence[str], along: Axis, what: str) -> list[Figure]:
    found = []
    reads: dict[str, tuple[Read, str]] = {
        "p99 TTFT": (lambda found: Estimate(found.ttft.p99), "Where it turns upward, queues begin."),
        "mean TPOT": (
            lambda found: found.tpot.mean,
            "Fuller steps take longer: it rises before TTFT.",
        ),
        "p99 ITL": (lambda found: Estimate(found.itl.p99), "How long prompts interrupt answers that run."),
    }
    for name, (read, look) in reads.items():
        series = _series(scenes, order, read)
        values = np.concatenate([each.y for each in series])
        if not np.any(np.isfinite(values) & (values > 0)):
            continue
        scale, unit = time_unit(float(np.nanmedian(values)))
        scaled = [
            Series(each.name, each.x, each.y * scale, each.colour, each.shape, *_scaled(each, scale))
            for each in series
        ]
        found.append(Chart(along, Axis(name, unit, LOG), scaled).figure(f"{name} against {what}", look))
    return found


def _scaled(series: Series, scale: float) -> tuple[Floats | None, Floats | None]:
    low, high = series.low, series.high
    return (None, None) if low is None or high is None else (low * scale, high * scale)


def load_grid(scenes: Sequence[Scene]) -> Grid:
    """One line per load and whatever is compared."""
    promised = any(found.goodput for scene in scenes for found in scene.metrics.values())
    heads = (
        *("load", what_differs(scenes).head, "requests\nper s", "95 % interval"),
        *(("goodput\nof requests",) if promised else ()),
        *("TTFT mean\nms", "TTFT p99\nms", "TPOT mean\nms", "ITL p99\nms", "busy\nof the time"),
    )
    rows = []
    for scene in scenes:
        for name, found in scene.metrics.items():
            rate = found.request_rate
            times = (found.ttft.mean.value, found.ttft.p99, found.tpot.mean.value, found.itl.p99)
            good = found.goodput.share.value if found.goodput else float("nan")
            rows.append(
                (
                    Cell(scene.load.short, scene.load.value),
                    Cell(name, tone="words"),
                    Cell(number(rate.value), _known(rate.value)),
                    Cell(interval(rate)),
                    *((Cell(percent(good), _known(100 * good)),) if promised else ()),
                    *(Cell(number(1000 * value), _known(1000 * value)) for value in times),
                    Cell(percent(found.engine.utilisation), _known(100 * found.engine.utilisation)),
                )
            )
    return Grid("Every load", heads, tuple(rows))


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _kept(found: Metrics) -> Estimate:
    return found.goodput.rate if found.goodput else Estimate(float("nan"))


def _series(scenes: Sequence[Scene], order: Sequence[str], read: Read) -> list[Series]:
    found = []
    for colour, name in enumerate(order):
        held = [(scene.load.value, read(scene.metrics[name])) for scene in scenes if name in scene.metrics]
        x = np.array([load for load, _ in held])
        y = np.array([estimate.value for _, estimate in held])
        ends = [[np.nan if end is None else end for end in (each.low, each.high)] for _, each in held]
        low, high = np.array(ends, float).T
        found.append(Series(name, x, y, colour, "linked", low, high))
    return found


def _bound(scenes: Sequence[Scene]) -> float | None:
    """Of these requests; none where a swept word gives every scene its own."""
    bounds = [scene.bound.rate for scene in scenes if scene.bound]
    alike = bool(bounds) and max(bounds) < 1.2 * min(bounds)
    return float(np.median(bounds)) if alike else None


def comparable(scenes: Sequence[Scene]) -> list[Scene]:
    """Those that lie on one axis of load, in order; none when there are fewer than two."""
    for kind in dict.fromkeys(scene.load.kind for scene in scenes if scene.load.kind != AT_ONCE):
        held = sorted(
            (scene for scene in scenes if scene.load.kind == kind), key=lambda scene: scene.load.value
        )
        if len({scene.load.value for scene in held}) > 1:
            return held
    return []
