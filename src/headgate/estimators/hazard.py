"""OutputHazard: how likely a decode ends next, learned from requests that left and from those that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.build import quick
from headgate.core.errors import InputError
from headgate.estimators.survival import Survival, checked_lengths, life_table

FIT_SHARE = 0.95  # the paper fits the ages up to the 95th percentile, t95
ROUNDING = 1e-9  # products of fractions that should be 0.05 are not, quite


class LinearHazard(NamedTuple):
    """The chance to end at age t is base + slope * t. The paper's p0, eta and t95."""

    base: float
    slope: float
    through: int = 0  # the oldest age the fit has seen


class _Lives(NamedTuple):
    """One request observed from one age to another, and whether it ended there."""

    last: NDArray[np.int64]
    known: NDArray[np.bool_]
    first: NDArray[np.int64]


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

    Parameters:
        window: how many requests that left are remembered; at least one refill's worth, or some ages are
            never seen.

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
        if tokens < finished:
            raise InputError(f"{tokens} decode iterations; need >= 1 of a request that finished, else >= 0")
        if len(self._points) == self._points.maxlen:
            self._forgot = True
            self._opened = self._points[0].at
        self._points.append(quick(_Point, (tokens, finished, at)))
        if at is not None:
            self._now = at

    def exposure(self, running: Sequence[int] = (), at: int | None = None) -> float | None:
        """Endings by iterations watched: the maximum-likelihood rate if age does not matter.

        In a steady state its inverse is the mean output for every law, because each ending costs that many
        iterations in the long run. `running` are the ages of requests that decode now.
        """
        lives = self._lives(running, at)
        watched = int((lives.last - lives.first).sum())
        return int(lives.known.sum()) / watched if lives.known.any() else None

    def mean(self, running: Sequence[int] = (), at: int | None = None) -> float | None:
        """The mean output in decode iterations, running requests counted."""
        rate = self.exposure(running, at)
        return 1 / rate if rate else None

    def survival(self, running: Sequence[int] = (), at: int | None = None) -> Survival | None:
        """Kaplan-Meier's curve; None before the first ending."""
        lives = self._lives(running, at)
        return life_table(lives.last, lives.known, lives.first) if lives.known.any() else None

    def fit(self, running: Sequence[int] = (), at: int | None = None) -> LinearHazard | None:
        """The weighted straight line of 4.1; None while fewer than two ages have been seen."""
        lives = self._lives(running, at)
        return _fit(lives) if lives.known.any() else None

    def _lives(self, running: Sequence[int], at: int | None) -> _Lives:
        """The window, and the running ones as far as they can be counted."""
        alive = [] if self._forgot and self._opened is None else list(running)
        last = np.array([point.tokens for point in self._points] + alive, dtype=np.int64)
        known = np.array([point.finished for point in self._points] + [False] * len(alive), dtype=np.bool_)
        opened = self._opened
        if opened is None:
            return _Lives(last, known, np.zeros_like(last))
        now = at if at is not None else self._now
        assert now is not None  # set with `opened`
        ended = [now if point.at is None else point.at for point in self._points] + [now] * len(alive)
        first = np.maximum(opened - (np.array(ended, dtype=np.int64) - last), 0)
        return _Lives(last, known, np.minimum(first, last - known))  # an ending needs an iteration to end in


def fit_hazard(lengths: ArrayLike) -> LinearHazard:
    """The fit of 4.1 on complete outputs, in decode iterations."""
    last = checked_lengths(lengths)
    fit = _fit(_Lives(last, np.ones(len(last), dtype=np.bool_), np.zeros_like(last)))
    if fit is None:
        raise InputError("outputs of one decode iteration; a line needs t95 >= 2, collect longer outputs")
    return fit


def fit_curve(survival: Survival) -> LinearHazard:
    """The same weighted fit on a whole law instead of a window: what an endless window would give.

    A law whose curve stops above 5 % is fitted up to where the curve stops.
    """
    curve = survival.curve
    through = _quantile(curve)
    ages = np.arange(1, through + 1, dtype=np.float64)
    at_risk, ended = curve[:through], -np.diff(curve[: through + 1])
    moments = [float((at_risk * ages**power).sum()) for power in range(3)]
    fit = _solve(moments, float(ended.sum()), float((ended * ages).sum()), through)
    if fit is None:
        raise InputError(f"a survival curve with t95={through}; a line needs t95 >= 2, give a longer one")
    return fit


def guarded(fit: LinearHazard, mean: float) -> LinearHazard:
    """The fit made usable: no falling hazard, and never fewer endings than the mean says.

    These guards are ours: on the synthetic workloads of arXiv 2606.00516 (uniform outputs) the intercept is
    negative, and its Algorithm 1 as printed has no answer.
    """
    if not mean >= 1:
        raise InputError(
            f"a mean output of {mean} decode iterations; need >= 1, leave out requests that never decode"
        )
    return LinearHazard(max(fit.base, 1 / mean), max(fit.slope, 0.0), fit.through)


def _quantile(curve: NDArray[np.float64]) -> int:
    """t95: the smallest age by which 95 % have ended, or the oldest seen where fewer have."""
    low = np.flatnonzero(curve <= 1 - FIT_SHARE + ROUNDING)
    return int(low[0]) if len(low) else len(curve) - 1


def _fit(lives: _Lives) -> LinearHazard | None:
    """Weighted least squares of ended(t) / at_risk(t) on t = 1 .. t95, weights at_risk(t).

    The paper names no weights. With these the variance is right to first order, fitted endings equal
    observed ones, and the paper's Table 13 is reproduced. No histogram: a request watched over the ages
    (first, last] adds one to at_risk at each, and the sums of t**0, t**1, t**2 over such a range are closed
    forms. They are summed as whole numbers, so nothing is lost in the determinant.
    """
    through = _quantile(life_table(lives.last, lives.known, lives.first).curve)
    ends = lives.last[lives.known & (lives.last <= through)]
    last, first = (_powers(np.minimum(age, through)) for age in (lives.last, lives.first))
    moments = [int((high - low).sum()) for high, low in zip(last, first, strict=True)]
    return _solve(moments, len(ends), int(ends.sum()), through)


def _powers(m: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Sums of t**0, t**1 and t**2 over t = 1 .. m."""
    return m, m * (m + 1) // 2, m * (m + 1) * (2 * m + 1) // 6


def _solve(moments: Sequence[float], d0: float, d1: float, through: int) -> LinearHazard | None:
    """The two normal equations; None where all the weight lies on one age."""
    a0, a1, a2 = moments
    determinant = a0 * a2 - a1 * a1
    if determinant <= 0:
        return None
    return LinearHazard((a2 * d0 - a1 * d1) / determinant, (a0 * d1 - a1 * d0) / determinant, through)
