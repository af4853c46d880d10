"""Speculative decoding: how many tokens a step delivers (Acceptance), and at which load which k pays."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isinf
from typing import NamedTuple

import numpy as np

from headgate.cost.laws.terms import DraftTerms
from headgate.cost.laws.work import WorkCost

MOST_DRAFTS = 32  # of a step; published engines use 1 to 8


class Acceptance(NamedTuple):
    """How often drafts of a class are accepted: each request draws its own rate from a beta law, of this mean
    and this spread a + b (inf: all requests alike), and each of its drafts is accepted at that rate.

    So the first j drafts are accepted with the product over i < j of (a + i) / (a + b + i) as probability.
    Against published rates by position the worst position was off by 0.01 for three of four models; without
    the spread by 0.03 to 0.08.

    Examples:
        >>> round(Acceptance(0.7).tokens(3), 3)
        2.533
    """

    mean: float
    spread: float = inf

    def rates(self, drafts: int) -> list[float]:
        """The probability that the first j drafts are accepted, from j = 1 on."""
        rates, rate, alike = [], 1.0, isinf(self.spread)
        for place in range(drafts):
            rate *= self.mean if alike else (self.mean * self.spread + place) / (self.spread + place)
            rates.append(rate)
        return rates

    def tokens(self, drafts: int) -> float:
        """Tokens that a decode step delivers on average: tau."""
        return 1.0 + sum(self.rates(drafts))


class MixedAcceptance(NamedTuple):
    parts: tuple[tuple[float, Acceptance], ...]

    def tokens(self, drafts: int) -> float:
        return sum(share * law.tokens(drafts) for share, law in self.parts)


Accepts = Acceptance | MixedAcceptance


class Gain(NamedTuple):
    """Tokens a second at `drafts` drafts a step, over those without, at one batch size and context."""

    drafts: int
    step: float  # seconds
    tokens: float  # a step and decode
    gain: float


def gain(cost: WorkCost, drafting: DraftTerms, accept: Accepts, decodes: int, context: float, k: int) -> Gain:
    before = _step(cost.speculating(None), decodes, context)
    if not k:
        return Gain(0, before, 1.0, 1.0)
    step = _step(cost.speculating(replace(drafting, drafts=k)), decodes, context)
    tokens = accept.tokens(k)
    return Gain(k, step, tokens, tokens * before / step)


def crossover(cost: WorkCost, drafting: DraftTerms, accept: Accepts, context: float, k: int) -> int | None:
    """The smallest batch that k drafts make slower; None: none up to 1,024."""
    sizes = range(1, 1025)
    return next((b for b in sizes if gain(cost, drafting, accept, b, context, k).gain < 1.0), None)


def schedule(
    cost: WorkCost,
    drafting: DraftTerms,
    accept: Accepts,
    context: float,
    most: int,
    slots: int,
    worth: float = 0.01,
) -> list[tuple[int, int, int]]:
    """The `num_speculative_tokens_per_batch_size` of vLLM: (from, to, k) up to `slots`.

    Gains are averaged over neighbouring sizes, for step times have tiles, and a change of k that gains less
    than `worth` is left out: graphs are captured for each k that is named.
    """
    sizes, ks = range(1, slots + 1), range(most + 1)
    gains = [_smooth([gain(cost, drafting, accept, size, context, k).gain for size in sizes]) for k in ks]
    ranges: list[tuple[int, int, int]] = []
    for place, size in enumerate(sizes):
        found = max(ks, key=lambda k: (gains[k][place], -k))
        if ranges and gains[found][place] <= (1 + worth) * gains[ranges[-1][2]][place]:
            found = ranges[-1][2]
        if ranges and ranges[-1][2] == found:
            ranges[-1] = (ranges[-1][0], size, found)
        else:
            ranges.append((size, size, found))
    return ranges


def _smooth(values: list[float]) -> list[float]:
    sums = np.concatenate(([0.0], np.cumsum(values)))
    size = np.arange(1, len(values) + 1)
    low, high = size - size // 8, np.minimum(size + size // 8, len(values))
    means: list[float] = ((sums[high] - sums[low - 1]) / (high - low + 1)).tolist()
    return means


def _step(cost: WorkCost, decodes: int, context: float) -> float:
    fixed, slope = cost.decode_line(decodes)
    return max(fixed + slope * decodes * context, cost.decode_floor(decodes))
