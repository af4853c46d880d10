"""How many requests EB may hold: the paper's three memory bounds, and one that keeps its promise."""

from __future__ import annotations

from math import exp, floor, inf, log, log1p, sqrt
from typing import NamedTuple

from headgate.core.errors import InputError


class PaperSlots(NamedTuple):
    """The bounds of equation (6), before any clamp; with little memory they are negative."""

    per_slot: float  # D, KV tokens per seat when a phase begins
    overshoot: float  # v-bar, the mean of the exponential bound on the excess, KV tokens
    static: int
    expected: int
    overflow: int  # the paper's N*


class SafeSlots(NamedTuple):
    """`slots` that overflow memory in at most the given share of cycles, and how they come about."""

    slots: int
    exact: float  # before rounding down and clamping
    peak: float  # KV tokens per seat at the worst moment of a phase, on average
    spread: float  # their standard deviation per seat
    peak_at: float  # that moment, in iterations after the phase begins


def paper_slots(
    share: float, ending: float, prompt: float, capacity: float, miss: float = 0.01
) -> PaperSlots:
    """Equation (6): seats so that a cycle overflows `capacity` KV tokens with chance `miss`, or so it says.

    Here to compare: the claim does not hold (up to 77 % of cycles overflow at 1 %, section 6.8), because the
    spread at the phase start is left out and memory is taken to fall from there on (erratum E4).
    """
    _check(share, ending, prompt, capacity, miss)
    # theta, p0, zeta, D and v-bar as in section 3.5 of our specification.
    zeta = -log1p(-share)
    per_slot = prompt + (1 - share) / (share * ending) * zeta
    overshoot = 1 / (ending**2 * prompt)
    static, expected, overflow = (
        floor((capacity - overshoot * weight) / per_slot) for weight in (0.0, 1.0, log(1 / miss))
    )
    return PaperSlots(per_slot, overshoot, static, expected, overflow)


def safe_slots(
    share: float,
    ending: float,
    prompt: float,
    prompt_sd: float,
    capacity: float,
    *,
    miss: float = 0.01,
    block: int = 0,
    least: int = 1,
    most: float = inf,
) -> SafeSlots:
    """Seats so that KV at its peak, plus as many deviations as `miss` asks for, fits: N_safe of section 3.5.

    Ours, with the inputs of (6). The peak is where the fluid memory of a phase is highest, which is inside
    the phase when outputs are long; the sum over seats is taken as normal. Simulated at 1 % it overflows in
    0 to 3.4 % of cycles. `ending` should be one over the mean output, not the fitted base of a rising hazard.

    Half a `block` of KV is added to each prompt for rounding; 0 counts tokens. The answer is clamped to
    `least` and `most`, the latter last; `least` above what fits breaks the promise, and the gate must hold.
    """
    _check(share, ending, prompt + block / 2, capacity, miss)
    if not prompt_sd >= 0:
        raise InputError(f"prompt_sd={prompt_sd}; need >= 0, a standard deviation is never negative")
    from scipy.special import ndtri  # type: ignore[import-untyped]

    # theta, p0, zeta, T, A0, s, e, m, D_pk, sigma, z as in section 3.5 of our specification.
    mean_prompt = prompt + block / 2
    length = -log1p(-share) / ending
    age = length * (1 - share) / share
    peak_at = min(max(1 / ending - mean_prompt - age, 0.0), length)
    alive = exp(-ending * peak_at)
    held = mean_prompt + age + peak_at
    peak = alive * held
    variance = alive * (prompt_sd**2 + length**2 * (1 - share) / share**2 + held**2) - peak**2
    spread = sqrt(max(variance, 0.0))
    margin = -float(ndtri(miss)) * spread
    exact = ((-margin + sqrt(margin**2 + 4 * peak * capacity)) / (2 * peak)) ** 2
    return SafeSlots(int(min(max(floor(exact), 1, least), most)), exact, peak, spread, peak_at)


def _check(share: float, ending: float, prompt: float, capacity: float, miss: float) -> None:
    if not 0 < share < 1:
        raise InputError(f"share={share}; need 0 < share < 1, clip the threshold first")
    if not 0 < ending < 1:
        raise InputError(f"ending={ending}; need 0 < ending < 1, give one over the mean output")
    if not prompt > 0:
        raise InputError(f"prompt={prompt}; need > 0, give the mean prompt in tokens")
    if not 0 < miss < 1:
        raise InputError(f"miss={miss}; need 0 < miss < 1, 0.01 is usual")
    if not capacity >= prompt + 1 / ending:
        raise InputError(
            f"capacity={capacity} KV tokens < {prompt + 1 / ending:.0f}, one mean request; give more memory "
            "or limit lengths"
        )
