"""Survival: the probability that a request still decodes after t iterations; three ways to get one."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.errors import InputError


class Survival(NamedTuple):
    """S(t) = P(O > t) for t = 0, 1, ..., and what follows where the data end.

    `curve[t]` is S(t), from S(0) = 1, never rising. Beyond its end each iteration ends a request with
    probability `ending`; 1.0 (no request goes on) where the data are complete.
    """

    curve: NDArray[np.float64]
    ending: float = 1.0

    @property
    def mean(self) -> float:
        """The mean output, in decode iterations: the sum of S(t) over all t."""
        return float(self.curve.sum() + self.curve[-1] * (1 - self.ending) / self.ending)

    @property
    def square(self) -> float:
        """The mean square of outputs: the sum of (2t + 1) S(t) over all t."""
        last, stay = len(self.curve) - 1, 1 - self.ending
        known = float((self.curve * (2.0 * np.arange(last + 1) + 1)).sum())
        beyond = (2 * last + 1) * stay / self.ending + 2 * stay / self.ending**2
        return known + float(self.curve[-1]) * beyond

    @property
    def spread(self) -> float:
        """The coefficient of variation of outputs: standard deviation over mean."""
        return sqrt(max(0.0, self.square / self.mean**2 - 1))

    def renewals(self, phase: int) -> float:
        """M(T) = S(0) + S(T) + S(2T) + ...: cohorts alive at a phase start, in units of the youngest.

        The part beyond the curve is a geometric series.
        """
        known = float(self.curve[::phase].sum())
        if self.ending >= 1.0:
            return known
        stay = 1 - self.ending
        last = len(self.curve) - 1
        first_beyond = (last // phase + 1) * phase
        return known + float(self.curve[-1]) * stay ** (first_beyond - last) / (1 - stay**phase)


def geometric_survival(ending: float) -> Survival:
    """Every iteration ends a request with the same probability, whatever its age (the paper's CFR)."""
    if not 0 < ending < 1:
        raise InputError(f"ending={ending}; need 0 < ending < 1, give one over the mean output")
    return Survival(np.ones(1), ending)


def sample_survival(lengths: ArrayLike) -> Survival:
    """The survival curve of complete outputs, in decode iterations: S(t) is the share above t."""
    seen = checked_lengths(lengths)
    counts = np.bincount(seen)
    above = len(seen) - np.cumsum(counts)
    return Survival(above / len(seen))


def curve_survival(curve: ArrayLike) -> Survival:
    """A curve given as numbers S(0), S(1), ...; what lies beyond its end ends at once."""
    values = np.asarray(curve, dtype=np.float64)
    if values.ndim != 1 or not len(values) or values[0] != 1:
        raise InputError("a survival curve must begin with S(0) = 1; give S(0), S(1), ... as a list")
    if not (np.all(np.diff(values) <= 0) and values[-1] >= 0):
        raise InputError(
            "a survival curve must fall from 1 towards 0: need S(t) >= S(t+1) >= 0; fix the list"
        )
    return Survival(values)


def life_table(
    ends: Sequence[int] | NDArray[np.int64],
    known: NDArray[np.bool_],
    entries: NDArray[np.int64] | None = None,
) -> Survival:
    """Kaplan-Meier: S(t) is the product of 1 - ended(u) / at_risk(u) over the ages u up to t.

    `ends` are the ages at which each request was last seen, `known` says which of them ended there (the
    others are only known to have lived that long), `entries` the ages at which we began to watch each (a
    request watched from age a on is at risk at a+1, a+2, ...). Where the oldest request still lives, the
    curve goes on with the pooled rate (endings / iterations watched), which is the exposure estimate; the
    usual alternatives, dropping to zero or never falling, put the mean far too low or at infinity. Late
    entries can leave an age at which all of very few end while older ones live; there one more is counted at
    risk, or the whole curve beyond would be zero.
    """
    last = np.asarray(ends, dtype=np.int64)
    first = np.zeros_like(last) if entries is None else entries
    oldest = int(last.max())
    ended = np.bincount(last[known], minlength=oldest + 1)
    joins = np.bincount(first + 1, minlength=oldest + 2)
    leaves = np.bincount(last + 1, minlength=oldest + 2)
    at_risk = np.cumsum(joins - leaves)[: oldest + 1]
    at_risk[:oldest] += (ended == at_risk)[:oldest] & (ended[:oldest] > 0)
    ratio = np.divide(ended, at_risk, out=np.zeros(oldest + 1), where=at_risk > 0)
    curve = np.cumprod(1 - ratio)
    watched = int((last - first).sum())
    return Survival(curve, 1.0 if curve[-1] <= 0 else max(int(ended.sum()), 1) / max(watched, 1))


def checked_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Whole numbers >= 1, at least one of them."""
    seen = np.asarray(lengths)
    if seen.ndim != 1 or not len(seen):
        raise InputError("no outputs given; need >= 1 completed request, wait for one or use a prior")
    whole = seen.astype(np.int64)
    if np.any(whole != seen) or np.any(whole < 1):
        raise InputError(
            f"an output of {seen.min():g} decode iterations; need whole numbers >= 1, leave out requests "
            "that ended with their first token (they never decode)"
        )
    return whole
