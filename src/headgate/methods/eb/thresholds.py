"""EB's plan for a workload: how many requests it holds, and how many idle slots end a decode phase."""

from __future__ import annotations

from math import exp, expm1, floor, inf, log, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.estimators.hazard import LinearHazard, Survival
from headgate.methods.eb.costs import Lengths, PhaseCosts, checked_costs, checked_lengths

LOWEST, HIGHEST = 0.01, 0.80  # bounds of the share in the paper's public code
CORRECTION_CAP = 5.0  # the correction may be at most this many times the base share; public code


class Threshold(NamedTuple):
    """When to refill: as soon as `refill` of `slots` are idle. theta, k and N of the paper."""

    share: float
    refill: int
    slots: int


def base_share(ratio: float) -> float:
    """The best share of slots to let run idle when ends do not depend on age: theta_0 of (3).

    It solves theta / (1 - theta) + log(1 - theta) = gamma, where gamma = p0 alpha_p / alpha_d, here `ratio`,
    is the fixed cost of a refill in decode iterations by the mean output. Batch size, prompts and all costs
    per token cancel. Solved by Newton's method in zeta = -log(1 - theta), from above, where it cannot
    overshoot. The paper gives the equation and no solver.
    """
    gamma = ratio
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


def share_correction(hazard: LinearHazard, share: float, load: float) -> float:
    """How much larger the share should be when the hazard rises with age: Delta theta of equation (5).

    `share` is theta_0 at the hazard's base p0, `load` is rho = beta_d N / alpha_d. First order in the slope
    eta, useful only while eta (1 + rho) / p0^2 is well below 0.3. Its model lets every request
    begin at age zero in each phase, which is right for the first phase only; in a steady state the best
    share hardly depends on the hazard's shape. Our default is `stationary_share`; this is here
    to compare with the paper.
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


def settle(share: float, slots: int, lowest: float = LOWEST, highest: float = HIGHEST) -> Threshold:
    """A share as whole slots: clipped to [max(lowest, 1/N), highest], then rounded, from 1 to N.

    The paper takes the floor. Rounding costs at most 0.05 % where the floor costs 0.6 %.
    """
    clipped = min(max(share, lowest, 1 / slots), max(highest, 1 / slots))
    return Threshold(clipped, min(max(1, round(clipped * slots)), slots), slots)


# -- the best share in a steady state

TERMS = 8  # cohorts counted in the quick bound that rules most phase lengths out


class StationaryShare(NamedTuple):
    """The best share, the iterations of its phase, its fixed cost per slot in iterations."""

    share: float
    phase: int
    cost: float


def stationary_share(survival: Survival, overhead: float) -> StationaryShare:
    """Minimises (T + g) M(T) over whole T >= 1, where g is `overhead`; the share is 1 / M(T).

    When a phase of T iterations begins, those admitted m refills ago are alive with probability S(mT). All
    slots are full then, so each refill is 1 / M(T) of them, M(T) = S(0) + S(T) + S(2T) + ...; a request costs
    (alpha_d T + alpha_p) M(T) / N plus what no threshold changes. Ages carry over from phase to phase; the
    paper's equation (5) begins each at zero, which in a steady state asks for twice the refill or more and
    costs up to 12 %. For geometric outputs this is (3) in whole iterations.

    Phase lengths that cannot win are ruled out first, by M(T) >= max(mean / T, its first terms).
    """
    mean = survival.mean
    guess = max(1, round(sqrt(2 * overhead * mean)))
    best = (guess + overhead) * survival.renewals(guess)
    phases = np.arange(1, max(1, floor(best - overhead)) + 1)
    first_terms = sum(_at(survival, m * phases) for m in range(TERMS))
    bound = (phases + overhead) * np.maximum(mean / phases, first_terms)
    chosen = guess
    for phase in phases[bound <= best * (1 + 1e-12)].tolist():
        cost = (phase + overhead) * survival.renewals(phase)
        if cost < best or (cost == best and phase < chosen):
            best, chosen = cost, phase
    return StationaryShare(1 / survival.renewals(chosen), chosen, best)


def phase_share(survival: Survival, phase: int) -> float:
    """The share of slots that end in a phase of that many iterations, in a steady state: 1 / M(T)."""
    return 1 / survival.renewals(phase)


def _at(survival: Survival, ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """S(t) for many t, the tail beyond the curve too."""
    last = len(survival.curve) - 1
    beyond = np.maximum(ages - last, 0)
    return survival.curve[np.minimum(ages, last)] * (1 - survival.ending) ** beyond


# -- how many requests memory holds


def paper_slots(share: float, ending: float, prompt: float, capacity: float, miss: float = 0.01) -> int:
    """Equation (6): slots so that a cycle overflows `capacity` KV tokens with chance `miss`, or so it says.

    Here to compare: the claim does not hold (up to 88 % of cycles overflow at 1 %: docs/policies/eb.md),
    because the spread at the phase start is left out and memory is taken to fall from there on. With little
    memory the answer is negative.
    """
    _check(ending, prompt, capacity)
    zeta = -log1p(-share)
    per_slot = prompt + (1 - share) / (share * ending) * zeta  # KV tokens when a phase begins
    overshoot = 1 / (ending**2 * prompt)  # the mean of the exponential bound on the excess
    return floor((capacity - overshoot * log(1 / miss)) / per_slot)


def safe_slots(
    share: float,
    ending: float,
    prompt: float,
    prompt_sd: float,
    capacity: float,
    *,
    miss: float = 0.01,
    block: int = 0,
) -> int:
    """Slots so that KV at its peak, plus as many deviations as `miss` asks for, fits: N_safe.

    Ours, with the inputs of (6). The peak is where the fluid memory of a phase is highest, which is inside
    the phase when outputs are long; the sum over slots is taken as normal. Simulated at 1 % it overflows in
    0 to 3.4 % of cycles. `ending` should be one over the mean output, not the fitted base of a rising hazard.

    Half a `block` of KV is added to each prompt for rounding; 0 counts tokens.
    """
    _check(ending, prompt + block / 2, capacity)
    mean_prompt = prompt + block / 2
    length = -log1p(-share) / ending
    age = length * (1 - share) / share
    peak_at = min(max(1 / ending - mean_prompt - age, 0.0), length)
    alive = exp(-ending * peak_at)
    held = mean_prompt + age + peak_at
    peak = alive * held
    variance = alive * (prompt_sd**2 + length**2 * (1 - share) / share**2 + held**2) - peak**2
    spread = sqrt(max(variance, 0.0))
    margin = -NormalDist().inv_cdf(miss) * spread
    exact = ((-margin + sqrt(margin**2 + 4 * peak * capacity)) / (2 * peak)) ** 2
    return max(floor(exact), 1)


def _check(ending: float, prompt: float, capacity: float) -> None:
    if not capacity >= prompt + 1 / ending:
        raise InputError(
            f"capacity={capacity} KV tokens < {prompt + 1 / ending:.0f}, one mean request; give more memory "
            "or limit lengths"
        )


# -- the whole plan


class SlotBounds(NamedTuple):
    """What bounds the slots: KV `capacity` in tokens, `most` of them, and no fewer than `least`."""

    capacity: float
    most: int
    least: int = 1
    miss: float = 0.01  # epsilon, the accepted share of cycles that overflow
    block: int = 0  # KV tokens per block; 0 counts tokens


def stationary_plan(costs: PhaseCosts, lengths: Lengths, survival: Survival, bounds: SlotBounds) -> Threshold:
    """The steady-state share, and slots that are safe.

    `least` slots above what fits break the promise, and the gate must hold.
    """
    share = stationary_share(survival, checked_costs(costs).overhead).share
    clipped = settle(share, bounds.most).share
    checked_lengths(lengths)
    if clipped >= 1:  # one slot: no other request to wait for
        return settle(share, 1)
    ending, (capacity, most, least, miss, block) = 1 / lengths.output, bounds
    found = safe_slots(clipped, ending, lengths.prompt, lengths.prompt_sd, capacity, miss=miss, block=block)
    return settle(share, min(max(found, least), most))
