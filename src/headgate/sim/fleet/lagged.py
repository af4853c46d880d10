"""Any policy as an asynchronous engine sees it: the world as it was when the step before began."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headgate.core.plan import NONE, Plan
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.request import Request
from headgate.core.view import Limits, View

SILENT = -1.0  # before any time


class LateView:
    def __init__(self, view: View, waiting: Mapping[int, Request], limits: Limits) -> None:
        self._view, self.waiting, self.limits = view, waiting, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


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

    def finished(self, request: Request, now: float, how: End) -> None:
        self.inner.finished(request, now, how)
        self._left += now >= self._ended

    def stepped(self, steps: Steps) -> None:
        self.inner.stepped(steps)
        self._ended = steps.ends[-1]
        self._began = steps.ends[-2] if len(steps.ends) > 1 else steps.start
        self._left = 0

    def plan(self, view: View) -> Plan:
        idle = view.now > self._ended or not (view.decoding or view.prefilling)
        plan = self.inner.plan(view if idle else self._seen(view))
        if plan.decode is NONE and not plan.prefill and not idle:
            plan = self.inner.plan(view)
        return plan._replace(until=plan.until._replace(steps=1))

    def _seen(self, view: View) -> Any:
        waiting = view.waiting.items()
        known = {id: request for id, request in waiting if request.queued <= self._began or request.evictions}
        limits = view.limits._replace(running=max(1, view.limits.running - self._left))
        return LateView(view, known, limits)


def _passed_on(hook: str) -> Callable[..., Any]:
    return lambda self, *told: getattr(self.inner, hook)(*told)


for _hook in {*vars(BatchPolicy), *vars(Observer)} - {*vars(Lagged)}:
    if not _hook.startswith("_"):
        setattr(Lagged, _hook, _passed_on(_hook))
