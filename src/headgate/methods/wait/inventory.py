"""WAIT's fluid balance: how full a steady engine is, what it can carry, and thresholds that keep up.

Symbols of Ao, Luo, Simchi-Levi, Wang (2025). A threshold n_j is per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, inf
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.methods.wait.iteration import Lines, Part, held, offered, seconds
from headgate.methods.wait.nearest import nearest, rounded

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
    decoded = sum(part.rate * part.decodes for part in parts)
    return Equilibrium(iteration, sizes, active, held(parts, sizes), sum(active) / iteration, decoded)


def keeping_up(lines: Lines, parts: Sequence[Part]) -> Pace:
    """All t with ΔT(λt) ≤ t, whatever the memory: none, an InputError, where d1 W ≥ 1."""
    pace = _pace(lines, parts)
    if pace.shortest > pace.longest:
        raise InputError(
            f"unstable: {_pressure(lines, parts)}; at {_rate(parts):.4g} requests/s the queue grows "
            "without limit with any memory, serve fewer"
        )
    return pace


def _pressure(lines: Lines, parts: Sequence[Part]) -> str:
    most = max(line.pressure(parts) for line in lines)
    return f"{most:.4g} seconds of work arrive per second, need d1*W < 1"


def _pace(lines: Lines, parts: Sequence[Part]) -> Pace:
    """The same; the shortest is above the longest where there is none."""
    shortest, longest = 0.0, inf
    for line in lines:
        pressure = line.pressure(parts)
        if pressure < 1:
            shortest = max(shortest, line.fixed / (1 - pressure))
        elif line.fixed < 0:
            longest = min(longest, line.fixed / (1 - pressure))
        else:
            longest = -inf
    return Pace(shortest, longest)


def most_rate(lines: Lines, parts: Sequence[Part], capacity: float, seats: float = inf) -> float:
    """By how much all rates may be multiplied before no policy keeps up.

    Over busy time the work done per second is at most C / ΔT with memory full of batched KV (or with all
    seats taken); the load is one over this number.
    """
    full = min(capacity / offered(parts), seats / _stages(parts))
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
    lines: Lines, parts: Sequence[Part], capacity: float, seats: float = inf, spare: float = 0.0
) -> Pace:
    """The t that keep up, fit and find seats: ΔT* ≤ t ≤ (C - spare)/W. An InputError where there is none.

    `spare` is KV to be left free; fractional thresholds want one request of each type.
    """
    pace = _pace(lines, parts)
    longest = min(pace.longest, (capacity - spare) / offered(parts), seats / _stages(parts))
    if capacity <= spare or pace.shortest > longest * (1 + ROUNDING):
        raise InputError(_why_not(lines, parts, capacity, seats, spare))
    return Pace(pace.shortest, longest)


def _why_not(lines: Lines, parts: Sequence[Part], capacity: float, seats: float, spare: float) -> str:
    """The inequality that rules out every pace, and the nearest load, memory or seats that do not."""
    pace, kv = _pace(lines, parts), f"C = {capacity:,.0f}"
    stable = pace.shortest <= pace.longest
    full = pace.shortest * offered(parts)
    enough = f"--kv-tokens {ceil((full + spare) * (1 + ROUNDING))}"
    if capacity <= spare:
        remedy = f"give {enough} for this load" if stable else "raise --kv-tokens"
        return f"sum of l_j + l'_j < C: one request of each type needs {spare:,.0f} KV tokens, {kv}; {remedy}"
    share = most_rate(lines, parts, capacity - spare, seats)
    less = f"serve at most {rounded(share * _rate(parts), up=False):g} of {_rate(parts):.4g} requests/s"
    if not stable:
        return f"unstable: {_pressure(lines, parts)}; {less}"
    if full > capacity:
        told = f"the fluid equilibrium needs M* = {full:,.0f} KV tokens, need M* <= {kv}"
        return f"unstable: {told}; {less}, or give {enough}"
    if full + spare > capacity:
        told = f"M* = {full:,.0f} KV tokens and one request more of each type, {spare:,.0f}, need <= {kv}"
        return f"no room for fractional thresholds: {told}; {less}, or give {enough}"
    active = pace.shortest * _stages(parts)
    told = f"the fluid equilibrium has N* = {active:.4g} requests active, need N* <= slots = {seats:g}"
    return f"unstable: {told}; {less}, or give --slots {ceil(active)}"


def filled(lines: Lines, parts: Sequence[Part], sizes: Sequence[float]) -> Thresholds:
    """Sizes with what they take."""
    return Thresholds(tuple(sizes), held(parts, sizes), seconds(lines, parts, sizes))


def along_the_ray(lines: Lines, parts: Sequence[Part], pace: float) -> Thresholds:
    """Real-valued thresholds x_j = λ_j t: the least memory for this time per output token."""
    return filled(lines, parts, [part.rate * pace for part in parts])


def with_slack(parts: Sequence[Part], slacks: Sequence[float]) -> list[Part]:
    """The mix as if (1 + ε_j) as many came: all rows of the LP bind at its equilibrium."""
    return [part._replace(rate=part.rate * (1 + slack)) for part, slack in zip(parts, slacks, strict=True)]


def least_thresholds(
    lines: Lines, parts: Sequence[Part], capacity: float, slack: float = 0.0, strict: bool = True
) -> Thresholds:
    """The least whole thresholds that satisfy (9), strictly by default.

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
    """Every inequality that given thresholds violate, each with the nearest thresholds that satisfy all."""
    found, faults = filled(lines, parts, sizes), []
    if found.kv > capacity:
        faults.append(
            f"M^pi <= C: {listed(sizes)} hold {found.kv:,.9g} KV tokens in a batch, C = {capacity:,.0f}"
        )
    for number, (size, part) in enumerate(zip(sizes, parts, strict=True), 1):
        if size < part.rate * found.seconds * (1 - ROUNDING):
            told = f"{found.seconds:.6g} s > {size:g}/{part.rate:.4g} s"
            faults.append(f"(9) DT(n) <= n_{number}/lambda_{number}: {told}")

    def least(sizes: Sequence[float], iteration: float) -> list[float]:
        return [part.rate * iteration for part in parts]

    return with_nearest(faults, nearest(lines, parts, sizes, capacity, least) if faults else None)


def with_nearest(faults: Sequence[str], near: Sequence[float] | None) -> list[str]:
    """The same faults, each with the thresholds that would do."""
    remedy = (
        "no thresholds near them do, serve less" if near is None else f"the nearest that do: {listed(near)}"
    )
    return [f"{fault}; {remedy}" for fault in faults]


def printed_rule(parts: Sequence[Part], batch: float) -> tuple[float, ...]:
    """The paper's n_j = B ρ_j / (l'_j + 1) with ρ_j = λ_j/Λ. Long types get too few; see `work_share`."""
    return tuple(batch * part.rate / _rate(parts) / part.stages for part in parts)


def work_share(parts: Sequence[Part], batch: float) -> tuple[float, ...]:
    """The same with ρ_j the share of stages, λ_j(l'_j+1): all types are then served in proportion."""
    return tuple(batch * part.rate / _stages(parts) for part in parts)


def _rate(parts: Sequence[Part]) -> float:
    """Requests per second from outside."""
    return sum(part.rate for part in parts if part.prompt) or sum(part.rate for part in parts)


def _stages(parts: Sequence[Part]) -> float:
    """Stages per second that arrive: in iterations of t seconds so many times t requests are active."""
    return sum(part.rate * part.stages for part in parts)


def listed(values: Sequence[float]) -> str:
    """Thresholds as a user reads them."""
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
