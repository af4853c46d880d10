"""What an asynchronous engine knows when it composes a step: the world as the step before it began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headgate.core.plan import EACH_STEP, Plan
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import Limits, View


class Seen(NamedTuple):
    """A view with those who came too late left out, and fewer seats."""

    now: float
    waiting: Mapping[int, Request]
    prefilling: Mapping[int, Request]
    decoding: Mapping[int, Request]
    kv_free: int
    kv_total: int
    limits: Limits


class Lagged(BatchPolicy):
    """Any policy inside an engine that composes step n + 1 while step n runs.

    The simulator composes a step when the one before it has ended, and whoever came or left meanwhile is
    known. An asynchronous engine has composed it by then: who came during step n enters in step n + 2, and
    the seat of who left with step n is given away in step n + 2. KV that came free with step n is not
    hidden; that is a difference of one step in when a prompt fits.
    """

    def __init__(self, inner: BatchPolicy) -> None:
        self._inner = inner
        self._began = self._ended = -1.0  # the newest step
        self._left = 0  # requests that left when it ended

    def arrived(self, request: Request, now: float) -> None:
        """The inner policy hears everything at once; only its view is late."""
        self._inner.arrived(request, now)

    def admitted(self, request: Request, now: float) -> None:
        """Passed on."""
        self._inner.admitted(request, now)

    def prefilled(self, request: Request, now: float) -> None:
        """Passed on."""
        self._inner.prefilled(request, now)

    def evicted(self, request: Request, now: float) -> None:
        """Passed on."""
        self._inner.evicted(request, now)

    def stepped(self, steps: Steps) -> None:
        """The newest step, and nobody has left with it so far."""
        self._inner.stepped(steps)
        self._ended = steps.ends[-1]
        self._began = steps.ends[-2] if len(steps.ends) > 1 else steps.start
        self._left = 0

    def finished(self, request: Request, now: float, how: End) -> None:
        """Its seat is free, and nobody knows yet."""
        self._inner.finished(request, now, how)
        self._left += now >= self._ended

    def plan(self, view: View) -> Plan:
        """The inner policy's, for what can be known."""
        if view.now > self._ended or not (view.decoding or view.prefilling):  # the engine stood idle
            return self._inner.plan(view)._replace(until=EACH_STEP)
        known = {
            id: request
            for id, request in view.waiting.items()
            if request.arrival <= self._began or request.evictions
        }
        seats = max(1, view.limits.running - self._left)
        limits = view.limits._replace(running=seats)
        seen = Seen(view.now, known, view.prefilling, view.decoding, view.kv_free, view.kv_total, limits)
        return self._inner.plan(seen)._replace(until=EACH_STEP)
