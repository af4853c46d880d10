"""The decode phase counted exactly when ends do not depend on age: a chain that loses some per step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, xlog1py, xlogy  # type: ignore[import-untyped]

from headgate.core.errors import InputError


class ExactPhases(NamedTuple):
    """For every threshold k = 1 .. N (at index k - 1): mean iterations of a phase, slots refilled."""

    iterations: NDArray[np.float64]
    refilled: NDArray[np.float64]

    def cost(self, overhead: float) -> NDArray[np.float64]:
        """The fixed cost per refilled slot for every k, in decode iterations: (E[tau] + g) / E[K]."""
        return (self.iterations + overhead) / self.refilled


def exact_phases(slots: int, ending: float) -> ExactPhases:
    """N requests, each ends with chance `ending` in every iteration, until k slots are idle.

    The number alive only falls. reached(n) is the chance that it is ever exactly n, and it then stays for 1 /
    (1 - (1 - p)^n) iterations on average; sums of these over n > N - k give both answers for all k in one
    sweep of N^2 / 2 steps. No fluid limit: several may end at once, so more than k slots are refilled. Ours,
    to judge equation (3), which it confirms within 0.01 in the share.
    """
    if slots < 1 or not 0 < ending < 1:
        raise InputError(f"slots={slots}, ending={ending}; need slots >= 1 and 0 < ending < 1")
    factorials = gammaln(np.arange(slots + 1) + 1.0)
    logs_ending = xlogy(np.arange(slots + 1), ending)
    logs_staying = xlog1py(np.arange(slots + 1), -ending)
    reached = np.zeros(slots + 1)
    reached[slots] = 1.0
    visits = np.zeros(slots + 1)
    for alive in range(slots, 0, -1):
        visits[alive] = reached[alive] / -np.expm1(logs_staying[alive])
        left = np.arange(alive)  # how many live on
        ways = factorials[alive] - factorials[left] - factorials[alive - left]
        jump = np.exp(ways + logs_staying[left] + logs_ending[alive - left])
        reached[:alive] += visits[alive] * jump
    iterations = np.cumsum(visits[:0:-1])
    refilled = ending * np.cumsum((visits * np.arange(slots + 1))[:0:-1])
    return ExactPhases(iterations, refilled)


def exact_refill(slots: int, ending: float, overhead: float) -> int:
    """The threshold k with the least fixed cost per refilled slot; the smaller of equals."""
    if not overhead >= 0:
        raise InputError(f"overhead={overhead} decode iterations; need >= 0, check the costs")
    return int(np.argmin(exact_phases(slots, ending).cost(overhead))) + 1
