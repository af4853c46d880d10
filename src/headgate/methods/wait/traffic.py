"""A mix as estimators see it: rates, mean prompts and survival curves become parts and segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.cost.model import StepCost
from headgate.estimators.survival import Survival
from headgate.methods.wait.inventory import Pace, keeping_up
from headgate.methods.wait.iteration import Part, lines_of, offered
from headgate.methods.wait.latency import best_pace

LAST = 0.005  # of the requests may live beyond the end of the last segment


class Seen(NamedTuple):
    """One type of requests: how many come per second, their mean prompt, how long they decode.

    Of the prompt `cached` tokens are found in a prefix cache: they take memory and no time. Memory that
    requests share is counted for each of them.
    """

    rate: float
    prompt: float
    survival: Survival  # of those that decode at all
    decoding: float = 1.0  # the share that does
    cached: float = 0.0

    def part(self) -> Part:
        """The type as one part: l' and w by their means, (l+k) summed over the stages that are reached."""
        curve, ending = self.survival
        stages = np.arange(1, len(curve) + 1)
        stay, last = 1 - ending, float(curve[-1])
        beyond = last * stay / ending  # mean stages after the curve's end: a geometric tail
        decodes = float(curve.sum()) + beyond
        read = float((curve * (self.prompt + stages)).sum())
        read += beyond * (self.prompt + len(curve)) + beyond / ending
        work = self.prompt + self.decoding * read
        longest = self.prompt + self.end(1 - LAST)
        computed = self.prompt - self.cached
        return Part(self.rate, computed, self.decoding * decodes, work, longest, self.cached)

    def end(self, share: float) -> int:
        """By which decode iteration that share of the requests has ended, nearly."""
        curve, ending = self.survival
        short = np.flatnonzero(self.decoding * curve <= 1 - share)
        if len(short):
            return int(short[0])
        left = (1 - share) / (self.decoding * float(curve[-1]))
        return len(curve) - 1 + int(np.ceil(np.log(max(left, 1e-12)) / np.log(max(1 - ending, 1e-12))))

    def segments(self, ends: Sequence[int]) -> list[Part]:
        """Cut at these iterations: what one request that enters a segment does there on average.

        Cohorts shrink inside a segment as requests end. `Segments` counts them whole, which is safe but, with
        few segments, wastes half the memory; learned thresholds have a guard, so means are enough.
        """
        beyond = max(ends[-1], self.end(1 - LAST / 10))
        alive = self.decoding * self._curve(beyond)  # P(l' >= k) for k = 1, 2, ...
        kv = self.prompt + np.arange(1, beyond + 1)
        found = []
        for number, (begin, end) in enumerate(zip((0, *ends[:-1]), (*ends[:-1], beyond), strict=True)):
            enter = float(alive[begin]) if number and begin < beyond else float(not number)
            stages, first = slice(begin, end), not number
            decodes = float(alive[stages].sum()) / enter if enter else 0.0
            read = float((alive[stages] * kv[stages]).sum()) / enter if enter else 0.0
            prompt, cached = (self.prompt, self.cached) if first else (0.0, 0.0)
            found.append(
                Part(
                    rate=self.rate * enter,
                    prompt=prompt - cached,
                    decodes=decodes,
                    work=prompt + read,
                    peak=self.prompt + end,
                    cached=cached,
                )
            )
        return found

    def _curve(self, ages: int) -> NDArray[np.float64]:
        """P(l' > t) of those that decode, for t = 0 .. ages - 1."""
        curve, ending = self.survival
        known = curve[:ages]
        tail = float(curve[-1]) * (1 - ending) ** np.arange(1, max(0, ages - len(curve)) + 1)
        return np.concatenate((known, tail))


def cuts(seen: Seen, count: int) -> tuple[int, ...]:
    """Ends of so many segments in each of which as many requests end; fewer where lengths repeat."""
    ends = {seen.end(number / count) for number in range(1, count)} | {seen.end(1 - LAST)}
    return tuple(sorted(ends))


def running_pace(
    cost: StepCost,
    parts: Sequence[Part],
    capacity: float,
    slots: int,
    slack: Sequence[Part] | None = None,
    pausing: bool = True,
) -> float | None:
    """The t to set thresholds x = λt by: the best for latency of those that keep up, fit and find seats.

    In overload, or where the shortest does not fit, the longest that does; None where memory is too small for
    any. Where no request is ever paused (`pausing` is False) a longer t costs no time per token, it only lets
    more enter at once: then always the longest. Fractional cohorts may overshoot their share of memory by one
    request of each type, for which room is left. `slack`: the same parts with slack added, as
    sizes are to be.
    """
    full = slack or parts
    spare = capacity - sum(part.peak for part in parts if part.prompt)
    if spare <= 0:
        return None
    longest = min(spare / offered(full), slots / sum(part.rate * part.stages for part in full))
    if not pausing:
        return longest
    lines = lines_of(cost, parts, capacity)
    try:
        pace = keeping_up(lines, full)
    except InputError:  # more work than can ever be done: as much as fits
        return longest
    return best_pace(lines, parts, Pace(pace.shortest, min(pace.longest, longest)), slack=slack)
