"""How likely a decode ends next: learned from requests that left and those that run (OutputHazard), its
line by age, survival curves, and whether it rises with age.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from math import erfc, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.build import quick
from headgate.core.errors import InputError

FIT_SHARE = 0.95  # the paper fits the ages up to the 95th percentile, t95
ROUNDING = 1e-9  # products of fractions that should be 0.05 are not, quite


class LinearHazard(NamedTuple):
    """The chance to end at age t is base + slope * t. The paper's p0, eta and t95."""

    base: float
    slope: float
    through: int = 0  # the oldest age the fit has seen


class _Lives(NamedTuple):
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
        lives = self._lives(running, at)
        rate = int(lives.known.sum()) / int((lives.last - lives.first).sum()) if lives.known.any() else 0.0
        return 1 / rate if rate else None

    def survival(self, running: Sequence[int] = (), at: int | None = None) -> Survival | None:
        lives = self._lives(running, at)
        return life_table(lives.last, lives.known, lives.first) if lives.known.any() else None

    def fit(self) -> LinearHazard | None:
        """The weighted line of 4.1 through those that left; None while fewer than two ages have been seen."""
        lives = self._lives((), None)
        return _fit(lives.last, lives.known) if lives.known.any() else None

    def _lives(self, running: Sequence[int], at: int | None) -> _Lives:
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
    last = checked_lengths(lengths)
    fit = _fit(last, np.ones(len(last), dtype=np.bool_))
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
    return LinearHazard(max(fit.base, 1 / mean), max(fit.slope, 0.0), fit.through)


def _quantile(curve: NDArray[np.float64]) -> int:
    """t95: the smallest age by which 95 % have ended, or the oldest seen where fewer have."""
    low = np.flatnonzero(curve <= 1 - FIT_SHARE + ROUNDING)
    return int(low[0]) if len(low) else len(curve) - 1


def _fit(last: NDArray[np.int64], known: NDArray[np.bool_]) -> LinearHazard | None:
    """Weighted least squares of ended(t) / at_risk(t) on t = 1 .. t95, weights at_risk(t).

    The paper names no weights. With these the variance is right to first order, fitted endings equal
    observed ones, and the paper's Table 13 is reproduced. No histogram: a request adds one to at_risk at each
    age up to its last, and the sums of t**0, t**1, t**2 over such a range are closed forms. They are summed
    as whole numbers, so nothing is lost in the determinant.
    """
    through = _quantile(life_table(last, known).curve)
    ends = last[known & (last <= through)]
    m = np.minimum(last, through)
    moments = [int(x.sum()) for x in (m, m * (m + 1) // 2, m * (m + 1) * (2 * m + 1) // 6)]
    return _solve(moments, len(ends), int(ends.sum()), through)


def _solve(moments: Sequence[float], d0: float, d1: float, through: int) -> LinearHazard | None:
    """The two normal equations; None where all the weight lies on one age."""
    a0, a1, a2 = moments
    determinant = a0 * a2 - a1 * a1
    if determinant <= 0:
        return None
    return LinearHazard((a2 * d0 - a1 * d1) / determinant, (a0 * d1 - a1 * d0) / determinant, through)


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


# -- does the hazard rise with age?

RISING, FALLING, LEVEL = "rising", "falling", "no trend"
GROUPS = 30  # of ages, with equally many endings each, for the rank test
SURE = 0.05  # p below which both tests must be before a trend is called one


class RankTest(NamedTuple):
    """A rank test: `score` above zero means rising; `chance` is how often no trend would look so."""

    score: int
    variance: float
    deviations: float  # Z, in standard deviations
    chance: float  # p


class HazardTrend(NamedTuple):
    """The hazard of a law of outputs at ages 1 .. t95: its line, and what two tests say of its slope."""

    line: LinearHazard
    ranks: RankTest  # Mann and Kendall's test
    slope_chance: float  # two-sided p of the slope of the line

    @property
    def verdict(self) -> str:
        if max(self.ranks.chance, self.slope_chance) >= SURE or self.ranks.score * self.line.slope <= 0:
            return LEVEL
        return RISING if self.line.slope > 0 else FALLING


def hazard_trend(survival: Survival) -> HazardTrend | None:
    """Both tests of the EB paper's Table 12; None where t95 is below 3 and there is nothing to test.

    The paper names neither the weights nor the variance of its regression. Ours weighs each age by those
    still running, as the fit does, and takes the variance from the residuals (t with t95 - 2 degrees).
    It ranks the hazard age by age; we rank it over groups of ages with equally many endings. Age by age most
    values of a small sample are zero and the rest are 1 over a shrinking number of requests: of 500 outputs
    without memory every sample then seems to have a trend.
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]

    curve = np.asarray(survival.curve, dtype=np.float64)
    if len(curve) < 4:
        return None
    line = fit_curve(survival)
    ages = np.arange(1, line.through + 1, dtype=np.float64)
    if line.through < 3:
        return None
    weights = curve[: line.through]
    hazard = 1 - curve[1 : line.through + 1] / weights
    middle = float((weights * ages).sum() / weights.sum())
    lever = float((weights * (ages - middle) ** 2).sum())
    left = float((weights * (hazard - line.base - line.slope * ages) ** 2).sum())
    error = sqrt(left / (line.through - 2) / lever)
    chance = 2 * float(stdtr(line.through - 2, -abs(line.slope) / error)) if error else 0.0
    curve = curve[: line.through + 1]
    ended = curve[0] - curve
    marks = np.linspace(0.0, ended[-1], GROUPS + 1)[1:]
    edges = np.unique(np.concatenate(([0], np.searchsorted(ended, marks * (1 - ROUNDING)))))
    run = np.concatenate(([0.0], np.cumsum(curve[:-1])))
    grouped = np.diff(ended[edges]) / np.diff(run[edges])
    return HazardTrend(line, mann_kendall(grouped), chance) if len(grouped) >= 3 else None


def mann_kendall(series: ArrayLike) -> RankTest:
    """Mann and Kendall's test with the correction for ties, in m log m comparisons.

    Evidence for people; no policy decides by it, because at the windows in use it says little.
    """
    values = np.asarray(series, dtype=np.float64)
    count = len(values)
    later: list[float] = []
    score = 0
    for value in values[::-1].tolist():
        score += len(later) - bisect_right(later, value) - bisect_left(later, value)
        insort(later, value)
    ties = np.unique(values, return_counts=True)[1].tolist()
    variance = (_spread(count) - sum(map(_spread, ties))) / 18
    deviations = (score - np.sign(score)) / sqrt(variance) if variance else 0.0
    return RankTest(score, variance, float(deviations), erfc(abs(deviations) / sqrt(2)))


def _spread(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)
