"""Segments of Nested WAIT: the stages cut at some output lengths, and how many requests reach each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log, log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headgate.core.errors import InputError
from headgate.methods.wait.iteration import Part

MOST = 1e100  # times as many as come: a full batch never holds them


class Segments(NamedTuple):
    """Requests of one prompt length whose outputs are not known.

    Segment i has the stages beyond ends[i-1] up to ends[i]; the first also has stage 0, the prompt. Lengths
    are decode iterations, output tokens less one.
    """

    prompt: float  # l
    ends: tuple[int, ...]  # b_1 < ... < b_L
    reach: tuple[float, ...]  # Λ_i: requests per second that reach segment i

    @property
    def stays(self) -> tuple[float, ...]:
        """p_i: of the requests that leave segment i, the share that goes on to the next."""
        return tuple(
            (after / before) if before else 0.0
            for before, after in zip(self.reach, self.reach[1:], strict=False)
        )

    @property
    def begins(self) -> tuple[int, ...]:
        """b_{i-1} of each segment, -1 for the first: its stages are those after this one."""
        return (-1, *self.ends[:-1])

    def paused(self, number: int) -> float:
        """KV tokens of a request that waits to enter segment `number` (from 0; the first holds none)."""
        return self.prompt + self.ends[number - 1] if number else 0.0

    def parts(self, slack: float = 0.0) -> list[Part]:
        """The segments as parts of a batch, segment i as if (1 + ε)^(i-1) times as many came."""
        found = []
        for number, (begin, end, rate) in enumerate(zip(self.begins, self.ends, self.reach, strict=True)):
            stages = end - begin
            work = stages * (self.prompt + (begin + 1 + end) / 2)  # σ_i: stages times mean KV
            first = number == 0
            decodes, prompt = stages - first, self.prompt if first else 0.0
            found.append(Part(rate * compound(slack, number), prompt, decodes, work, self.prompt + end))
        return found


def compound(slack: float, times: int) -> float:
    """(1 + ε)^times, at most so much that whatever is multiplied by it is still a number."""
    return MOST if times * log1p(slack) > log(MOST) else float((1 + slack) ** times)


def segments_of(
    prompt: float, types: Sequence[tuple[float, int]], ends: Sequence[int] | None = None
) -> Segments:
    """From types (rate, decode iterations); cut at their lengths unless `ends` says where."""
    cuts = tuple(sorted({length for _, length in types})) if ends is None else tuple(ends)
    _check(cuts)
    starts = (-1, *cuts[:-1])
    reach = tuple(sum(rate for rate, length in types if length > start) for start in starts)
    return Segments(prompt, cuts, reach)


def segments_from(prompt: float, lengths: ArrayLike, rate: float, ends: Sequence[int]) -> Segments:
    """From outputs seen, in decode iterations: each is as likely as the next to come again."""
    seen = np.sort(np.asarray(lengths))
    if not len(seen):
        raise InputError("no outputs given; segments need a trace or a length law")
    _check(tuple(ends))
    starts = [-1, *ends[:-1]]
    above = len(seen) - np.searchsorted(seen, starts, side="right")
    return Segments(prompt, tuple(ends), tuple(float(rate * count / len(seen)) for count in above))


def worst(several: Sequence[Segments]) -> Segments:
    """The same cuts at different times: the highest rate and the highest survival of each segment: (13)."""
    reach = [max(each.reach[0] for each in several)]
    for stays in zip(*(each.stays for each in several), strict=True):
        reach.append(reach[-1] * max(stays))
    return several[0]._replace(reach=tuple(reach))


def even_ends(longest: int, count: int) -> tuple[int, ...]:
    """So many segments of equal width up to the longest output, as the paper cuts them."""
    if not 1 <= count <= max(longest, 1):
        raise InputError(f"{count} segments of outputs up to {longest} iterations; choose 1 to {longest}")
    return tuple(round(longest * number / count) for number in range(1, count + 1))


def equal_shares(lengths: ArrayLike, count: int) -> tuple[int, ...]:
    """At most so many segments, in each of which as many requests end; fewer where lengths repeat."""
    seen = np.sort(np.asarray(lengths))
    ranks = [min(len(seen) - 1, -(-len(seen) * number // count) - 1) for number in range(1, count + 1)]
    return tuple(sorted({int(seen[rank]) for rank in ranks}))


def _check(ends: tuple[int, ...]) -> None:
    if not ends or ends[0] < 0 or any(x >= y for x, y in pairwise(ends)):
        raise InputError(f"segments end at {ends}; need growing whole numbers, the first at least 0")
