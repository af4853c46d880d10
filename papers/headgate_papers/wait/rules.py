"""The paper's own rules for thresholds: whole ones, and shares of a batch limit."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

from headgate.core.errors import InputError
from headgate.methods.wait.inventory import Lines, MixPart, keeping_up, with_slack
from headgate_papers.wait.balance import ROUNDING, FilledSizes, filled
from headgate_papers.wait.segments import Segments

MOST_ROUNDS = 100_000  # of the search for least thresholds; each raises at least one of them


def least_thresholds(
    lines: Lines, parts: Sequence[MixPart], capacity: float, slack: float = 0.0
) -> FilledSizes:
    """The least whole thresholds that satisfy (9) strictly.

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
        least = [floor((1 + slack) * part.rate * found.seconds) + 1 for part in parts]
        raised = [max(size, more) for size, more in zip(sizes, least, strict=True)]
        if raised == sizes:
            return found
        sizes = raised
    raise InputError(
        f"no whole thresholds satisfy (9), DT(n) <= n_j/lambda_j, within C = {capacity:,.0f} KV tokens: "
        f"{tuple(sizes)} would already need {found.kv:,.0f}; use fractional thresholds, a smaller slack, or "
        "raise --kv-tokens"
    )


def printed_rule(parts: Sequence[MixPart], batch: float) -> tuple[float, ...]:
    """The paper's n_j = B ρ_j / (l'_j + 1) with ρ_j = λ_j/Λ. Long types get too few; see `work_share`."""
    return tuple(batch * part.rate / sum(each.rate for each in parts) / part.stages for part in parts)


def work_share(parts: Sequence[MixPart], batch: float) -> tuple[float, ...]:
    """The same with ρ_j the share of stages, λ_j(l'_j+1): all types are then served in proportion."""
    stages = sum(part.rate * part.stages for part in parts)
    return tuple(batch * part.rate / stages for part in parts)


def least_nested(lines: Lines, segments: Segments, capacity: float, slack: float = 0.0) -> FilledSizes:
    """The least whole thresholds that satisfy (10) strictly.

    n_1 ← ⌊(1+ε)·Λ ΔT(n)⌋ + 1, n_{i+1} ← the least above n_i p_i, at most n_i.
    """
    parts = segments.parts()
    first = 1
    for _ in range(MOST_ROUNDS):
        sizes: list[float] = [first]
        for stay in segments.stays:
            expected = sizes[-1] * stay
            least = max(floor(expected + ROUNDING) + 1, ceil((1 + slack) * expected - ROUNDING))
            sizes.append(min(least, sizes[-1]))
        found = filled(lines, parts, sizes)
        if found.kv > capacity:
            break
        wanted = floor((1 + slack) * (segments.reach[0] * found.seconds)) + 1
        if wanted <= first:
            return found
        first = wanted
    raise InputError(
        f"no whole thresholds satisfy (10), DT(n) < n_1/Lambda and n_(i+1)/n_i > p_i, within C = "
        f"{capacity:,.0f} KV tokens: {tuple(sizes)} would already need {found.kv:,.0f}; use fractional "
        "thresholds, fewer requests/s, or raise --kv-tokens"
    )
