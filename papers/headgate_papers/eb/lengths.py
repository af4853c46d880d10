"""Lengths with published moments, for data sets we do not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headgate.workloads.lengths import Fixed, LengthLaw, Uniform
from headgate.workloads.workload import Whole

FINE = 4000  # requests the moments were published for, and quantiles they are matched on
Values = NDArray[np.float64]


@dataclass(frozen=True)
class CutGamma:
    """`shift` plus a gamma law, cut to [low, high], with this mean and deviation after the cut.

    What is cut piles up at the ends, as it does when an engine stops at max_tokens. A draw is a random order
    of equally spaced quantiles, so that every sample has the published moments.
    """

    mean: float
    sd: float
    low: int
    high: int
    shift: float = 0.0

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        shape, scale = _gamma(self)
        return _whole(_gamma_values(self, shape, scale, _levels(count)), generator)


@dataclass(frozen=True)
class CutLogNormal:
    """`shift` plus a log-normal law, cut below at `low`, of this mean; its largest of 4,000 is `high`."""

    mean: float
    low: int
    high: int
    shift: float = 0.0

    def draw(self, count: int, generator: np.random.Generator) -> Whole:
        middle, sigma = _log_normal(self)
        return _whole(_log_normal_values(self, middle, sigma, _levels(count)), generator)


@dataclass(frozen=True)
class DataSet:
    """The laws that stand for a data set, and how many requests the paper sent."""

    prompt: LengthLaw
    output: LengthLaw
    forced: LengthLaw | None = None  # outputs every request was forced to in the paper's runs


# Table 9 of the paper. Prompts of WildChat are not published: the mean is
# the one with which EB on the published H200 card serves the published 21.5 requests/s of the 8B model.
WILDCHAT_PROMPT = 960
DATA_SETS = {
    "ShareGPT": DataSet(CutLogNormal(105, 1, 20448), CutGamma(280, 153, 2, 500)),
    "LongBench": DataSet(Uniform(2500, 0.6), CutGamma(11, 4, 1, 19), Fixed(20)),
    "WildChat": DataSet(CutGamma(WILDCHAT_PROMPT, WILDCHAT_PROMPT, 1, 8192), CutGamma(310, 245, 1, 1934)),
    "NuminaMath": DataSet(
        CutLogNormal(122, 16, 1395, shift=15), CutGamma(1039, 228, 800, 3149, shift=799), Fixed(4000)
    ),
}


def _levels(count: int) -> Values:
    """Equally spaced probabilities."""
    return (np.arange(count) + 0.5) / count


def _whole(values: Values, generator: np.random.Generator) -> Whole:
    return generator.permutation(np.maximum(np.rint(values), 1).astype(np.int64))


def _gamma_values(law: CutGamma, shape: float, scale: float, levels: Values) -> Values:
    from scipy.special import gammaincinv  # type: ignore[import-untyped]

    return np.asarray(np.clip(law.shift + scale * gammaincinv(shape, levels), law.low, law.high))


def _log_normal_values(law: CutLogNormal, middle: float, sigma: float, levels: Values) -> Values:
    from scipy.special import ndtri

    return np.asarray(np.clip(law.shift + np.exp(middle + sigma * ndtri(levels)), law.low, law.high))


@lru_cache(maxsize=32)
def _gamma(law: CutGamma) -> tuple[float, float]:
    """Shape and scale that give the mean and deviation after the cut."""
    from scipy.optimize import fsolve  # type: ignore[import-untyped]

    levels, rest = _levels(FINE), law.mean - law.shift

    def misses(logs: Values) -> Values:
        shape, scale = np.exp(logs)
        values = _gamma_values(law, float(shape), float(scale), levels)
        return np.array([values.mean() / law.mean - 1, values.std() / law.sd - 1])

    start = np.log([(rest / law.sd) ** 2, law.sd**2 / rest])
    shape, scale = np.exp(fsolve(misses, start))
    return float(shape), float(scale)


@lru_cache(maxsize=32)
def _log_normal(law: CutLogNormal) -> tuple[float, float]:
    """Middle and sigma of the logarithm that give the mean and the largest of 4,000."""
    from scipy.optimize import brentq
    from scipy.special import ndtri

    levels = _levels(FINE)
    top, reach = np.log(law.high - law.shift), float(ndtri(levels[-1]))

    def miss(sigma: float) -> float:
        return float(_log_normal_values(law, top - sigma * reach, sigma, levels).mean()) - law.mean

    sigma = float(brentq(miss, 0.05, 2.6))
    return float(top - sigma * reach), sigma
