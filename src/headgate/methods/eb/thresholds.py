"""EB's plan for a workload: how many requests it holds, and how many idle slots end a decode phase."""

from __future__ import annotations

from math import exp, expm1, floor, inf, log1p, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.estimators.hazard import Survival
from headgate.methods.eb.costs import Lengths, PhaseCosts

LOWEST, HIGHEST = 0.01, 0.80  # bounds of the share in the paper's public code


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


def _at(survival: Survival, ages: NDArray[np.int64]) -> NDArray[np.float64]:
    """S(t) for many t, the tail beyond the curve too."""
    last = len(survival.curve) - 1
    beyond = np.maximum(ages - last, 0)
    return survival.curve[np.minimum(ages, last)] * (1 - survival.ending) ** beyond


# -- how many requests memory holds


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
    check_capacity(ending, prompt + block / 2, capacity)
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


def check_capacity(ending: float, prompt: float, capacity: float) -> None:
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
    share = stationary_share(survival, costs.overhead).share
    clipped = settle(share, bounds.most).share
    if clipped >= 1:  # one slot: no other request to wait for
        return settle(share, 1)
    ending, (capacity, most, least, miss, block) = 1 / lengths.output, bounds
    found = safe_slots(clipped, ending, lengths.prompt, lengths.prompt_sd, capacity, miss=miss, block=block)
    return settle(share, min(max(found, least), most))
