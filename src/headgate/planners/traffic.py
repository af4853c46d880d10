"""A mix as estimators see it: rates, mean prompts and survival curves become parts and segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headgate.core.errors import InputError
from headgate.cost.model import StepCost
from headgate.estimators.survival import Survival
from headgate.planners.inventory import Pace, keeping_up, offered
from headgate.planners.iteration import Part, lines_of
from headgate.planners.segments import Segments
from headgate.planners.waiting import best_pace

LAST = 0.005  # of the requests may live beyond the end of the last segment


class Seen(NamedTuple):
    """One type of requests: how many come per second, their mean prompt, how long they decode."""

    rate: float
    prompt: float
    survival: Survival  # of those that decode at all
    decoding: float = 1.0  # the share that does

    def alive(self, stage: float) -> float:
        """P(l' > stage): the share that decodes more often than this."""
        curve, ending = self.survival
        if stage < 0:
            return 1.0
        last = len(curve) - 1
        beyond = max(0.0, stage - last)
        return self.decoding * float(curve[min(int(stage), last)] * (1 - ending) ** beyond)

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
        return Part(self.rate, self.prompt, self.decoding * decodes, work, longest)

    def end(self, share: float) -> int:
        """By which decode iteration that share of the requests has ended, nearly."""
        curve, ending = self.survival
        short = np.flatnonzero(self.decoding * curve <= 1 - share)
        if len(short):
            return int(short[0])
        left = (1 - share) / (self.decoding * float(curve[-1]))
        return len(curve) - 1 + int(np.ceil(np.log(max(left, 1e-12)) / np.log(max(1 - ending, 1e-12))))

    def segments(self, ends: Sequence[int]) -> Segments:
        """Cut at these iterations."""
        reach = tuple(self.rate * self.alive(begin) for begin in (-1, *ends[:-1]))
        return Segments(self.prompt, tuple(ends), reach)


def cuts(seen: Seen, count: int) -> tuple[int, ...]:
    """Ends of so many segments in each of which as many requests end; fewer where lengths repeat."""
    ends = {seen.end(number / count) for number in range(1, count)} | {seen.end(1 - LAST)}
    return tuple(sorted(ends))


def running_pace(
    cost: StepCost, parts: Sequence[Part], capacity: float, slots: int, slack: Sequence[Part] | None = None
) -> float | None:
    """The t to set thresholds x = λt by: the best for latency of those that keep up, fit and find seats.

    In overload, or where the shortest does not fit, the longest that does; None where memory is too small for
    any. Fractional cohorts may overshoot their share of memory by one request of each type (section 3.5),
    for which room is left. `slack`: the same parts with slack added, as sizes are to be.
    """
    full = slack or parts
    spare = capacity - sum(part.peak for part in parts if part.prompt)
    if spare <= 0:
        return None
    longest = min(spare / offered(full), slots / sum(part.rate * part.stages for part in full))
    lines = lines_of(cost, parts, capacity)
    try:
        pace = keeping_up(lines, full)
    except InputError:  # more work than can ever be done: as much as fits
        return longest
    return best_pace(lines, parts, Pace(pace.shortest, min(pace.longest, longest)), slack=slack)
