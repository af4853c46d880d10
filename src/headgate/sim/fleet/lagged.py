"""Any policy as an asynchronous engine sees it: the world as it was when the step before began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headgate.core.plan import NONE, Plan
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import Limits, View

SILENT = -1.0  # before any time


class LateView(NamedTuple):
    now: float
    waiting: Mapping[int, Request]
    prefilling: Mapping[int, Request]
    decoding: Mapping[int, Request]
    oldest_token: float
    kv_free: int
    kv_total: int
    kv_shared: int
    limits: Limits


class Lagged(BatchPolicy):
    """The inner policy inside an engine of a fleet that composes step n + 1 while step n runs.

    One engine alone really composes ahead (`asynchronous.Ahead`); engines of a fleet compose a step when the
    one before it has ended, and know which requests came or left meanwhile. Here that is hidden: one that
    came during step n enters in step n + 2, and the slot of one that left with step n is given away in step
    n + 2. KV that came free with step n is not hidden, and tokens are seen when the GPU has them.

    An engine that stands idle composes for what is there, and so it does where the inner policy, for want
    of those it cannot see, would run nothing. The inner policy is asked at every step: no plan outlives
    the knowledge it was made with, so decode steps are not jumped over and simulations take longer.
    """

    def __init__(self, inner: BatchPolicy) -> None:
        self.inner = inner
        self._began = self._ended = SILENT  # the newest step
        self._left = 0  # requests that left when it ended

    def arrived(self, request: Request, now: float) -> None:
        self.inner.arrived(request, now)

    def admitted(self, request: Request, now: float) -> None:
        self.inner.admitted(request, now)

    def prefilled(self, request: Request, now: float) -> None:
        self.inner.prefilled(request, now)

    def held(self, request: Request, now: float) -> None:
        self.inner.held(request, now)

    def resumed(self, request: Request, now: float) -> None:
        self.inner.resumed(request, now)

    def evicted(self, request: Request, now: float) -> None:
        self.inner.evicted(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.inner.finished(request, now, how)
        self._left += now >= self._ended

    def stepped(self, steps: Steps) -> None:
        self.inner.stepped(steps)
        self._ended = steps.ends[-1]
        self._began = steps.ends[-2] if len(steps.ends) > 1 else steps.start
        self._left = 0

    def adopt(self, view: View) -> None:
        self.inner.adopt(view)

    def gauges(self) -> Mapping[str, float]:
        return self.inner.gauges()

    def plan(self, view: View) -> Plan:
        idle = view.now > self._ended or not (view.decoding or view.prefilling)
        plan = self.inner.plan(view if idle else self._seen(view))
        if plan.decode is NONE and not plan.prefill and not idle:
            plan = self.inner.plan(view)
        return plan._replace(until=plan.until._replace(steps=1))

    def _seen(self, view: View) -> View:
        waiting = view.waiting.items()
        known = {id: request for id, request in waiting if request.queued <= self._began or request.evictions}
        limits = view.limits._replace(running=max(1, view.limits.running - self._left))
        seen = LateView(*(getattr(view, name) for name in LateView._fields))
        return seen._replace(waiting=known, limits=limits)
