"""How likely a decode ends next: learned from requests that left and those that run; survival curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.build import quick
from headgate.core.errors import InputError


class _Point(NamedTuple):
    tokens: int
    finished: bool
    at: int | None


class OutputHazard:
    """The law of output lengths over the last `window` requests that left, with censoring.

    Lengths are decode iterations, one less than output tokens, because the prefill emits the first; a
    request that ended with its first token never decodes and is not given.

    A window of completed lengths alone is far too short after a start or a shift: of 2,048 fresh requests of
    mean 256 the first 500 to end average 32. So running requests can be counted as well, by age. The paper
    (arXiv 2606.00516, Algorithm 1) uses completed ones alone.

    A `window` should hold at least one refill's worth, or some ages are never seen.

    `at` is a count of decode iterations the engine has run so far. With it, exposure is counted only since
    the window opened (a request 300 iterations old in a window 50 iterations long was watched for 50), which
    keeps the estimate right after the window has begun to forget. Without it running requests are ignored
    from then on, because iterations before the window would be held against endings inside it. It takes each
    request to decode in every iteration, as EB and mixed batching make it.
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise InputError(f"window={window}; it must be >= 1, 500 is usual")
        self._points: deque[_Point] = deque(maxlen=window)
        self._forgot = False
        self._opened: int | None = None  # when the last forgotten request left
        self._now: int | None = None

    def __len__(self) -> int:
        return len(self._points)

    def update(self, tokens: int, finished: bool = True, at: int | None = None) -> None:
        """A request left after that many decode iterations; finished=False: it was cut short."""
        if len(self._points) == self._points.maxlen:
            self._forgot = True
            self._opened = self._points[0].at
        self._points.append(quick(_Point, (tokens, finished, at)))
        if at is not None:
            self._now = at

    def mean(self, running: Sequence[int] = (), at: int | None = None) -> float | None:
        """Iterations watched by endings: one over the maximum-likelihood rate if age does not matter.

        In a steady state it is the mean output for every law, because each ending costs that many iterations
        in the long run. `running` are the ages of requests that decode now.
        """
        last, known, first = self._lives(running, at)
        rate = int(known.sum()) / int((last - first).sum()) if known.any() else 0.0
        return 1 / rate if rate else None

    def survival(self, running: Sequence[int] = (), at: int | None = None) -> Survival | None:
        last, known, first = self._lives(running, at)
        return life_table(last, known, first) if known.any() else None

    def _lives(
        self, running: Sequence[int], at: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """Of each: the age at which it was last seen, whether it ended then, from when it was watched."""
        alive = [] if self._forgot and self._opened is None else list(running)
        last = np.array([point.tokens for point in self._points] + alive, dtype=np.int64)
        known = np.array([point.finished for point in self._points] + [False] * len(alive), dtype=np.bool_)
        opened = self._opened
        if opened is None:
            return last, known, np.zeros_like(last)
        now = at if at is not None else self._now
        assert now is not None  # set with `opened`
        ended = [now if point.at is None else point.at for point in self._points] + [now] * len(alive)
        first = np.maximum(opened - (np.array(ended, dtype=np.int64) - last), 0)
        return last, known, np.minimum(first, last - known)  # an ending needs an iteration to end in


# -- survival curves


class Survival(NamedTuple):
    """S(t) = P(O > t) for t = 0, 1, ..., and what follows where the data end.

    `curve[t]` is S(t), from S(0) = 1, never rising. Beyond its end each iteration ends a request with
    probability `ending`; 1.0 (no request goes on) where the data are complete.
    """

    curve: NDArray[np.float64]
    ending: float = 1.0

    @property
    def mean(self) -> float:
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
        stay, last = 1 - self.ending, len(self.curve) - 1
        first_beyond = (last // phase + 1) * phase
        return known + float(self.curve[-1]) * stay ** (first_beyond - last) / (1 - stay**phase)


def sample_survival(lengths: ArrayLike) -> Survival:
    """The survival curve of complete outputs, in decode iterations: S(t) is the share above t."""
    seen = checked_lengths(lengths)
    return Survival((len(seen) - np.cumsum(np.bincount(seen))) / len(seen))


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
