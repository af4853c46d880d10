"""Does the chance that an output ends rise with its age? A rank test and a regression, with p-values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import erfc, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headgate.core.errors import InputError
from headgate.estimators.hazard import ROUNDING, LinearHazard, fit_curve
from headgate.estimators.survival import Survival

RISING, FALLING, LEVEL = "rising", "falling", "no trend"
GROUPS = 30  # of ages, with equally many endings each, for the rank test
SURE = 0.05  # p below which both tests must be before a trend is called one


class Trend(NamedTuple):
    """A rank test: `score` above zero means rising; `chance` is how often no trend would look so."""

    score: int
    variance: float
    deviations: float  # Z, in standard deviations
    chance: float  # p


class HazardTrend(NamedTuple):
    """The hazard of a law of outputs at ages 1 .. t95: its line, and what two tests say of its slope."""

    line: LinearHazard
    ranks: Trend  # Mann and Kendall's test
    slope_chance: float  # two-sided p of the slope of the line

    @property
    def verdict(self) -> str:
        """Rising or falling where both tests say so."""
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
    grouped = _grouped(curve[: line.through + 1])
    return HazardTrend(line, mann_kendall(grouped), chance) if len(grouped) >= 3 else None


def _grouped(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """The hazard over groups of ages: endings by iterations run."""
    ended = curve[0] - curve
    marks = np.linspace(0.0, ended[-1], GROUPS + 1)[1:]
    edges = np.unique(np.concatenate(([0], np.searchsorted(ended, marks * (1 - ROUNDING)))))
    run = np.concatenate(([0.0], np.cumsum(curve[:-1])))
    found: NDArray[np.float64] = np.diff(ended[edges]) / np.diff(run[edges])
    return found


def mann_kendall(series: ArrayLike) -> Trend:
    """Mann and Kendall's test with the correction for ties, in m log m comparisons.

    Evidence for people; no policy decides by it, because at the windows in use it says little.
    """
    values = np.asarray(series, dtype=np.float64)
    count = len(values)
    if count < 3:
        raise InputError(f"a trend of {count} values; need >= 3, give more ages")
    later: list[float] = []
    score = 0
    for value in values[::-1].tolist():
        score += len(later) - bisect_right(later, value) - bisect_left(later, value)
        insort(later, value)
    ties = np.unique(values, return_counts=True)[1]
    variance = (_spread(count) - sum(_spread(int(size)) for size in ties)) / 18
    deviations = (score - np.sign(score)) / sqrt(variance) if variance else 0.0
    return Trend(score, variance, float(deviations), erfc(abs(deviations) / sqrt(2)))


def _spread(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)
