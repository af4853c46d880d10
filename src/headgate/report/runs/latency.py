"""Distributions of what users wait for: TTFT, TPOT, ITL and E2E, with the promises drawn in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.record.tables import Integers
from headgate.report.charts.chart import LOG, TAIL, Axis, Chart, Mark, Series
from headgate.report.charts.scales import Floats
from headgate.report.charts.thinning import HIGHEST, LOWEST, distribution
from headgate.report.document import Figure
from headgate.report.numbers import time_unit
from headgate.stats.measured import Measured
from headgate.stats.promises import by_mean


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


def _gaps(found: Measured) -> Pooled:
    return Pooled(found.gap_sample.values, found.gap_sample.weights)


REQUESTS, TOKENS = "share of requests", "share of tokens"
LATENCIES = (
    Latency("TTFT", "Time to first token", lambda kind: kind.get("first_token"), REQUESTS,
            _per_request("ttft"),
            "Further left is sooner; where a curve crosses 99 % is its p99."),
    Latency("ITL", "Time between two tokens", lambda kind: _between(kind, False), TOKENS, _gaps,
            "A step to the right near the top is a pause that few tokens, but many users, meet."),
    Latency("E2E", "From sending to the last token", lambda kind: None, REQUESTS, _per_request("e2e"),
            "All of it together; long outputs make the upper end."),
    Latency("TPOT", "Time per output token", lambda kind: _between(kind, True), REQUESTS,
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
    first = next(iter(samples.values()))
    scale, unit = time_unit(float(np.median(first.values)))
    series = []
    for name, sample in samples.items():
        values, shares = distribution(sample.values * scale, sample.weights)
        series.append(Series(name, np.maximum(values, 1e-6), shares, order.index(name)))
    top = max(float(each.y[-1]) for each in series)
    marks = [
        Mark(f"promised: {value * scale:g} {unit}{who}", value * scale) for who, value in promises.items()
    ]
    y = Axis(latency.whose, "%", TAIL, LOWEST, min(HIGHEST, max(top, 0.9)))
    chart = Chart(Axis(latency.name, unit, LOG), y, series, marks)
    return chart.figure(f"{latency.long} ({latency.name})", latency.look)


def _pooled(latency: Latency, own: Sequence[Measured]) -> Pooled:
    values, weights = zip(*(latency.read(one) for one in own), strict=True)
    return Pooled(np.concatenate(values), np.concatenate(weights))


def _between(kind: dict[str, Any], mean: bool) -> object:
    """The promise between tokens, where it is about the mean, or about every gap."""
    return kind.get("between_tokens") if by_mean(kind) == mean else None


def _promised(
    kinds: Sequence[dict[str, Any]], promise: Callable[[dict[str, Any]], object]
) -> dict[str, float]:
    """What was promised, by the words behind it; kinds with the same promise share a line."""
    found: dict[float, list[str]] = {}
    for kind in kinds:
        value = promise(kind)
        if isinstance(value, int | float):
            names = found.setdefault(float(value), [])
            if str(kind.get("name", "")) not in names:
                names.append(str(kind.get("name", "")))
    return {f" ({', '.join(filter(None, who))})" if any(who) else "": value for value, who in found.items()}
