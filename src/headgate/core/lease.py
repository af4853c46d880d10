"""The lease of the plan in force: counters that run down, and whether one of them has ended it."""

from __future__ import annotations

from math import inf

from headgate.core.plan import Until


class Lease:
    """Counts down what `Until` promised. `ended` is all a driver asks; drivers may also set it."""

    __slots__ = ("arrivals", "ended", "finishes", "prefills", "steps", "time")

    def __init__(self) -> None:
        self.steps = self.time = self.arrivals = self.prefills = self.finishes = inf
        self.ended = True

    def begin(self, until: Until) -> None:
        """A new plan is in force from now on."""
        self.steps, self.time, self.arrivals, self.prefills, self.finishes = until
        self.ended = False

    def arrival(self) -> None:
        self.arrivals -= 1
        if self.arrivals <= 0:
            self.ended = True

    def prefill(self) -> None:
        """One prompt has been completed."""
        self.prefills -= 1
        if self.prefills <= 0:
            self.ended = True

    def finish(self) -> None:
        self.finishes -= 1
        if self.finishes <= 0:
            self.ended = True

    def ran(self, steps: int, now: float) -> None:
        """That many steps have run, and the clock shows `now`."""
        self.steps -= steps
        if self.steps <= 0 or now >= self.time:
            self.ended = True
