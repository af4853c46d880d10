"""Throughput, goodput and latency against load, with the rate no policy exceeds; distributions of waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.core.request import GAP, MEAN
from headgate.record.tables import Integers
from headgate.report.charts import HIGHEST, LOG, LOWEST, TAIL, Axis, Chart, Floats, Mark, Series, distribution
from headgate.report.document import Cell, Figure, Grid, Row, interval, number, row, share, time_unit
from headgate.report.runs.scenes import AT_ONCE, CLIENTS, POLICIES, RATE, Scene
from headgate.stats.figures import Estimate, Spread
from headgate.stats.measured import Measured, between_kind
from headgate.stats.metrics import Metrics

Read = Callable[[Metrics], Estimate]
UNKNOWN = Estimate(float("nan"))
SEVERAL = "Means over seeds; the intervals are those of these means."
AXES = {RATE: Axis("offered load", "requests/s"), CLIENTS: Axis("closed loop", "clients")}
NOTE = (
    "Bound and rates are of the same requests, those that finished in the middle of a run; the bound drawn "
    "is the median over loads, so a point may lie a little above it."
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
    diagonal = [Series("as offered", loads, loads, 7)] if offered else []
    look = "Where a curve bends away from what is offered, the engine is full; dashed: the theoretical bound."
    if not offered:
        look = "Where a curve stops rising, the engine is full; dashed: the theoretical bound."
    along = AXES.get(kind, Axis(kind))
    chart = Chart(along, Axis("served", "requests/s", low=0.0), [*diagonal, *served], marks)
    figures = [chart.figure(f"Requests served against {what}", look, NOTE if bound else "")]
    if any(metrics.goodput for scene in scenes for metrics in scene.metrics.values()):
        kept = _series(scenes, order, lambda found: found.goodput.rate if found.goodput else UNKNOWN)
        up = Axis("with every promise kept", "requests/s", low=0.0)
        look = "Past its top, more load means fewer requests served well."
        figures.append(Chart(along, up, [*diagonal, *kept], marks).figure(f"Goodput against {what}", look))
    return [*figures, *_latencies(scenes, order, along, what)]


def _latencies(scenes: Sequence[Scene], order: Sequence[str], along: Axis, what: str) -> list[Figure]:
    found = []
    reads: dict[str, tuple[Read, str]] = {
        "p99 TTFT": (lambda found: Estimate(found.ttft.p99), "Where it turns upward, queues begin."),
        "mean TPOT": (lambda found: found.tpot.mean, "Fuller steps take longer: it rises before TTFT."),
        "p99 ITL": (lambda found: Estimate(found.itl.p99), "How long prompts interrupt answers that run."),
    }
    for name, (read, look) in reads.items():
        values = np.concatenate([each.y for each in _series(scenes, order, read)])
        if np.any(np.isfinite(values) & (values > 0)):
            scale, unit = time_unit(float(np.nanmedian(values)))
            chart = Chart(along, Axis(name, unit, LOG), _series(scenes, order, read, scale))
            found.append(chart.figure(f"{name} against {what}", look))
    return found


def load_grid(scenes: Sequence[Scene]) -> Grid:
    """One line per load and whatever is compared."""
    promised = any(found.goodput for scene in scenes for found in scene.metrics.values())
    head = next((scene.compared.head for scene in scenes if len(scene.runs) > 1), POLICIES.head)
    heads: tuple[str, ...] = ("load", head, "requests\nper s", "95 % interval")
    heads += ("goodput",) if promised else ()
    heads += ("TTFT\nmean, ms", "TTFT\np50, ms", "TTFT\np95, ms", "TTFT\np99, ms", "TPOT\nmean, ms")
    heads += ("ITL\np99, ms", "busy")
    rows: list[Row] = []
    for scene in scenes:
        for name, own in scene.runs.items():
            rate = _over_seeds(own, lambda found: found.request_rate)
            kept = _over_seeds(own, lambda found: found.goodput.share if found.goodput else UNKNOWN)
            good = [share(kept.value)] if promised else []
            times = (1000 * _over_seeds(own, read).value for read in TIMES)
            busy = share(_over_seeds(own, lambda found: Estimate(found.engine.utilisation)).value)
            at = Cell(scene.place or scene.load.short, scene.load.value)
            rows.append(row(at, name, rate.value, Cell(interval(rate)), *good, *times, busy))
    minor = (heads[3], "TTFT\nmean, ms", "TTFT\np50, ms")
    several = any(len(own) > 1 for scene in scenes for own in scene.runs.values())
    return Grid("", heads, tuple(rows), (SEVERAL,) if several else (), grouped=True, minor=minor)


TIMES: tuple[Read, ...] = (
    lambda found: found.ttft.mean,
    lambda found: Estimate(found.ttft.median),
    lambda found: Estimate(found.ttft.p95),
    lambda found: Estimate(found.ttft.p99),
    lambda found: found.tpot.mean,
    lambda found: Estimate(found.itl.p99),
)


def _over_seeds(own: Sequence[Measured], read: Read) -> Estimate:
    """Of one run as it is; of several their mean, with the interval that they give."""
    found = [read(one.metrics) for one in own]
    if len(found) == 1:
        return found[0]
    return Spread.of_values(np.array([each.value for each in found])).estimate().cut()


def _series(scenes: Sequence[Scene], order: Sequence[str], read: Read, scale: float = 1.0) -> list[Series]:
    found = []
    for colour, name in enumerate(order):
        held = [scene for scene in scenes if name in scene.runs]
        each = [_over_seeds(scene.runs[name], read) for scene in held]
        known = [(one.value, np.nan if one.low is None else one.low, np.nan if one.high is None else one.high)
                 for one in each]  # fmt: skip
        y, low, high = scale * np.array(known, float).T
        x = np.array([scene.load.value for scene in held])
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
        alike = [scene for scene in scenes if scene.load.kind == kind]
        if len({scene.load.value for scene in alike}) > 1:
            return sorted(alike, key=lambda scene: scene.load.value)
    return []


# -- distributions of what users wait for


class Pooled(NamedTuple):
    """Values and how often each occurred."""

    values: Floats
    weights: Integers


class Latency(NamedTuple):
    """One kind of waiting: what a kind of requests was promised of it, the share of what, and its values."""

    name: str
    long: str
    promise: Callable[[dict[str, Any]], object]
    whose: str
    read: Callable[[Measured], Pooled]
    look: str


def _per_request(field: str) -> Callable[[Measured], Pooled]:
    def read(found: Measured) -> Pooled:
        values = getattr(found.latencies, field)[found.window.keep]
        known = values[~np.isnan(values)]
        return Pooled(known, np.ones(len(known), np.int64))

    return read


REQUESTS, TOKENS = "share of requests", "share of tokens"


def _between(kind: dict[str, Any], of: str) -> object:
    """The promise between tokens, where it is of this kind."""
    return kind.get("between_tokens") if between_kind(kind) == of else None


LATENCIES = (
    Latency("TTFT", "Time to first token", lambda kind: kind.get("first_token"), REQUESTS,
            _per_request("ttft"),
            "Further left is sooner; where a curve crosses 99 % is its p99."),
    Latency("ITL", "Time between two tokens", lambda kind: _between(kind, GAP), TOKENS,
            lambda found: Pooled(found.gap_sample.values, found.gap_sample.weights),
            "A step to the right near the top is a pause that few tokens, but many users, meet."),
    Latency("E2E", "From sending to the last token", lambda kind: None, REQUESTS, _per_request("e2e"),
            "All of it together; long outputs make the upper end."),
    Latency("TPOT", "Time per output token", lambda kind: _between(kind, MEAN), REQUESTS,
            _per_request("tpot"),
            "The pace at which a request's text appears, on average."),
)  # fmt: skip


def distributions(runs: Mapping[str, Sequence[Measured]]) -> list[Figure]:
    """One figure for each kind of waiting that any run has; TPOT only where promised. Seeds are pooled."""
    found = []
    for latency in LATENCIES:
        samples = {name: _pooled(latency, own) for name, own in runs.items()}
        samples = {name: sample for name, sample in samples.items() if len(sample.values)}
        if samples:
            kinds = [kind for own in runs.values() for kind in own[0].run.kinds]
            promises = _promised(kinds, latency.promise)
            if promises or latency.name != "TPOT":
                found.append(curves(latency, samples, list(runs), promises))
    return found


def curves(
    latency: Latency, samples: Mapping[str, Pooled], order: Sequence[str], promises: Mapping[str, float]
) -> Figure:
    """The curves of several samples in one figure, each in the colour of its place in `order`."""
    scale, unit = time_unit(float(np.median(next(iter(samples.values())).values)))
    series = []
    for name, sample in samples.items():
        values, shares = distribution(sample.values * scale, sample.weights)
        series.append(Series(name, np.maximum(values, 1e-6), shares, order.index(name)))
    top = max(float(each.y[-1]) for each in series)
    limits = {of: scale * value for of, value in promises.items()}
    marks = [Mark(f"promised: {limit:g} {unit}{of}", limit) for of, limit in limits.items()]
    y = Axis(latency.whose, "%", TAIL, LOWEST, min(HIGHEST, max(top, 0.9)))
    chart = Chart(Axis(latency.name, unit, LOG), y, series, marks)
    return chart.figure(f"{latency.long} ({latency.name})", latency.look)


def _pooled(latency: Latency, own: Sequence[Measured]) -> Pooled:
    values, weights = zip(*(latency.read(one) for one in own), strict=True)
    return Pooled(np.concatenate(values), np.concatenate(weights))


def _promised(
    kinds: Sequence[dict[str, Any]], promise: Callable[[dict[str, Any]], object]
) -> dict[str, float]:
    """What was promised, by the words behind it; kinds with the same promise share a line."""
    promised: dict[float, dict[str, None]] = {}
    for kind in kinds:
        value = promise(kind)
        if isinstance(value, int | float):
            promised.setdefault(float(value), {})[str(kind.get("name", ""))] = None
    return {
        f" ({', '.join(filter(None, names))})" if any(names) else "": value
        for value, names in promised.items()
    }
