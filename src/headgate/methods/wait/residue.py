"""How many wait between two segments of Nested WAIT: the random walk that memory must be kept for."""

from __future__ import annotations

from math import exp, expm1, inf, log, log1p
from typing import NamedTuple

from headgate.core.errors import InputError

LARGE = 30.0  # above this exp(θ) is taken apart, or it would lose the small term


class Walk(NamedTuple):
    """The residue of segment k: a batch of segment k-1 adds Binomial(before, stay), n_k leave when they can.

    Z ← Z + Y - n·1{Z + Y ≥ n}.
    """

    before: float  # n_{k-1}
    size: float  # n_k
    stay: float  # p_{k-1}: of the requests that leave segment k-1, the share that goes on

    @property
    def ratio(self) -> float:
        """n_k / n_{k-1}; condition (10) wants it above `stay`."""
        return self.size / self.before

    @property
    def decay(self) -> float:
        return decay(self.ratio, self.stay)

    def tail(self, at_least: float) -> float:
        """A bound on the probability that so many are left over: exp(-θ(c - n))."""
        rate = self.decay
        if rate == inf:
            return 0.0 if at_least > self.size - 1 else 1.0
        return min(1.0, exp(-rate * (at_least - self.size)))

    @property
    def mean(self) -> float:
        """A bound on the mean residue: n_k + n_{k-1} p(1-p) / (2(n_k - n_{k-1} p))."""
        drift = self.size - self.before * self.stay
        return self.size + self.before * self.stay * (1 - self.stay) / (2 * drift) if drift > 0 else inf


def decay(ratio: float, stay: float) -> float:
    """θ > 0 with -θ r + ln(1 - p + p e^θ) = 0: zero where r ≤ p, infinite where r ≥ 1.

    The paper's lower bound (18) divides by n_k; only 8(r - p), divided by n_{k-1}, is one. It
    is where the search begins.
    """
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    if not (0 <= stay <= 1 and ratio > 0):
        raise InputError(f"ratio={ratio}, stay={stay}; need ratio > 0 and 0 <= stay <= 1")
    if ratio >= 1 or stay == 0:
        return inf
    if ratio <= stay:
        return 0.0

    def balance(theta: float) -> float:
        if theta > LARGE:
            return theta * (1 - ratio) + log(stay + (1 - stay) * exp(-theta))
        return -theta * ratio + log1p(stay * expm1(theta))

    low = 8 * (ratio - stay) * (1 - 1e-9)
    high = 2 * low
    while balance(high) <= 0:
        high *= 2
    return float(brentq(balance, low, high, xtol=1e-14, rtol=1e-14))
