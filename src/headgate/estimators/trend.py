"""Mann and Kendall's test: does a series rise or fall, or is that chance?"""

from __future__ import annotations

from math import erfc, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headgate.core.errors import InputError


class Trend(NamedTuple):
    """A rank test: `score` above zero means rising; `chance` is how often no trend would look so."""

    score: int
    variance: float
    deviations: float  # Z, in standard deviations
    chance: float  # p


def mann_kendall(series: ArrayLike) -> Trend:
    """The test the EB paper (Table 12) applies to the hazard at ages 1 .. t95, with the correction for ties.

    Evidence for people; nothing is decided by it, because at the windows in use it says little (section 6.8).
    """
    values = np.asarray(series, dtype=np.float64)
    count = len(values)
    if count < 3:
        raise InputError(f"a trend of {count} values; need >= 3, give more ages")
    score = int(sum(np.sign(values[i + 1 :] - values[i]).sum() for i in range(count - 1)))
    ties = np.unique(values, return_counts=True)[1]
    variance = (_spread(count) - sum(_spread(int(size)) for size in ties)) / 18
    deviations = (score - np.sign(score)) / sqrt(variance) if variance else 0.0
    return Trend(score, variance, float(deviations), erfc(abs(deviations) / sqrt(2)))


def _spread(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)
