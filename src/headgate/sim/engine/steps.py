"""When steps end in virtual time: one with prompts, or a run of equal decode steps jumped over at once."""

from __future__ import annotations

from math import ceil, inf
from typing import Final

import numpy as np

from headgate.core.build import compiled
from headgate.core.ledger import Ledger
from headgate.cost.laws.linear import CompiledCost
from headgate.cost.model import Shape, StepCost

Price = tuple[float, float, float]  # a cost's decode line and the least a step takes
EARLY: Final = 1e-6  # of a step, and
ROUNDING: Final = 1e-12  # of the time: what `nearly_done` keeps away from an end
LONG: Final = 1 << 40 if compiled() else 64  # from this many steps on, numpy is faster than a loop


def step_ends(
    cost: StepCost,
    line: tuple[float, float],
    decodes: int,
    context: int,
    most: int,
    start: float,
    stop: float,
    more: float = 0.0,
    least: float = 0.0,
    growth: list[int] | None = None,
    tick: int = 0,
) -> list[float]:
    """The ends of up to `most` steps from `start`, the last at or after `stop` if it is reached.

    Durations are summed one after the other from `start` on, in plain Python or by numpy's running sum, so
    that jumping and stepping agree to the last bit. No step takes less than `least`, which the cost's own
    `span` knows, and the first takes `more` than its price. `line` is the cost's `decode_line`. With `growth`
    each brings as many tokens as stand there from `tick` on, without it one to each decode.
    """
    fixed, slope = line
    if growth is None and most >= LONG:
        most = needed(most, max(fixed + slope * context, least), start, stop)
    if growth is not None or most < LONG:
        ends: list[float] = []
        end, read = start, context
        while True:
            seconds = fixed + slope * read
            if seconds < least:  # the host holds it up
                seconds = least
            end += seconds + more
            ends.append(end)
            if end >= stop or len(ends) >= most:
                return ends
            more = 0.0
            read += decodes if growth is None else growth[tick]
            tick += 1
    span = cost.span(decodes, context, most)
    span[0] += more
    sums = np.cumsum(np.concatenate(([start], span)))
    long: list[float] = sums[1 : int(np.searchsorted(sums, stop)) + 1].tolist()
    return long


def needed(most: int, first: float, start: float, stop: float) -> int:
    """So many of the steps reach `stop`: none is shorter than the first, and one is for rounding."""
    if stop < inf and first > 0:
        enough = int((stop - start) / first) + 2
        if enough < most:
            return enough if enough > 1 else 1
    return most


class StepClock:
    """A step cost in the order in which steps run: it knows when a phase has changed.

    Some engines take longer for the first decode step after prompts ran alone (new requests join the graph's
    batch, the host has fallen behind): the cost's `switch`, in seconds per change.
    """

    __slots__ = ("_cost", "_floor", "_law", "_more", "_switch", "by_chunk", "ledger")

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._law = cost if isinstance(cost, CompiledCost) else None
        self._switch = cost.switch
        own = type(cost).decode_floor is not StepCost.decode_floor
        self._floor = cost.decode_floor if own else None  # asked for at every step, so not without need
        self._more = 0.0  # what the next decode step takes beyond its price
        self.by_chunk = cost.by_chunk
        self.ledger: Ledger | None = None  # where ticks bring different numbers of tokens: the ledger knows

    def prompts_end(self, start: float, shape: Shape) -> float:
        self._more = 0.0 if shape.decodes else self._switch
        if self._law is None:
            return start + self._cost.seconds(shape)
        return start + self._law.seconds(shape)

    def decode_ends(self, decodes: int, context: int, most: int, start: float, stop: float) -> list[float]:
        return self._ends(self._line(decodes), decodes, context, most, start, stop)

    def _ends(
        self, price: Price, decodes: int, context: int, most: int, start: float, stop: float
    ) -> list[float]:
        fixed, slope, least = price
        ledger, more, self._more = self.ledger, self._more, 0.0
        growth = None if ledger is None else ledger.growth
        tick = 0 if ledger is None else ledger.tick - ledger.past
        line = fixed, slope
        return step_ends(self._cost, line, decodes, context, most, start, stop, more, least, growth, tick)

    def decode_span(
        self, decodes: int, context: int, most: int, start: float, stop: float
    ) -> tuple[int, float, float, float]:
        """The same steps, none of whose ends is asked for: how many, the first end and the last two."""
        fixed, slope, least = self._line(decodes)
        seconds = max(fixed + slope * context, least)
        if self.ledger is not None or (most >= LONG and needed(most, seconds, start, stop) >= LONG):
            ends = self.decode_ends(decodes, context, most, start, stop)
            return len(ends), ends[0], ends[-2] if len(ends) > 1 else start, ends[-1]
        before, end, read, count = start, start + (seconds + self._more), context, 1
        self._more = 0.0
        first = end
        while end < stop and count < most:
            read += decodes
            seconds = fixed + slope * read
            if seconds < least:  # the host holds it up
                seconds = least
            before = end
            end += seconds
            count += 1
        return count, first, before, end

    def _line(self, decodes: int) -> Price:
        if self._law is None:
            fixed, slope = self._cost.decode_line(decodes)
        else:
            fixed, slope = self._law.decode_line(decodes)
        return fixed, slope, self._floor(decodes) if self._floor else 0.0

    def nearly_done(self, decodes: int, context: int, steps: int, start: float) -> float:
        """Just before the last of several decode steps from `start` ends, without laying them out.

        Early by more than rounding can move it and by far less than a step, so always in the last one.
        """
        fixed, slope, least = self._line(decodes)
        if self.ledger is not None:
            later = self._more
            ends = self._ends((fixed, slope, least), decodes, context, steps, start, inf)
            self._more = later
            begins = ends[-2] if steps > 1 else start
            return _late_in(begins, ends[-1] - begins)
        before, rise, first = steps - 1, slope * decodes, fixed + slope * context
        low = 0  # steps that the floor holds up
        if first < least:
            low = before if rise <= 0 else min(before, ceil((least - first) / rise))
        line = (before - low) * (first + rise * (before - 1 + low) / 2)
        last = max(first + rise * before, least)
        return _late_in(start + self._more + low * least + line, last)


def _late_in(begins: float, last: float) -> float:
    return begins + last / 2 + max(0.0, last * (0.5 - EARLY) - ROUNDING * (begins + last))
