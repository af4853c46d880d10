"""What one iteration of a steady mix takes: the largest of a few straight lines in what the batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headgate.cost.model import Chunk, LinearCost, Shape, StepCost

Whole = NDArray[np.int64]
Number = TypeVar("Number", int, Whole)

SMALL = 1 / 8  # of memory: where a cost that is no straight line is looked at beside full memory


class Part(NamedTuple):
    """What moves together: one type of WAIT with all its stages, or one segment of Nested WAIT.

    A part of size n has n requests at each of its stages. Stage 0 is the prompt, stage k brings output
    token k + 1 and leaves prompt + k tokens of KV.
    """

    rate: float  # requests per second that enter it: λ_j, or Λ_i of a segment
    prompt: float  # prompt tokens of one request, 0 where no prompt runs: l_j
    decodes: float  # decode stages, output tokens less one: l'_j
    work: float  # KV tokens touched over all its stages: w_j, or σ_i of a segment
    peak: float = 0.0  # the most KV tokens one request holds in it

    @property
    def stages(self) -> float:
        """Iterations one request takes in it."""
        return self.decodes + (self.prompt > 0)


class Line(NamedTuple):
    """A lower bound of an iteration, in seconds, that is exact somewhere: fixed costs and prices per token.

    With the paper's law (equation 1) there is one line: d0, d1, d1 and 0; with its compute term d2 the last
    two are d1 + d2 and d2.
    """

    fixed: float
    per_context: float  # KV token that a decode reads
    per_prompt: float  # prompt token
    per_decode: float = 0.0

    def price(self, part: Part) -> float:
        """Seconds that one request at each stage of the part adds."""
        read = part.work - part.prompt
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
    """KV tokens touched per second by those who arrive: W."""
    return sum(part.rate * part.work for part in parts)


def seconds(lines: Lines, parts: Sequence[Part], sizes: Sequence[float]) -> float:
    """How long an iteration takes in which every part is full: ΔT(n)."""
    return max(
        line.fixed + sum(size * line.price(part) for size, part in zip(sizes, parts, strict=True))
        for line in lines
    )


def lines_of(cost: StepCost, parts: Sequence[Part], capacity: float) -> Lines:
    """A card's steps as lines for this mix.

    Exact for a `LinearCost` along the ray (sizes in proportion to the rates): its free decodes and its floor
    under mixed steps are corners between lines, and its price by decode share is taken at the share of the
    mix. Any other cost is a line through its steps at full memory and at an eighth of it.
    """
    if isinstance(cost, LinearCost):
        return _exact(cost, parts)
    return (_through(cost, parts, capacity),)


def _exact(cost: LinearCost, parts: Sequence[Part]) -> Lines:
    decodes = sum(part.rate * part.decodes for part in parts)
    prompts = sum(part.rate * part.prompt for part in parts)
    share = decodes / (decodes + prompts) if decodes + prompts else 0.0
    a, b, c = cost.mixed.by_share
    each = a + share * (b + share * c)
    mixed, alone, prefill = cost.mixed, cost.decode, cost.prefill
    found = [Line(prefill.constant, 0.0, prefill.per_token)]
    for terms, prompt, token in ((mixed, mixed.per_prefill + each, each), (alone, 0.0, 0.0)):
        found.append(Line(terms.constant, terms.per_context, prompt, token))
        credit = terms.per_decode * terms.free_decodes
        found.append(Line(terms.constant - credit, terms.per_context, prompt, token + terms.per_decode))
    return _upper(found)


def _upper(lines: list[Line]) -> Lines:
    """Those that no other line reaches everywhere."""
    kept: list[Line] = []
    for line in dict.fromkeys(lines):
        others = [other for other in lines if other != line]
        if not any(all(x >= y for x, y in zip(other, line, strict=True)) for other in others):
            kept.append(line)
    return tuple(kept)


def _through(cost: StepCost, parts: Sequence[Part], capacity: float) -> Line:
    work = offered(parts)
    full = capacity / work  # seconds' worth of arrivals that fill memory
    low, high = (cost.seconds(_shape(parts, full * share)) for share in (SMALL, 1.0))
    per_kv = (high - low) / (capacity * (1 - SMALL))
    return Line(max(high - per_kv * capacity, 0.0), per_kv, per_kv)


def _shape(parts: Sequence[Part], pace: float) -> Shape:
    """The batch with `pace` seconds' worth of arrivals at every stage."""
    chunks = [
        Chunk(0, max(1, round(part.prompt)))
        for part in parts
        if part.prompt
        for _ in range(max(1, round(pace * part.rate)))
    ]
    decodes = sum(part.rate * part.decodes for part in parts)
    read = sum(part.rate * (part.work - part.prompt) for part in parts)
    prompts = sum(chunk.tokens for chunk in chunks)
    return Shape(round(pace * decodes), round(pace * read), prompts, 0, tuple(chunks))
