"""The size of a workload in a few numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headgate.workloads.columns import Real, Whole


class Lengths(NamedTuple):
    """How long prompts or outputs are, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float


class Summary(NamedTuple):
    """A workload in numbers; rate and burstiness are None in a closed loop."""

    requests: int
    span: float
    rate: float | None
    burstiness: float | None
    prompt: Lengths
    output: Lengths


def summarise(arrival: Real, prompt: Whole, output: Whole) -> Summary:
    """Requests, span from first to last arrival, rate, burstiness, and the lengths."""
    span = float(arrival[-1] - arrival[0])
    return Summary(
        requests=len(arrival),
        span=span,
        rate=len(arrival) / span if span > 0 else None,
        burstiness=_dispersion(arrival) if span > 0 else None,
        prompt=_lengths(prompt),
        output=_lengths(output),
    )


def _lengths(values: Whole) -> Lengths:
    return Lengths(float(values.mean()), *(float(point) for point in np.percentile(values, (50, 90, 99))))


def _dispersion(arrival: Real) -> float:
    """Index of dispersion: variance over mean of the arrivals per second; 1 is Poisson.

    Only occupied seconds are counted one by one, so a workload of years costs no more memory than its rows.
    """
    seconds, counts = np.unique(np.floor(arrival - arrival[0]), return_counts=True)
    bins = seconds[-1] + 1
    mean = len(arrival) / bins
    return float((np.square(counts).sum() / bins - mean**2) / mean)
