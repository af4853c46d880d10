"""WAIT's fluid balance: how full a steady engine is, what it can carry, and thresholds that keep up.

Symbols of Ao, Luo, Simchi-Levi, Wang (2025), as corrected in our specification: a threshold n_j is per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.planners.iteration import Lines, Part, offered, seconds

ROUNDING = 1e-9  # a threshold that is whole but for rounding is whole
MOST_ROUNDS = 100_000  # of the search for least thresholds; each raises at least one of them


class Equilibrium(NamedTuple):
    """The fluid steady state: every stage of type j holds λ_j ΔT requests. Equations (5) to (8)."""

    seconds: float  # of an iteration: ΔT*
    sizes: tuple[float, ...]  # requests per stage: x_j*
    active: tuple[float, ...]  # requests at all stages: N_j*, the paper's n_j*
    kv: float  # M*
    stage_rate: float  # stages per second, prompts counted: equation (8)
    decode_rate: float  # decode tokens per second


class Thresholds(NamedTuple):
    """Sizes of the parts, and what a batch with all of them takes."""

    sizes: tuple[float, ...]  # n_j, or real-valued x_j
    kv: float  # M^π
    seconds: float  # ΔT(n)


class Pace(NamedTuple):
    """Iteration times that sizes n_j = λ_j t can keep: from the shortest to the longest t."""

    shortest: float
    longest: float


def equilibrium(lines: Lines, parts: Sequence[Part]) -> Equilibrium:
    """The fluid steady state, or an InputError when more work arrives than can ever be done."""
    iteration = keeping_up(lines, parts).shortest
    sizes = tuple(part.rate * iteration for part in parts)
    active = tuple(size * part.stages for size, part in zip(sizes, parts, strict=True))
    kv = sum(size * part.work for size, part in zip(sizes, parts, strict=True))
    decoded = sum(part.rate * part.decodes for part in parts)
    return Equilibrium(iteration, sizes, active, kv, sum(active) / iteration, decoded)


def keeping_up(lines: Lines, parts: Sequence[Part]) -> Pace:
    """All t with ΔT(λt) ≤ t, whatever the memory. Section 2.1: none where d1 W ≥ 1."""
    shortest, longest = 0.0, inf
    for line in lines:
        pressure = line.pressure(parts)
        if pressure < 1:
            shortest = max(shortest, line.fixed / (1 - pressure))
        elif line.fixed < 0:
            longest = min(longest, line.fixed / (1 - pressure))
        else:
            longest = -inf
    if shortest > longest:
        most = max(line.pressure(parts) for line in lines)
        raise InputError(
            f"unstable: {most:.4g} seconds of work arrive per second, need d1*W < 1 (1 - d1*W > 0); "
            f"at {_rate(parts):.4g} requests/s the queue grows for ever, below {_rate(parts) / most:.4g} it "
            "need not"
        )
    return Pace(shortest, longest)


def most_rate(lines: Lines, parts: Sequence[Part], capacity: float, seats: float = inf) -> float:
    """By how much all rates may be multiplied before no policy keeps up. Section 2.3, the capacity lemma.

    Over busy time the work done per second is at most C / ΔT with memory full of batched KV (or with all
    seats taken); the load u of the specification is one over this number.
    """
    full = min(capacity / offered(parts), seats / sum(part.rate * part.stages for part in parts))
    corners = [full]
    for line in lines:  # ΔT(y) / y may have its lowest point where two lines cross, before memory is full
        for other in lines:
            steeper = line.pressure(parts) - other.pressure(parts)
            if steeper > 0 and 0 < (other.fixed - line.fixed) / steeper < full:
                corners.append((other.fixed - line.fixed) / steeper)
    return max(
        size / max(line.fixed + size * line.pressure(parts) for line in lines) for size in corners if size > 0
    )


def pace_within(lines: Lines, parts: Sequence[Part], capacity: float) -> Pace:
    """The t that keep up and fit: ΔT* ≤ t ≤ C/W. Empty, and so an InputError, where C < M*."""
    pace = keeping_up(lines, parts)
    longest = min(pace.longest, capacity / offered(parts))
    if pace.shortest > longest * (1 + ROUNDING):
        share = most_rate(lines, parts, capacity)
        raise InputError(
            f"unstable: the fluid equilibrium needs M* = {pace.shortest * offered(parts):,.0f} KV tokens, "
            f"need M* <= C = {capacity:,.0f}; serve at most {share * _rate(parts):.4g} of "
            f"{_rate(parts):.4g} requests/s, or raise --kv-tokens"
        )
    return Pace(pace.shortest, longest)


def filled(lines: Lines, parts: Sequence[Part], sizes: Sequence[float]) -> Thresholds:
    """Sizes with what they take."""
    kv = sum(size * part.work for size, part in zip(sizes, parts, strict=True))
    return Thresholds(tuple(sizes), kv, seconds(lines, parts, sizes))


def along_the_ray(lines: Lines, parts: Sequence[Part], pace: float) -> Thresholds:
    """Real-valued thresholds x_j = λ_j t: the least memory for this time per output token. Section 3.4."""
    return filled(lines, parts, [part.rate * pace for part in parts])


def with_slack(parts: Sequence[Part], slacks: Sequence[float]) -> list[Part]:
    """The mix as if (1 + ε_j) as many came: all rows of the LP of section 3.4 bind at its equilibrium."""
    return [part._replace(rate=part.rate * (1 + slack)) for part, slack in zip(parts, slacks, strict=True)]


def least_thresholds(
    lines: Lines, parts: Sequence[Part], capacity: float, slack: float = 0.0, strict: bool = True
) -> Thresholds:
    """The least whole thresholds that satisfy (9), strictly unless told otherwise.

    Iterates n_j ← ⌊(1+ε) λ_j ΔT(n)⌋ + 1 from n = 1: the map is monotone, so the first fixed point is the
    smallest solution, or memory runs out first.
    """
    one_each = sum(part.work for part in parts)
    if one_each > capacity:
        raise InputError(
            f"C = {capacity:,.0f} KV tokens are below the {one_each:,.0f} that one request at each stage of "
            "each type needs (sum of w_j <= C); use fractional thresholds, or raise --kv-tokens"
        )
    keeping_up(lines, with_slack(parts, [slack] * len(parts)))
    sizes = [1] * len(parts)
    for _ in range(MOST_ROUNDS):
        found = filled(lines, parts, sizes)
        if found.kv > capacity:
            break
        wanted = [(1 + slack) * part.rate * found.seconds for part in parts]
        least = [floor(x) + 1 if strict else ceil(x - ROUNDING) for x in wanted]
        raised = [max(size, more) for size, more in zip(sizes, least, strict=True)]
        if raised == sizes:
            return found
        sizes = raised
    raise InputError(
        f"no whole thresholds satisfy (9), DT(n) <= n_j/lambda_j, within C = {capacity:,.0f} KV tokens: "
        f"{tuple(sizes)} would already need {found.kv:,.0f}; use fractional thresholds, a smaller slack, or "
        "raise --kv-tokens"
    )


def check_thresholds(
    lines: Lines, parts: Sequence[Part], sizes: Sequence[float], capacity: float
) -> list[str]:
    """Every inequality that given thresholds violate, each with the nearest value that does not."""
    found, faults = filled(lines, parts, sizes), []
    if found.kv > capacity:
        faults.append(
            f"M^pi <= C: a batch of {_list(sizes)} holds {found.kv:,.0f} KV tokens, C = {capacity:,.0f}; "
            f"{_list([size * capacity / found.kv for size in sizes])} would fit"
        )
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True), 1):
        needed = part.rate * found.seconds
        if size < needed * (1 - ROUNDING):
            faults.append(
                f"(9) DT(n) <= n_{number}/lambda_{number}: {found.seconds:.6g} s > {size:g}/{part.rate:g} s; "
                f"n_{number} must be at least {needed:.4g}"
            )
    return faults


def printed_rule(parts: Sequence[Part], batch: float) -> tuple[float, ...]:
    """The paper's n_j = B ρ_j / (l'_j + 1) with ρ_j = λ_j/Λ. Long types get too few; see `work_share`."""
    return tuple(batch * part.rate / _rate(parts) / part.stages for part in parts)


def work_share(parts: Sequence[Part], batch: float) -> tuple[float, ...]:
    """The same with ρ_j the share of stages, λ_j(l'_j+1): all types are then served in proportion."""
    stages = sum(part.rate * part.stages for part in parts)
    return tuple(batch * part.rate / stages for part in parts)


def _rate(parts: Sequence[Part]) -> float:
    """Requests per second from outside."""
    return sum(part.rate for part in parts if part.prompt) or sum(part.rate for part in parts)


def _list(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
