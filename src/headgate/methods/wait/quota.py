"""Real-valued thresholds: how many may enter at each step so that x do on average."""

from __future__ import annotations

from math import ceil, floor, inf

ROUNDING = 1e-9  # x * s that is whole but for rounding is whole


class Quota:
    """Step s admits ⌈x s⌉ - ⌈x (s-1)⌉; a whole x always admits x.

    A new x takes effect from the next step on and the count goes on from where it is, so that changing x
    often does not let more in. An infinite x admits all requests at every step.
    """

    __slots__ = ("_from", "_steps", "each")

    def __init__(self, each: float = inf) -> None:
        self.each = each
        self._from = 0.0  # what the steps before the newest change of x have made of it
        self._steps = 0  # since then

    def change(self, each: float) -> None:
        """From now on `each` per step."""
        if self.each < inf:
            self._from = self._at(0) - floor(self._at(0))  # whole ones change nothing
        self._steps = 0
        self.each = each

    def next(self, skip: int = 0) -> float:
        """How many the next step may admit, after leaving out so many steps."""
        if self.each == inf:
            return inf
        return _whole(self._at(skip + 1)) - _whole(self._at(skip))

    def idle_steps(self) -> int:
        """How many steps would admit no request before one that does."""
        if self.each == inf or self.next():
            return 0
        skip = max(0, floor((_whole(self._at(0)) - self._at(0)) / self.each) - 1)
        while not self.next(skip):
            skip += 1
        return skip

    def advance(self, steps: int = 1) -> None:
        """So many steps have been made."""
        self._steps += steps

    def _at(self, ahead: int) -> float:
        return self._from + self.each * (self._steps + ahead)


def _whole(x: float) -> int:
    return ceil(x - ROUNDING)
