"""What one iteration of a steady mix takes: the largest of a few straight lines in what the batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headgate.cost.laws.linear import LinearCost
from headgate.cost.model import Chunk, Shape, StepCost

Whole = NDArray[np.int64]
Number = TypeVar("Number", int, Whole)

BELOW = 1.05  # a cost may be this much above its lines, not more
LOOKS = 32  # sizes from small batches to full memory at which a cost that is no straight line is looked at


class Part(NamedTuple):
    """What moves together: one type of WAIT with all its stages, or one segment of Nested WAIT.

    A part of size n has n requests at each of its stages. Stage 0 is the prompt, stage k brings output
    token k + 1 and leaves prompt + k tokens of KV.
    """

    rate: float  # requests per second that enter it: λ_j, or Λ_i of a segment
    prompt: float  # prompt tokens of one request that are computed, 0 where no prompt runs: l_j
    decodes: float  # decode stages, output tokens less one: l'_j
    work: float  # KV tokens touched over all its stages: w_j, or σ_i of a segment
    peak: float = 0.0  # the most KV tokens one request holds in it
    cached: float = 0.0  # prompt tokens that a prefix cache has: held with the prompt, and not computed

    @property
    def stages(self) -> float:
        """Iterations one request takes in it."""
        return self.decodes + (self.prompt > 0)


class Line(NamedTuple):
    """A lower bound of an iteration, in seconds, that is exact somewhere: a fixed cost and prices per token.

    With the paper's law (equation 1) there is one line: d0, d1, d1 and 0; with its compute term d2 the last
    two are d1 + d2 and d2.
    """

    fixed: float
    per_context: float  # KV token that a decode reads
    per_prompt: float  # prompt token
    per_decode: float = 0.0

    def price(self, part: Part) -> float:
        """Seconds that one request at each stage of the part adds."""
        read = part.work - part.prompt - part.cached
        return self.per_context * read + self.per_prompt * part.prompt + self.per_decode * part.decodes

    def pressure(self, parts: Sequence[Part]) -> float:
        """Seconds of work that arrive per second: ρ, the paper's d1 W."""
        return sum(part.rate * self.price(part) for part in parts)


Lines = tuple[Line, ...]


def kind(rate: float, prompt: int, decodes: int, block: int = 1) -> Part:
    """Requests of one prompt and output length; `decodes` is output tokens less the one prompts bring."""
    return Part(
        rate, prompt, decodes, kv_work(prompt, decodes, block), -(-(prompt + decodes) // block) * block
    )


def seen_kind(rate: float, prompts: Whole, decodes: Whole, block: int = 1) -> Part:
    """Requests whose lengths differ, as they were seen: means, and the largest of them."""
    work = float(np.mean(kv_work(prompts, decodes, block)))
    longest = int((prompts + decodes).max())
    return Part(rate, float(prompts.mean()), float(decodes.mean()), work, -(-longest // block) * block)


def kv_work(prompt: Number, decodes: Number, block: int = 1) -> Number:
    """KV tokens touched by one request, in whole blocks: (l'+1)(l + l'/2) for blocks of one."""
    return _blocks_up_to(prompt + decodes, block) - _blocks_up_to(prompt - 1, block)


def _blocks_up_to(tokens: Number, block: int) -> Number:
    """The sum of ⌈m/block⌉ · block over m = 1 .. tokens."""
    whole, rest = divmod(tokens, block)
    return block * (block * whole * (whole + 1) // 2 + rest * (whole + 1))


def offered(parts: Sequence[Part]) -> float:
    """KV tokens touched per second by arriving requests: W."""
    return sum(part.rate * part.work for part in parts)


def held(parts: Sequence[Part], sizes: Sequence[float]) -> float:
    """KV tokens of a batch in which every part is full: M^π."""
    return sum(size * part.work for size, part in zip(sizes, parts, strict=True))


def seconds(lines: Lines, parts: Sequence[Part], sizes: Sequence[float]) -> float:
    """How long an iteration takes in which every part is full: ΔT(n)."""
    return max(
        line.fixed + sum(size * line.price(part) for size, part in zip(sizes, parts, strict=True))
        for line in lines
    )


def lines_of(cost: StepCost, parts: Sequence[Part], capacity: float) -> Lines:
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


def mean_seconds(cost: StepCost, parts: Sequence[Part], pace: float) -> float:
    """An iteration with `pace` seconds' worth of arrivals at every stage, on average.

    With less than one decode's worth there still is one, where anybody decodes: else none would run.
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
    """The convex hull below points that go from left to right."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (a, low), (b, high) = hull[-2:]
            if (high - low) * (x - a) < (y - low) * (b - a):
                break
            hull.pop()
        hull.append((x, y))
    return hull
