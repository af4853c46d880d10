"""EB's refill threshold: the paper's base share, its correction for rising hazards, and whole numbers."""

from __future__ import annotations

from math import exp, expm1, inf, isfinite, log1p, sqrt
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.estimators.hazard import LinearHazard

LOWEST, HIGHEST = 0.01, 0.80  # bounds of the share in the paper's public code
CORRECTION_CAP = 5.0  # the correction may be at most this many times the base share; public code


class Threshold(NamedTuple):
    """When to refill: as soon as `refill` of `slots` seats are idle. theta, k and N of the paper."""

    share: float
    refill: int
    slots: int


def base_share(ratio: float) -> float:
    """The best share of seats to let run idle when ends do not depend on age: theta_0 of (3).

    It solves theta / (1 - theta) + log(1 - theta) = gamma, where gamma = p0 alpha_p / alpha_d, here `ratio`,
    is the fixed cost of a refill in decode iterations by the mean output. Batch size, prompts and all costs
    per token cancel. Solved by Newton's method in zeta = -log(1 - theta), from above, where it cannot
    overshoot. The paper gives the equation and no solver.
    """
    gamma = _checked_ratio(ratio)
    if gamma == 0:
        return 0.0
    zeta = log1p(gamma + sqrt(2 * gamma))
    step = inf
    while abs(step) > 1e-15 * zeta:
        before = abs(step)
        step = (expm1(zeta) - zeta - gamma) / expm1(zeta)
        if abs(step) >= before:  # rounding only
            break
        zeta -= step
    return -expm1(-zeta)


def base_share_lambert(ratio: float) -> float:
    """The same by the lower branch of Lambert's W: 1 / (1 - theta_0) = -W(-exp(-1 - gamma)). A check.

    Near gamma = 0 it loses half the digits (W has a branch point there), and beyond 700 exp underflows;
    use `base_share`.
    """
    from scipy.special import lambertw  # type: ignore[import-untyped]

    gamma = _checked_ratio(ratio)
    return float(1 + 1 / lambertw(-exp(-1 - gamma), -1).real)


def continuous_rate(ending: float) -> float:
    """The rate without ticks for a chance per iteration, -log(1 - p): takes (3) to discrete time."""
    return -log1p(-_checked_ending(ending))


def share_correction(hazard: LinearHazard, share: float, load: float) -> float:
    """How much larger the share should be when the hazard rises with age: Delta theta of equation (5).

    `share` is theta_0 at the hazard's base p0, `load` is rho = beta_d N / alpha_d. First order in the slope
    eta, useful only while eta (1 + rho) / p0^2 is well below 0.3 (section 6.3). Its model lets every request
    begin at age zero in each phase, which is right for the first phase only; in a steady state the best
    share hardly depends on the hazard's shape (erratum E1). Our default is `stationary_share`; this is here
    to compare with the paper.
    """
    theta, rho = share, load
    p0, eta = _checked_ending(hazard.base), hazard.slope
    if not 0 < theta < 1:
        raise InputError(f"share={theta}; need 0 < share < 1, give the root of (3)")
    if not rho >= 0:
        raise InputError(f"load={rho}; need >= 0, check the decode costs")
    zeta = -log1p(-theta)
    bracket = zeta * (theta / (1 - theta) - zeta / 2) + rho * (zeta - theta)
    return eta * (1 - theta) ** 2 / (p0**2 * theta) * bracket


def paper_share(overhead: float, hazard: LinearHazard, load: float, cap: float = CORRECTION_CAP) -> float:
    """Equation (3) at the hazard's base plus its correction (5), at most `cap` times as large; not clipped.

    With `guarded` hazards this is mode "paper" of section 4.2; with raw ones and cap=inf it is Algorithm 1 as
    printed, which has no answer when the fitted base is not positive.
    """
    theta0 = base_share(_checked_ending(hazard.base) * overhead)
    if not theta0:
        return 0.0
    return theta0 + min(share_correction(hazard, theta0, load), cap * theta0)


def settle(share: float, slots: int, lowest: float = LOWEST, highest: float = HIGHEST) -> Threshold:
    """A share as whole seats: clipped to [max(lowest, 1/N), highest], then rounded, from 1 to N.

    The paper takes the floor. Rounding costs at most 0.05 % where the floor costs 0.6 % (section 6.6).
    """
    if slots < 1:
        raise InputError(f"slots={slots}; need >= 1, at least one request must be able to run")
    if not share >= 0:
        raise InputError(f"share={share}; need >= 0, give the best share as planned")
    clipped = min(max(share, lowest, 1 / slots), max(highest, 1 / slots))
    return Threshold(clipped, min(max(1, round(clipped * slots)), slots), slots)


def _checked_ratio(ratio: float) -> float:
    if not (isfinite(ratio) and ratio >= 0):
        raise InputError(
            f"gamma={ratio}; need a finite number >= 0: costs and output rates are never negative"
        )
    return ratio


def _checked_ending(ending: float) -> float:
    if not 0 < ending < 1:
        raise InputError(
            f"a chance to end per iteration of {ending}; need 0 < p0 < 1, use one over the mean output "
            "(`guarded` does)"
        )
    return ending
