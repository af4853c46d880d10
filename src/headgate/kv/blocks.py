"""KV memory in blocks: how many decodes need a new block in the next step, counted by remainder.

A decode that rolls grows by one token a step, so it needs a block every `size` steps, always at the
same remainder of the tick. Counting the rolling requests by that remainder says exactly how many
blocks a step will take, in O(1).

Where an engine speculates, decodes grow by what is accepted. Then the counts are by tick, from what was drawn
for each request (`follow`).
"""

from __future__ import annotations

from typing import Final

from headgate.core.build import mypyc_attr

NO_RING: Final = 1 << 60  # ticks before an index comes again


@mypyc_attr(allow_interpreted_subclasses=True)
class Blocks:
    """A pool of KV blocks shared by the requests of one engine."""

    __slots__ = ("free", "growers", "past", "ring", "size", "total")

    def __init__(self, total: int, size: int) -> None:
        self.size = size
        self.total = total
        self.free = total
        self.growers = [0] * size  # blocks that the rolling set takes when (tick - past) % ring is the index
        self.ring = size
        self.past = 0  # ticks that are forgotten

    def of(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> None:
        self.free -= count

    def give(self, count: int) -> None:
        self.free += count

    def follow(self) -> None:
        """Count by tick from now on; the driver enters in `growers` what each decode takes and when."""
        self.ring, self.growers = NO_RING, []

    def roll(self, held: int, tick: int, by: int = 1) -> None:
        """A request with `held` KV tokens joins (by=1) or leaves (by=-1) the rolling set at `tick`."""
        growers, place = self.growers, (tick - held) % self.size
        growers[place] = growers[place] + by

    def due(self, tick: int) -> int:
        return self.growers[(tick - self.past) % self.ring]

    def affordable(self, tick: int, steps: int, rolling: int) -> int:
        free = self.free
        rounds = min(steps // self.ring, free // rolling)
        free -= rounds * rolling
        paid = rounds * self.size
        tick -= self.past
        while paid < steps and self.growers[(tick + paid) % self.ring] <= free:
            free -= self.growers[(tick + paid) % self.ring]
            paid += 1
        return paid

    def grow(self, tick: int, steps: int, rolling: int) -> None:
        tick -= self.past
        if steps == 1:
            self.take(self.growers[tick % self.ring])
            return
        if self.ring != self.size:
            self.take(sum(self.growers[tick : tick + steps]))
            return
        size, growers = self.size, self.growers
        rest, begin = steps % size, tick % size
        over = begin + rest - size
        count = steps // size * rolling
        for growing in growers[begin : begin + rest]:
            count += growing
        if over > 0:
            for growing in growers[:over]:
                count += growing
        self.take(count)
