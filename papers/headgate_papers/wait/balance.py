"""WAIT's fluid balance as its planner wants it: how full a steady engine is, and thresholds that keep up.

Symbols of Ao, Luo, Simchi-Levi, Wang (2025). A threshold n_j is per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf, log10
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.methods.wait.inventory import (
    Lines,
    MixPart,
    PaceRange,
    keeping_up,
    keeping_up_or_none,
    offered,
    pressure_said,
    rate_of,
    seconds,
)

ROUNDING = 1e-9  # a threshold that is whole but for rounding is whole
DIGITS = 4
Whole = NDArray[np.int64]
Number = TypeVar("Number", int, Whole)


class Equilibrium(NamedTuple):
    """The fluid steady state: every stage of type j holds λ_j ΔT requests. Equations (5) to (8)."""

    seconds: float  # of an iteration: ΔT*
    sizes: tuple[float, ...]  # requests per stage: x_j*
    active: tuple[float, ...]  # requests at all stages: N_j*, the paper's n_j*
    kv: float  # M*
    stage_rate: float  # stages per second, prompts counted: equation (8)
    decode_rate: float  # decode tokens per second


class FilledSizes(NamedTuple):
    sizes: tuple[float, ...]  # n_j, or real-valued x_j
    kv: float  # M^π
    seconds: float  # ΔT(n)


def equilibrium(lines: Lines, parts: Sequence[MixPart]) -> Equilibrium:
    iteration = keeping_up(lines, parts).shortest
    sizes = tuple(part.rate * iteration for part in parts)
    active = tuple(size * part.stages for size, part in zip(sizes, parts, strict=True))
    decoded = sum(part.rate * part.decodes for part in parts)
    return Equilibrium(iteration, sizes, active, held(parts, sizes), sum(active) / iteration, decoded)


def most_rate(lines: Lines, parts: Sequence[MixPart], capacity: float, slots: float = inf) -> float:
    """By how much all rates may be multiplied before no policy keeps up.

    Over busy time the work done per second is at most C / ΔT with memory full of batched KV (or with all
    slots taken); the load is one over this number.
    """
    full = min(capacity / offered(parts), slots / _stages(parts))
    if full == inf:  # neither ends: only the price of a request counts
        return 1 / max(line.pressure(parts) for line in lines)
    corners = [full]
    for line in lines:  # ΔT(y) / y may have its lowest point where two lines cross, before memory is full
        for other in lines:
            steeper = line.pressure(parts) - other.pressure(parts)
            if steeper > 0 and 0 < (other.fixed - line.fixed) / steeper < full:
                corners.append((other.fixed - line.fixed) / steeper)
    return max(
        size / max(line.fixed + size * line.pressure(parts) for line in lines) for size in corners if size > 0
    )


def pace_within(
    lines: Lines, parts: Sequence[MixPart], capacity: float, slots: float = inf, spare: float = 0.0
) -> PaceRange:
    """The t that keep up, fit and find slots: ΔT* ≤ t ≤ (C - spare)/W. An InputError where there is none.

    `spare` is KV to be left free; fractional thresholds want one request of each type.
    """
    pace = keeping_up_or_none(lines, parts)
    longest = min(pace.longest, (capacity - spare) / offered(parts), slots / _stages(parts))
    if capacity <= spare or pace.shortest > longest * (1 + ROUNDING):
        raise InputError(_why_not(lines, parts, capacity, slots, spare))
    return PaceRange(pace.shortest, longest)


def _why_not(lines: Lines, parts: Sequence[MixPart], capacity: float, slots: float, spare: float) -> str:
    pace, kv = keeping_up_or_none(lines, parts), f"C = {capacity:,.0f}"
    stable = pace.shortest <= pace.longest
    full = pace.shortest * offered(parts)
    enough = f"--kv-tokens {ceil((full + spare) * (1 + ROUNDING))}"
    if capacity <= spare:
        remedy = f"give {enough} for this load" if stable else "raise --kv-tokens"
        return f"sum of l_j + l'_j < C: one request of each type needs {spare:,.0f} KV tokens, {kv}; {remedy}"
    share = most_rate(lines, parts, capacity - spare, slots)
    less = f"serve at most {rounded(share * rate_of(parts), up=False):g} of {rate_of(parts):.4g} requests/s"
    if not stable:
        return f"unstable: {pressure_said(lines, parts)}; {less}"
    if full > capacity:
        told = f"the fluid equilibrium needs M* = {full:,.0f} KV tokens, need M* <= {kv}"
        return f"unstable: {told}; {less}, or give {enough}"
    if full + spare > capacity:
        told = f"M* = {full:,.0f} KV tokens and one request more of each type, {spare:,.0f}, need <= {kv}"
        return f"no room for fractional thresholds: {told}; {less}, or give {enough}"
    active = pace.shortest * _stages(parts)
    told = f"the fluid equilibrium has N* = {active:.4g} requests active, need N* <= slots = {slots:g}"
    return f"unstable: {told}; {less}, or give --slots {ceil(active)}"


def filled(lines: Lines, parts: Sequence[MixPart], sizes: Sequence[float]) -> FilledSizes:
    return FilledSizes(tuple(sizes), held(parts, sizes), seconds(lines, parts, sizes))


def along_the_ray(lines: Lines, parts: Sequence[MixPart], pace: float) -> FilledSizes:
    """Real-valued thresholds x_j = λ_j t: the least memory for this time per output token."""
    return filled(lines, parts, [part.rate * pace for part in parts])


def seen_kind(rate: float, prompts: Whole, decodes: Whole, block: int = 1) -> MixPart:
    work = float(np.mean(kv_work(prompts, decodes, block)))
    longest = int((prompts + decodes).max())
    return MixPart(rate, float(prompts.mean()), float(decodes.mean()), work, -(-longest // block) * block)


def kv_work(prompt: Number, decodes: Number, block: int = 1) -> Number:
    """KV tokens touched by one request, in whole blocks: (l'+1)(l + l'/2) for blocks of one."""
    return _blocks_up_to(prompt + decodes, block) - _blocks_up_to(prompt - 1, block)


def _blocks_up_to(tokens: Number, block: int) -> Number:
    """The sum of ⌈m/block⌉ · block over m = 1 .. tokens."""
    whole, rest = divmod(tokens, block)
    return block * (block * whole * (whole + 1) // 2 + rest * (whole + 1))


def held(parts: Sequence[MixPart], sizes: Sequence[float]) -> float:
    """KV tokens of a batch in which every part is full: M^π."""
    return sum(size * part.work for size, part in zip(sizes, parts, strict=True))


def rounded(value: float, up: bool) -> float:
    """Four digits, never on the wrong side of a bound."""
    if not 0 < value < inf:
        return value
    scale = 10.0 ** (DIGITS - 1 - floor(log10(value)))
    return (floor(value * scale) + up) / scale


def _stages(parts: Sequence[MixPart]) -> float:
    """Stages per second that arrive: in iterations of t seconds so many times t requests are active."""
    return sum(part.rate * part.stages for part in parts)
