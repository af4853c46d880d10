"""The EB paper's formulas as printed (arXiv 2606.00516): hazard fit and trend, share, slots and rule."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from math import erfc, floor, inf, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.errors import InputError
from headgate.estimators.hazard import Survival, checked_lengths, life_table
from headgate.methods.eb.costs import Lengths, PhaseCosts
from headgate.methods.eb.thresholds import base_share, check_capacity

FIT_SHARE = 0.95  # the paper fits the ages up to the 95th percentile, t95
ROUNDING = 1e-9  # products of fractions that should be 0.05 are not, quite
CORRECTION_CAP = 5.0  # the correction may be at most this many times the base share; public code


class LinearHazard(NamedTuple):
    """The chance to end at age t is base + slope * t. The paper's p0, eta and t95."""

    base: float
    slope: float
    through: int = 0  # the oldest age the fit has seen


def fit_hazard(lengths: ArrayLike) -> LinearHazard:
    last = checked_lengths(lengths)
    fit = fit_lives(last, np.ones(len(last), dtype=np.bool_))
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


def fit_lives(last: NDArray[np.int64], known: NDArray[np.bool_]) -> LinearHazard | None:
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


# -- the share and the slots


def share_correction(hazard: LinearHazard, share: float, load: float) -> float:
    """How much larger the share should be when the hazard rises with age: Delta theta of equation (5).

    `share` is theta_0 at the hazard's base p0, `load` is rho = beta_d N / alpha_d. First order in the slope
    eta, useful only while eta (1 + rho) / p0^2 is well below 0.3. Its model lets every request
    begin at age zero in each phase, which is right for the first phase only; in a steady state the best
    share hardly depends on the hazard's shape. headgate has `stationary_share` instead.
    """
    theta, rho = share, load
    p0, eta = hazard.base, hazard.slope
    zeta = -log1p(-theta)
    bracket = zeta * (theta / (1 - theta) - zeta / 2) + rho * (zeta - theta)
    return eta * (1 - theta) ** 2 / (p0**2 * theta) * bracket


def paper_share(overhead: float, hazard: LinearHazard, load: float, cap: float = CORRECTION_CAP) -> float:
    """Equation (3) at the hazard's base plus its correction (5), at most `cap` times as large; not clipped.

    With `guarded` hazards it always has an answer. With raw ones and cap=inf it is Algorithm 1 as printed,
    which has none when the fitted base is not positive: give none of these.
    """
    theta0 = base_share(hazard.base * overhead)
    if not theta0:
        return 0.0
    return theta0 + min(share_correction(hazard, theta0, load), cap * theta0)


def paper_slots(share: float, ending: float, prompt: float, capacity: float, miss: float = 0.01) -> int:
    """Equation (6): slots so that a cycle overflows `capacity` KV tokens with chance `miss`, or so it says.

    The claim does not hold (up to 88 % of cycles overflow at 1 %: docs/policies/eb.md),
    because the spread at the phase start is left out and memory is taken to fall from there on. With little
    memory the answer is negative.
    """
    check_capacity(ending, prompt, capacity)
    zeta = -log1p(-share)
    per_slot = prompt + (1 - share) / (share * ending) * zeta  # KV tokens when a phase begins
    overshoot = 1 / (ending**2 * prompt)  # the mean of the exponential bound on the excess
    return floor((capacity - overshoot * log(1 / miss)) / per_slot)


# -- throughputs, and the terms of rule (8)


class ModeComparison(NamedTuple):
    """Both sides of (7) and (8) for a workload: exclusive batches win where `gain` is positive."""

    gap: float  # left side, s/token: what a token costs more in a mixed batch, beta_MB(r) - beta_EB
    penalty: float  # right side times N, s/token: what exclusive batches lose on fixed costs
    pure: float  # beta_EB, s/token; margins are shares of it
    share: float  # theta_0 at one over the mean output

    def gain(self, running: float) -> float:
        """Left minus right, s/token, with that many requests in the engine."""
        return self.gap - self.penalty / running

    @property
    def exclusive_between(self) -> tuple[float, float]:
        """The batch sizes between which exclusive batches win; usually (N_x, inf); (inf, inf) is never.

        Where the penalty is negative they win at every size if the gap is not negative, else below N_x only.
        """
        if self.penalty > 0:
            return (self.penalty / self.gap if self.gap > 0 else inf, inf)
        if self.gap >= 0:
            return (0.0, inf) if self.gap > 0 or self.penalty < 0 else (inf, inf)
        return (0.0, self.penalty / self.gap)


def pure_per_token(costs: PhaseCosts, lengths: Lengths) -> float:
    """The price of a token when each kind runs alone, without fixed costs: beta_EB."""
    prompt = costs.prefill_per_token * lengths.computed
    return (prompt + costs.decode_per_request * lengths.output) / lengths.total


def exclusive_throughput(costs: PhaseCosts, lengths: Lengths, slots: float, refill: float) -> float:
    """Requests per second of EB(k), equation (4); `refill` need not be whole.

    0 at k = N, where the fluid phase never ends. The paper's, with p0 = 1 / mu_O; prompts take one prefill
    iteration whatever their number.
    """
    if refill == slots:
        return 0.0
    zeta = -log1p(-refill / slots)
    fixed = (costs.prefill_fixed + costs.decode_fixed * zeta * lengths.output) / refill
    return 1 / (fixed + pure_per_token(costs, lengths) * lengths.total)


def mixed_throughput(costs: PhaseCosts, lengths: Lengths, running: float) -> float:
    """Requests per second of mixed batching with `running` requests in every batch."""
    fixed = costs.mixed_fixed * (1 + lengths.output) / running
    return 1 / (fixed + costs.mixed_per_token(lengths.output / lengths.total) * lengths.total)


def compare(costs: PhaseCosts, lengths: Lengths) -> ModeComparison:
    """The terms of (7) and (8), with theta_0 at p0 = 1 / mu_O.

    There (alpha_p + alpha_d zeta mu_O) / theta_0 = alpha_d mu_O / (1 - theta_0), which we use: it has a value
    without fixed prefill cost too. The paper mixes a fitted p0 and mu_O. A polynomial fitted to
    throughputs already holds the fixed cost of mixed batches: set mixed_fixed = 0 with it.
    """
    share = base_share(costs.overhead / lengths.output)
    decode = costs.decode_fixed * lengths.output / (1 - share)
    penalty = (decode - costs.mixed_fixed * (1 + lengths.output)) / lengths.total
    pure = pure_per_token(costs, lengths)
    return ModeComparison(costs.mixed_per_token(lengths.output / lengths.total) - pure, penalty, pure, share)


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
