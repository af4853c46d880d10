"""Figures of a sample: mean, spread and quantiles, and the 95 % intervals that say how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.record.tables import Floats, Integers

BATCHES = 20  # batch means: few enough to be nearly independent, enough for a t interval
TENTHS = 10  # parts that a quantile of few values is judged by
QUANTILES = (0.50, 0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; no interval when there was too little to go by.

    A t interval is even to both sides, so where little was seen it may reach where no value can be (a rate
    below zero). There it is cut, which costs no coverage: the true value is not in the part that is cut off.

    `rough` when neighbouring batches were so alike that the interval, though widened, may be too narrow.
    """

    value: float
    low: float | None = None
    high: float | None = None
    rough: bool = False

    def cut(self, least: float = 0.0, most: float = math.inf) -> Estimate:
        """The same with an interval that stays where values can be; rates and times are not negative."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))

    def as_share(self) -> Estimate:
        return self.cut(0.0, 1.0)


@dataclass(frozen=True)
class Figures:
    """What is said of a sample of times, in seconds. NaN when the sample is empty."""

    count: int
    mean: Estimate
    median: float
    p90: float
    p95: float
    p99: float
    std: float


class PartOrder(Enum):
    SEEDS = "seeds"  # not at all: each is a run of its own
    BATCHES = "batches"  # consecutive arrivals: what one batch leaves behind, the next one meets
    CURVE = "curve"  # consecutive finishes: what comes too late for one share is early in the next


@dataclass(frozen=True)
class Spread:
    """An estimate and how its parts (batches, or seeds) deviate from it: what intervals are made of.

    Two spreads over the same parts can be paired: what hit both alike cancels in their difference. How
    the parts depend on each other decides the error of their mean: see `half_width`.
    """

    value: float
    parts: Floats
    order: PartOrder = PartOrder.SEEDS

    @classmethod
    def of_ratio(
        cls, above: NDArray[Any], below: NDArray[Any], order: PartOrder = PartOrder.BATCHES
    ) -> Spread:
        """A ratio of sums over parts, such as waiting per request or tokens per second.

        Each part's deviation is its influence on the ratio (the delta method), so parts of unequal
        weight count as they should.
        """
        total = float(np.sum(below))
        if total == 0:
            return cls(math.nan, np.empty(0), order)
        ratio = float(np.sum(above)) / total
        return cls(ratio, (above - ratio * below) * (len(below) / total), order)

    @classmethod
    def of_values(cls, values: Floats) -> Spread:
        mean = float(np.mean(values)) if len(values) else math.nan
        return cls(mean, values - mean)

    def estimate(self) -> Estimate:
        return self.around(self.value)

    def around(self, value: float) -> Estimate:
        half = half_width(self.parts, self.order)
        if half is None or math.isnan(value):
            return Estimate(value)
        rough = self.order is PartOrder.BATCHES and alike(self.parts)
        return Estimate(value, value - half, value + half, rough)

    def minus(self, other: Spread) -> Spread:
        paired = len(self.parts) == len(other.parts)
        parts = self.parts - other.parts if paired else np.empty(0)
        return Spread(self.value - other.value, parts, self.order)


def batches(chosen: NDArray[np.bool_]) -> Integers:
    """The batch of each chosen row, equal numbers in consecutive order; -1 for the others.

    No batch at all, hence no interval, when there are fewer than two rows for each.
    """
    number = np.full(len(chosen), -1, np.int64)
    rows = np.flatnonzero(chosen)
    if len(rows) >= 2 * BATCHES:
        number[rows] = np.arange(len(rows)) * BATCHES // len(rows)
    return number


def per_batch(batch: Integers, values: NDArray[Any]) -> Floats:
    """Sums of the values by batch; rows outside every batch and unknown values (NaN) count nothing."""
    held = (batch >= 0) & ~np.isnan(values)
    if not np.any(batch >= 0):
        return np.empty(0)
    return np.asarray(np.bincount(batch[held], values[held], BATCHES), np.float64)


def spread_of_mean(batch: Integers, values: Floats, whole: float) -> Spread:
    known = (~np.isnan(values)).astype(np.float64)
    above, below = per_batch(batch, values), per_batch(batch, known)
    return Spread(whole, Spread.of_ratio(above, below).parts, PartOrder.BATCHES)


def left_out(batch: Integers, values: Floats, share: float) -> Floats:
    """What each pair of batches adds to a quantile of all known values, by leaving it out (the jackknife).

    Centre and spread belong together: these are the deviations of the pooled quantile, not those of 20
    quantiles of small samples, which lie elsewhere and vary otherwise. Tenths are left out and not
    twentieths or single values: a tail of few values moves by jumps, and larger parts smooth them.
    """
    if not np.any(batch >= 0):
        return np.empty(0)
    held = (batch >= 0) & ~np.isnan(values)
    tenths, known = batch[held] * TENTHS // BATCHES, values[held]
    parts = (known[tenths != tenth] for tenth in range(TENTHS))
    without = np.array([np.quantile(part, share) if len(part) else math.nan for part in parts])
    return np.asarray((TENTHS - 1) * (np.mean(without) - without), np.float64)


def figures(values: Floats, spread: Spread | None = None, weights: Integers | None = None) -> Figures:
    """The figures of a sample without NaN; the interval of the mean comes from `spread`."""
    total = len(values) if weights is None else int(weights.sum())
    if not total:
        return Figures(0, Estimate(math.nan), *[math.nan] * 5)
    if weights is None:
        mean, deviation = float(np.mean(values)), float(np.std(values))
        median, p90, p95, p99 = np.quantile(values, QUANTILES).tolist()
    else:
        mean = float(values @ weights) / total
        deviation = math.sqrt(float((values - mean) ** 2 @ weights) / total)
        median, p90, p95, p99 = quantiles(values, weights, QUANTILES)
    interval = Estimate(mean) if spread is None else spread.around(mean).cut()
    return Figures(total, interval, median, p90, p95, p99, deviation)


def quantiles(values: Floats, weights: Integers, shares: Sequence[float]) -> list[float]:
    """Quantiles of a weighted sample, the same numbers as numpy gives for the sample written out."""
    held = weights > 0
    if not np.any(held):
        return [math.nan] * len(shares)
    order = np.argsort(values[held], kind="stable")
    ordered, reach = values[held][order], np.cumsum(weights[held][order])
    values_at = []
    for share in shares:
        rank = share * float(reach[-1] - 1)
        below, above = ordered[np.searchsorted(reach, [math.floor(rank), math.ceil(rank)], side="right")]
        values_at.append(float(below + (above - below) * (rank - math.floor(rank))))
    return values_at


# -- the error of a mean over dependent parts

CONFIDENCE = 0.95
ALIKE = 1.36  # standard errors; lag-1 correlation beyond this is no chance (one-sided 5 % with 20 parts)
MOST_ALIKE = 0.9  # a correlation nearer to 1 cannot be told from it by 20 parts
LAGS = 8  # of 20: how far apart two points of a completion curve are compared


def half_width(parts: Floats, order: PartOrder = PartOrder.SEEDS) -> float | None:
    """Half of the 95 % interval of the mean of parts; None when they are too few or not all known."""
    if len(parts) < 2 or not np.all(np.isfinite(parts)):
        return None
    if order is PartOrder.CURVE and len(parts) > LAGS:
        return _t(LAGS) * _curve_error(parts)
    error = float(np.std(parts, ddof=1)) / math.sqrt(len(parts))
    return _t(len(parts) - 1) * error * (widening(parts) if order is PartOrder.BATCHES else 1.0)


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
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))
