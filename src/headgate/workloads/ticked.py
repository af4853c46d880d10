"""Arrivals that were written down in coarse ticks: noticed, and spread over their tick.

Mooncake's traces say every three seconds who came: 9 to 30 requests at one moment, then none. Served as
written, each tick is a burst that no client made.
"""

from __future__ import annotations

import numpy as np

from headgate.workloads.columns import Real
from headgate.workloads.streams import stream

LEAST_TICK = 0.5  # seconds; below, an engine's own steps are as coarse
LEAST_REQUESTS = 20
SHARED = 3.0  # requests at one moment, on average, from which on arrivals are bursts
ALIKE = 0.9  # of the distances between moments are whole multiples of the smallest


def tick_of(arrival: Real) -> float:
    """The tick in seconds, 0.0 where there is none."""
    moments = np.unique(arrival)
    if len(arrival) < LEAST_REQUESTS or len(moments) < 3 or len(arrival) < SHARED * len(moments):
        return 0.0
    gaps = np.diff(moments)
    tick = float(gaps.min())
    whole = np.abs(gaps / tick - np.rint(gaps / tick)) < 0.01
    return tick if tick >= LEAST_TICK and whole.mean() >= ALIKE else 0.0


def spread(arrival: Real, tick: float, seed: int) -> Real:
    """Each request somewhere in its tick, drawn evenly; order stays by time."""
    draws = stream(seed, "ticks").random(len(arrival)) * tick
    return np.sort(arrival + draws)
