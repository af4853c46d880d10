"""WAIT's fluid balance: how full a steady engine is, what it can carry, and thresholds that keep up.

Symbols of Ao, Luo, Simchi-Levi, Wang (2025). A threshold n_j is per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, log, log1p
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.laws.linear import LinearCost
from headgate.cost.model import Chunk, Shape, StepCost


class PaceRange(NamedTuple):
    """Iteration times that sizes n_j = λ_j t can keep: from the shortest to the longest t."""

    shortest: float
    longest: float


def keeping_up(lines: Lines, parts: Sequence[MixPart]) -> PaceRange:
    """All t with ΔT(λt) ≤ t, whatever the memory: none, an InputError, where d1 W ≥ 1."""
    pace = keeping_up_or_none(lines, parts)
    if pace.shortest > pace.longest:
        raise InputError(
            f"unstable: {pressure_said(lines, parts)}; at {rate_of(parts):.4g} requests/s the queue grows "
            "without limit with any memory, serve fewer"
        )
    return pace


def pressure_said(lines: Lines, parts: Sequence[MixPart]) -> str:
    most = max(line.pressure(parts) for line in lines)
    return f"{most:.4g} seconds of work arrive per second, need d1*W < 1"


def keeping_up_or_none(lines: Lines, parts: Sequence[MixPart]) -> PaceRange:
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
    return PaceRange(shortest, longest)


def with_slack(parts: Sequence[MixPart], slacks: Sequence[float]) -> list[MixPart]:
    """The mix as if (1 + ε_j) as many came: all rows of the LP bind at its equilibrium."""
    return [part._replace(rate=part.rate * (1 + slack)) for part, slack in zip(parts, slacks, strict=True)]


MOST = 1e100  # times as many as come: a full batch never holds them


def compound(slack: float, times: int) -> float:
    """(1 + ε)^times, at most so much that whatever is multiplied by it is still a number."""
    return MOST if times * log1p(slack) > log(MOST) else float((1 + slack) ** times)


def rate_of(parts: Sequence[MixPart]) -> float:
    return sum(part.rate for part in parts if part.prompt) or sum(part.rate for part in parts)


# -- what one iteration of a steady mix takes

BELOW = 1.05  # a cost may be this much above its lines, not more
LOOKS = 32  # sizes from small batches to full memory at which a cost that is no straight line is looked at


class MixPart(NamedTuple):
    """What moves together: one type of WAIT with all its stages, or one segment of Nested WAIT.

    A part of size n has n requests at each of its stages. Stage 0 is the prompt, stage k brings output
    token k + 1 and leaves prompt + k tokens of KV.
    """

    rate: float  # requests per second that enter it: λ_j, or Λ_i of a segment
    prompt: float  # prompt tokens of one request that are computed, 0 where no prompt runs: l_j
    decodes: float  # decode stages, output tokens less one without drafts: l'_j
    work: float  # KV tokens touched over all its stages: w_j, or σ_i of a segment
    peak: float = 0.0  # the most KV tokens one request holds in it
    cached: float = 0.0  # prompt tokens that a prefix cache has: held with the prompt, and not computed

    @property
    def stages(self) -> float:
        return self.decodes + (self.prompt > 0)

    def in_steps(self, burst: float) -> MixPart:
        """The same where a stage brings so many tokens on average: fewer of them, each of the same KV."""
        whole = self.prompt + self.cached
        read = (self.work - whole) / burst
        return self._replace(decodes=self.decodes / burst, work=whole + read) if burst != 1 else self


class Line(NamedTuple):
    """A lower bound of an iteration, in seconds, that is exact somewhere: a fixed cost and prices per token.

    With the paper's law (equation 1) there is one line: d0, d1, d1 and 0; with its compute term d2 the last
    two are d1 + d2 and d2.
    """

    fixed: float
    per_context: float  # KV token that a decode reads
    per_prompt: float  # prompt token
    per_decode: float = 0.0

    def price(self, part: MixPart) -> float:
        """Seconds that one request at each stage of the part adds."""
        read = part.work - part.prompt - part.cached
        return self.per_context * read + self.per_prompt * part.prompt + self.per_decode * part.decodes

    def pressure(self, parts: Sequence[MixPart]) -> float:
        """Seconds of work that arrive per second: ρ, the paper's d1 W."""
        return sum(part.rate * self.price(part) for part in parts)


Lines = tuple[Line, ...]


def offered(parts: Sequence[MixPart]) -> float:
    """KV tokens touched per second by arriving requests: W."""
    return sum(part.rate * part.work for part in parts)


def seconds(lines: Lines, parts: Sequence[MixPart], sizes: Sequence[float]) -> float:
    """How long an iteration takes in which every part is full: ΔT(n)."""
    return max(
        line.fixed + sum(size * line.price(part) for size, part in zip(sizes, parts, strict=True))
        for line in lines
    )


def lines_of(cost: StepCost, parts: Sequence[MixPart], capacity: float) -> Lines:
    """What iterations of this mix take, for sizes in proportion to the rates.

    One line, and exact, for the paper's law. Any other cost is looked at from small batches to full memory,
    and the lines are the convex hull below what it says. There prompts that come less than once per iteration
    run whole in some iterations and not at all in the others, as fractional thresholds make them: a step with
    a prompt may cost more than its share of tokens. Where the hull is too far below (tiles are stairs), it is
    lifted.
    """
    if isinstance(cost, LinearCost) and _is_one_line(cost):
        mixed = cost.mixed
        return (Line(mixed.constant, mixed.per_context, mixed.per_prefill, mixed.per_decode),)
    full = capacity / offered(parts)  # seconds' worth of arrivals that fill memory
    active = sum(part.rate * part.stages for part in parts)
    least = min(cost.seconds(Shape(1, 1)) / 4, 1 / active, full / 4)  # one request, at any rate
    looks = [(pace, mean_seconds(cost, parts, pace)) for pace in np.geomspace(least, full, LOOKS).tolist()]
    hull = _below(looks)
    slopes = [max(0.0, (high - low) / (y - x)) for (x, low), (y, high) in pairwise(hull)]
    edges = [(high - slope * y, slope) for (y, high), slope in zip(hull[1:], slopes, strict=True)]
    worst = max(said / max(fixed + slope * pace for fixed, slope in edges) for pace, said in looks)
    lift, work = max(1.0, worst / BELOW), offered(parts)
    return tuple(Line(lift * fixed, lift * slope / work, lift * slope / work) for fixed, slope in edges)


def _is_one_line(cost: LinearCost) -> bool:
    """Do decodes, prompts and both together follow one law, as in equation (1)?"""
    decode, prefill, mixed = cost.decode, cost.prefill, cost.mixed
    return (
        decode.constant == prefill.constant == mixed.constant
        and (decode.per_decode, decode.per_context) == (mixed.per_decode, mixed.per_context)
        and prefill.per_token == mixed.per_prefill
        and not (decode.free_decodes or mixed.free_decodes or any(mixed.by_share))
    )


def mean_seconds(cost: StepCost, parts: Sequence[MixPart], pace: float) -> float:
    """An iteration with `pace` seconds' worth of arrivals at every stage, on average.

    With less than one decode's worth there still is one, where any request decodes: else none would run.
    """
    each_second = sum(part.rate * part.decodes for part in parts)
    busy = max(pace, 1 / each_second) if each_second else pace
    decodes = round(busy * each_second)
    read = round(busy * sum(part.rate * (part.work - part.prompt - part.cached) for part in parts))
    prompts = pace * sum(part.rate for part in parts if part.prompt)
    tokens = pace * sum(part.rate * part.prompt for part in parts)
    if not prompts:
        return cost.seconds(Shape(decodes, read))
    each, many = max(1, round(tokens / prompts)), max(1.0, prompts)
    behind = round(pace * sum(part.rate * part.cached for part in parts) / prompts)
    chunks = (Chunk(behind, each),) * round(many)
    together = cost.seconds(Shape(decodes, read, round(each * many), behind * len(chunks), chunks))
    if prompts >= 1 or not decodes:
        return together
    return prompts * together + (1 - prompts) * cost.seconds(Shape(decodes, read))


def _below(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (a, low), (b, high) = hull[-2:]
            if (high - low) * (x - a) < (y - low) * (b - a):
                break
            hull.pop()
        hull.append((x, y))
    return hull
