"""The clock of the decodes: when each tick ended and how long after the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headgate.record.tables import Columns, Floats, Integers

BLOCK = 1 << 20  # ticks laid out at a time, so that memory does not grow with the run


@dataclass(frozen=True)
class Ticks:
    """The steps in which decodes ran, one after the other, replica after replica.

    Row by row (prefill-only rows are left out, their time stays in the gap to the next tick): `base` is
    the number of its first tick, with one more entry at the end; `lead` the time from the tick before to
    the end of its first tick, prefill-only steps and idle time included (minus infinity for the first
    tick of a replica, which no gap ends with); later ticks of the row follow at first + slope x place.
    """

    base: Integers
    start: Floats
    first: Floats
    slope: Floats
    lead: Floats
    decodes: Integers
    replicas: Integers  # sorted
    offset: Integers  # number of the first tick of each replica

    @classmethod
    def of(cls, steps: Columns) -> Ticks:
        """The ticks of a step table."""
        rows = np.flatnonzero(steps["decodes"] > 0)
        rows = rows[np.argsort(steps["replica"][rows], kind="stable")]
        count = steps["count"][rows].astype(np.int64)
        start, first, seconds = (steps[name][rows] for name in ("start", "first", "seconds"))
        slope = np.where(count > 1, 2.0 * (seconds / count - first) / np.maximum(count - 1, 1), 0.0)
        base = np.concatenate(([0], np.cumsum(count)))
        replicas, opening = np.unique(steps["replica"][rows], return_index=True)
        lead = start + first
        lead[1:] -= (start + seconds)[:-1]
        lead[opening] = -np.inf
        decodes = steps["decodes"][rows].astype(np.int64)
        return cls(base, start, first, slope, lead, decodes, replicas.astype(np.int64), base[opening])

    @property
    def count(self) -> Integers:
        return np.diff(self.base)

    def numbers(self, first_tick: Integers, replica: Integers) -> Integers:
        """Ticks counted over all replicas, from ticks counted on each replica."""
        if not len(self.replicas):
            return first_tick
        place = np.minimum(np.searchsorted(self.replicas, replica), len(self.replicas) - 1)
        return np.asarray(first_tick + self.offset[place], np.int64)

    def place(self, tick: Integers) -> tuple[Integers, Integers]:
        """The row of each tick and its place in the row."""
        row = np.searchsorted(self.base, tick, side="right") - 1
        return row, tick - self.base[row]

    def end(self, tick: Integers) -> Floats:
        row, place = self.place(tick)
        return self.end_of(row, place)

    def end_of(self, row: Integers, place: Integers) -> Floats:
        """The same for ticks whose row and place are known."""
        rise = self.slope[row] * (place * (place + 1.0) / 2.0)
        return np.asarray(self.start[row] + (place + 1) * self.first[row] + rise)

    def gap(self, row: Integers, place: Integers) -> Floats:
        """Time from the tick before, for somebody who ran in both."""
        return np.where(place == 0, self.lead[row], self.first[row] + self.slope[row] * place)

    def blocks(self) -> Iterator[tuple[Integers, Integers]]:
        """Every tick as (row, place), a bounded number at a time."""
        for low in range(0, int(self.base[-1]), BLOCK):
            yield self.place(np.arange(low, min(low + BLOCK, int(self.base[-1])), dtype=np.int64))
