"""The error of a mean over parts that may depend on each other: seeds, batches, shares of the finishes.

Coverage of these intervals was measured; docs/metrics.md has the numbers and studies/coverage the
experiment.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np

from headgate.record.tables import Floats

CONFIDENCE = 0.95
ALIKE = 1.36  # standard errors; lag-1 correlation beyond this is no chance (one-sided 5 % with 20 parts)
MOST_ALIKE = 0.9  # a correlation nearer to 1 cannot be told from it by 20 parts
LAGS = 8  # of 20: how far apart two points of a completion curve are compared


class Order(Enum):
    """How parts follow each other."""

    SEEDS = "seeds"  # not at all: each is a run of its own
    BATCHES = "batches"  # consecutive arrivals: what one batch leaves behind, the next one meets
    CURVE = "curve"  # consecutive finishes: what comes too late for one share is early in the next


def half_width(parts: Floats, order: Order = Order.SEEDS) -> float | None:
    """Half of the 95 % interval of the mean of parts; None when they are too few or not all known."""
    if len(parts) < 2 or not np.all(np.isfinite(parts)):
        return None
    if order is Order.CURVE and len(parts) > LAGS:
        return _t(LAGS) * _curve_error(parts)
    error = float(np.std(parts, ddof=1)) / math.sqrt(len(parts))
    return _t(len(parts) - 1) * error * (widening(parts) if order is Order.BATCHES else 1.0)


def correlation(parts: Floats) -> float:
    """Between neighbouring parts (lag 1), with the bias of short series taken out; 0 of equal parts."""
    own = parts - np.mean(parts)
    total, number = float(own @ own), len(parts)
    if total == 0 or number < 5:
        return 0.0
    return (number * float(own[:-1] @ own[1:]) / total + 1) / (number - 4)


def alike(parts: Floats) -> bool:
    """Whether neighbours are so alike that it is no chance: batches too short for their own memory."""
    number = len(parts)
    return number > 4 and correlation(parts) > (ALIKE * math.sqrt(number) + 1) / (number - 4)


def widening(parts: Floats) -> float:
    """How much wider the interval of an AR(1) series is than that of independent parts.

    The mean of parts with lag-1 correlation r has (1 + r) / (1 - r) times the variance. Taken whenever r
    is above 0, not only when it is significant: where batches are too short, the intervals that miss are
    those whose correlation looks small by chance. A negative r is not used: the plain interval is safe.
    """
    alikeness = min(max(correlation(parts), 0.0), MOST_ALIKE)
    return math.sqrt((1 + alikeness) / (1 - alikeness))


def _curve_error(parts: Floats) -> float:
    """The standard error of the mean slope of a curve whose steps are the parts.

    A completion curve wobbles around its trend: what is late at one point is caught up by the next, so
    the plain error of 20 shares counts each wobble 20 times instead of once at either end. Points of the
    curve that are m steps apart differ by a variance of V(m) = walk * m + wobble: the walk adds up, the
    wobble does not. Both come from a straight line through V(1) .. V(8), weighted by 1 / m^3 because far
    points are few and noisy, and V(20) is the variance of the whole.
    """
    number = len(parts)
    curve = np.concatenate(([0.0], np.cumsum(parts - np.mean(parts))))
    lags = np.arange(1, LAGS + 1)
    # The curve is tied to 0 at both ends, which takes a share of m / 20 from the variance.
    apart = np.array([np.mean((curve[lag:] - curve[:-lag]) ** 2) / (1 - lag / number) for lag in lags])
    weight = lags**-3.0 / np.sum(lags**-3.0)
    middle, level = float(weight @ lags), float(weight @ apart)
    walk = max(float(weight @ (apart * (lags - middle))) / float(weight @ (lags - middle) ** 2), 0.0)
    wobble = max(level - walk * middle, 0.0)
    return math.sqrt(walk * number + wobble) / number


def _t(freedom: int) -> float:
    """The t quantile of a two-sided 95 % interval."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))
