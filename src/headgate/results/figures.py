"""Figures of a sample: mean, spread and quantiles, and how far to trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.results.tables import Floats, Integers

BATCHES = 20  # batch means: few enough to be nearly independent, enough for a t interval
CONFIDENCE = 0.95
QUANTILES = (0.50, 0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval; no interval when there was too little to go by."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_share(self) -> Estimate:
        """The same with an interval that stays between 0 and 1."""
        if self.low is None or self.high is None:
            return self
        return Estimate(self.value, max(self.low, 0.0), min(self.high, 1.0))


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


@dataclass(frozen=True)
class Spread:
    """An estimate and how its parts (batches, or seeds) deviate from it: what intervals are made of.

    Two spreads over the same parts can be paired: what hit both alike cancels in their difference.
    """

    value: float
    parts: Floats

    @classmethod
    def of_ratio(cls, above: NDArray[Any], below: NDArray[Any]) -> Spread:
        """A ratio of sums over parts, such as waiting per request or tokens per second.

        Each part's deviation is its influence on the ratio (the delta method), so parts of unequal
        weight count as they should.
        """
        total = float(np.sum(below))
        if total == 0:
            return cls(math.nan, np.empty(0))
        ratio = float(np.sum(above)) / total
        return cls(ratio, (above - ratio * below) * (len(below) / total))

    @classmethod
    def of_values(cls, values: Floats, whole: float | None = None) -> Spread:
        """One value per part, around their mean; `whole` is the figure reported in place of the mean."""
        mean = float(np.mean(values)) if len(values) else math.nan
        return cls(mean if whole is None else whole, values - mean)

    def estimate(self) -> Estimate:
        """The value with its interval."""
        half = half_width(self.parts)
        if half is None or math.isnan(self.value):
            return Estimate(self.value)
        return Estimate(self.value, self.value - half, self.value + half)

    def minus(self, other: Spread) -> Spread:
        """The paired difference."""
        if len(self.parts) != len(other.parts):
            return Spread(self.value - other.value, np.empty(0))
        return Spread(self.value - other.value, self.parts - other.parts)

    def excess(self, other: Spread) -> Spread:
        """The paired difference as a share of the other."""
        if other.value == 0 or len(self.parts) != len(other.parts):
            return Spread(self.value / other.value - 1 if other.value else math.nan, np.empty(0))
        ratio = self.value / other.value
        return Spread(ratio - 1, (self.parts - ratio * other.parts) / other.value)


def half_width(parts: Floats) -> float | None:
    """Half of the 95 % t interval of a mean over parts; None when they are too few or not all known."""
    if len(parts) < 2 or not np.all(np.isfinite(parts)):
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    quantile = float(stdtrit(len(parts) - 1, 0.5 + CONFIDENCE / 2))
    return quantile * float(np.std(parts, ddof=1)) / math.sqrt(len(parts))


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
    """The mean of the known values, with its deviations by batch."""
    known = (~np.isnan(values)).astype(np.float64)
    above, below = per_batch(batch, values), per_batch(batch, known)
    return Spread(whole, Spread.of_ratio(above, below).parts)


def figures(values: Floats, spread: Spread | None = None, weights: Integers | None = None) -> Figures:
    """The figures of a sample without NaN; the interval of the mean comes from `spread`."""
    total = len(values) if weights is None else int(weights.sum())
    if not total:
        return Figures(0, Estimate(math.nan), math.nan, math.nan, math.nan, math.nan, math.nan)
    if weights is None:
        mean, deviation = float(np.mean(values)), float(np.std(values))
        median, p90, p95, p99 = np.quantile(values, QUANTILES).tolist()
    else:
        mean = float(values @ weights) / total
        deviation = math.sqrt(float((values - mean) ** 2 @ weights) / total)
        median, p90, p95, p99 = quantiles(values, weights, QUANTILES)
    half = half_width(spread.parts) if spread is not None else None
    interval = Estimate(mean) if half is None else Estimate(mean, mean - half, mean + half)
    return Figures(total, interval, median, p90, p95, p99, deviation)


def quantiles(values: Floats, weights: Integers, shares: Sequence[float]) -> list[float]:
    """Quantiles of a weighted sample, the same numbers as numpy gives for the sample written out."""
    held = weights > 0
    if not np.any(held):
        return [math.nan] * len(shares)
    order = np.argsort(values[held], kind="stable")
    ordered, reach = values[held][order], np.cumsum(weights[held][order])
    found = []
    for share in shares:
        rank = share * float(reach[-1] - 1)
        below, above = ordered[np.searchsorted(reach, [math.floor(rank), math.ceil(rank)], side="right")]
        found.append(float(below + (above - below) * (rank - math.floor(rank))))
    return found
