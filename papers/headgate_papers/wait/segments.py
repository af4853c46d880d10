"""Nested WAIT's thresholds, the memory they need, and with which probability it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, expm1, inf, log, log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headgate.core.errors import InputError
from headgate.methods.wait.inventory import Lines, MixPart, PaceRange, compound
from headgate_papers.wait.balance import ROUNDING, FilledSizes, along_the_ray, filled, pace_within

STEP = 1.05  # of the shortest iteration: the pace to run at where memory allows it


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

    def parts(self, slack: float = 0.0) -> list[MixPart]:
        """The segments as parts of a batch, segment i as if (1 + ε)^(i-1) times as many came."""
        found = []
        for number, (begin, end, rate) in enumerate(zip(self.begins, self.ends, self.reach, strict=True)):
            stages = end - begin
            work = stages * (self.prompt + (begin + 1 + end) / 2)  # σ_i: stages times mean KV
            first = number == 0
            decodes, prompt = stages - first, self.prompt if first else 0.0
            found.append(MixPart(rate * compound(slack, number), prompt, decodes, work, self.prompt + end))
        return found


class MemoryBound(NamedTuple):
    """KV tokens that hold everything with probability 1 - δ over a horizon: (12) and (15)."""

    full: float  # M^π: all segments full
    waiting: float  # n_k for each queue between segments
    tail: float  # what the queues may grow by beyond that
    horizon: float  # S: iterations
    segments: int

    @property
    def total(self) -> float:
        return self.full + self.waiting + self.tail


def nested_pace(lines: Lines, segments: Segments, slack: float, capacity: float) -> PaceRange:
    try:
        return pace_within(lines, segments.parts(slack), capacity)
    except InputError as error:
        cut = f"{len(segments.ends)} segments with {slack:g} slack each"
        raise InputError(f"{error}; that is for {cut}, as (10) wants; less --slack needs less") from None


def decays(segments: Segments, sizes: Sequence[float]) -> list[float]:
    """θ of each queue between segments; condition (10) wants a ratio n_k / n_{k-1} above p_{k-1}."""
    pairs = zip(sizes, sizes[1:], segments.stays, strict=False)
    return [decay(after / before, stay) for before, after, stay in pairs]


def memory_bound(
    lines: Lines, segments: Segments, sizes: Sequence[float], miss: float, iterations: float
) -> MemoryBound:
    """M^π + Σ (l + b_{k-1}) [n_k + θ_k^-1 ln((L-1) S/δ)]: enough with probability 1 - miss. (12), (15).

    Infinite where a ratio does not exceed its p. `sizes` may be real.
    """
    full = filled(lines, segments.parts(), sizes).kv
    between = decays(segments, sizes)
    likely = log(max(1.0, len(between) * iterations / miss)) if between else 0.0
    waiting = tail = 0.0
    for number, rate in enumerate(between, 1):
        paused = segments.paused(number)
        waiting += paused * sizes[number]
        tail += paused * likely / rate if rate else inf
    return MemoryBound(full, waiting, tail, iterations, len(segments.ends))


def chance_of_overflow(bound: MemoryBound, miss: float, capacity: float) -> float:
    """δ with which `capacity` is enough, from the bound for `miss`: the same formula, solved for δ."""
    room = capacity - bound.full - bound.waiting
    if room < 0 or bound.tail == inf:
        return 1.0
    if bound.segments < 2 or bound.tail == 0:
        return 0.0
    between = bound.segments - 1
    per_log = bound.tail / log(max(between * bound.horizon / miss, 1 + ROUNDING))
    return min(1.0, between * bound.horizon * exp(-room / per_log))


class Segmentation(NamedTuple):
    segments: Segments
    thresholds: FilledSizes | None
    bound: MemoryBound | None
    why_not: str = ""


def choices(
    lines: Lines,
    candidates: Sequence[Segments],
    slack: float,
    miss: float,
    horizon: float,
    capacity: float = inf,
) -> list[Segmentation]:
    """For each way to cut, real-valued thresholds at a pace a little above the shortest, and their bound.

    Thresholds are x_i = t Λ_i (1 + ε)^(i-1), which satisfy (10) for every ε > 0.
    """
    found = []
    for segments in candidates:
        try:
            pace = nested_pace(lines, segments, slack, capacity)
        except InputError as error:
            found.append(Segmentation(segments, None, None, str(error)))
            continue
        sizes = along_the_ray(lines, segments.parts(slack), min(STEP * pace.shortest, pace.longest))
        shortest = max(line.fixed for line in lines)
        bound = memory_bound(lines, segments, sizes.sizes, miss, horizon / shortest)
        found.append(Segmentation(segments, sizes, bound))
    return found


def best_choice(found: Sequence[Segmentation]) -> Segmentation:
    fine = [choice for choice in found if choice.bound is not None]
    if not fine:
        several = f"of {len(found)} segmentations none is feasible; the last: " if len(found) > 1 else ""
        raise InputError(several + found[-1].why_not)
    return min(fine, key=lambda choice: choice.bound.total if choice.bound else inf)


# -- segments from types or lengths


def segments_from(prompt: float, lengths: ArrayLike, rate: float, ends: Sequence[int]) -> Segments:
    """From outputs seen, in decode iterations: each is as likely as the next to come again."""
    seen = np.sort(np.asarray(lengths))
    check_ends(tuple(ends))
    starts = [-1, *ends[:-1]]
    above = len(seen) - np.searchsorted(seen, starts, side="right")
    return Segments(prompt, tuple(ends), tuple(float(rate * count / len(seen)) for count in above))


def even_ends(longest: int, count: int) -> tuple[int, ...]:
    if not 1 <= count <= max(longest, 1):
        raise InputError(f"{count} segments of outputs up to {longest} iterations; choose 1 to {longest}")
    return tuple(round(longest * number / count) for number in range(1, count + 1))


def equal_shares(lengths: ArrayLike, count: int) -> tuple[int, ...]:
    """At most so many segments, in each of which as many requests end; fewer where lengths repeat."""
    seen = np.sort(np.asarray(lengths))
    ranks = [min(len(seen) - 1, -(-len(seen) * number // count) - 1) for number in range(1, count + 1)]
    return tuple(sorted({int(seen[rank]) for rank in ranks}))


def check_ends(ends: tuple[int, ...]) -> None:
    if not ends or ends[0] < 0 or any(x >= y for x, y in pairwise(ends)):
        raise InputError(f"segments end at {ends}; need growing whole numbers, the first at least 0")


# -- how many wait between two segments

LARGE = 30.0  # above this exp(θ) is taken apart, or it would lose the small term


def decay(ratio: float, stay: float) -> float:
    """θ > 0 with -θ r + ln(1 - p + p e^θ) = 0: zero where r ≤ p, infinite where r ≥ 1.

    A batch of segment k-1 adds Binomial(n_{k-1}, p) to the residue of segment k; n_k leave when they can.
    The paper's lower bound (18) divides by n_k; only 8(r - p), divided by n_{k-1}, is one. It
    is where the search begins.
    """
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    if ratio >= 1 or stay == 0:
        return inf
    if ratio <= stay:
        return 0.0

    def balance(theta: float) -> float:
        if theta > LARGE:
            return theta * (1 - ratio) + log(stay + (1 - stay) * exp(-theta))
        return -theta * ratio + log1p(stay * expm1(theta))

    low = 8 * (ratio - stay) * (1 - 1e-9)
    high = 2 * low
    while balance(high) <= 0:
        high *= 2
    return float(brentq(balance, low, high, xtol=1e-14, rtol=1e-14))
