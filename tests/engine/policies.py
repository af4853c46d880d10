"""Schedulers with any policy inside, drawn at random or made to fail."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

from schedulers import EngineShape, scheduler

from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo
from headgate.core.view import View
from headgate.live.engine.requests import WARMING, RequestTerms
from headgate.live.vllm import factory
from headgate.sim.engine.engine import Engine
from worlds import PRICES, Relay

factory.faults = cache(factory.faults)  # one release, looked at once for thousands of schedulers

HOOKS = ("arrived", "admitted", "prefilled", "held", "resumed", "evicted", "finished", "stepped")


def engine_of(shape: EngineShape) -> Engine:
    """The same engine as the simulator knows it."""
    return Engine(PRICES, shape.blocks * shape.block, shape.longest, shape.budget, shape.running, shape.block)


def gated(shape: EngineShape, policy: BatchPolicy, watchdog: float = 1e9) -> Any:
    """headgate's scheduler with that policy; some starve by design, so the watchdog sleeps."""
    made = scheduler(shape, {"policy": "mixed", "watchdog": f"{watchdog}s"})
    made._headgate.take_over(policy)
    return made


SLOS = (Slo(background=True), Slo(1000.0, 100.0), Slo(), Slo(1000.0, weight=10.0))
CLASSES = tuple(RequestTerms(slo=slo) for slo in SLOS)
WARM = (WARMING, WARMING, WARMING, RequestTerms())


def classed(made: Any, classes: tuple[RequestTerms, ...] = CLASSES) -> Any:
    """The same, with requests of several classes in turn."""
    terms, turn = made._headgate_books._promises, cycle(classes)

    def promises(request: Any) -> RequestTerms:
        each = next(turn)
        return terms(request)._replace(kind=each.kind, slo=each.slo)

    made._headgate_books._promises = promises
    return made


class Narrow(Relay):
    """Another policy, whose plans are cut to as little as a plan may ask for."""

    def __init__(self, inner: BatchPolicy, chunk: float, spare: float) -> None:
        super().__init__(inner)
        self.chunk, self.spare = chunk, spare  # spare: of the budget, beside decodes

    def plan(self, view: View) -> Plan:
        plan = self.inner.plan(view)
        named = {ALL: view.decoding, NONE: ()}.get(plan.decode, plan.decode)
        least = len(named) * view.limits.decode_width + self.spare
        return plan._replace(chunk=min(plan.chunk, self.chunk), budget=min(plan.budget, least))


class Failing(BatchPolicy):
    """A policy that is fine for a while, and from its `after`-th plan or news on is not."""

    def __init__(self, inner: BatchPolicy, how: str, after: int) -> None:
        self.inner = inner
        self.how = how
        self.left = after
        self.failed = False

    def plan(self, view: View) -> Plan:
        self.left -= 1
        if self.left > 0 or self.how.startswith("hook"):
            return self.inner.plan(view)
        self.failed = True
        return NONSENSE[self.how](view)

    def gauges(self) -> dict[str, float]:
        return dict(self.inner.gauges())

    def _hear(self, name: str, *news: Any) -> None:
        if self.how == f"hook {name}" and self.left <= 0:
            self.failed = True
            raise LookupError(f"cannot bear to hear {name}")
        getattr(self.inner, name)(*news)

    def arrived(self, request, now):
        self._hear("arrived", request, now)

    def admitted(self, request, now):
        self._hear("admitted", request, now)

    def prefilled(self, request, now):
        self._hear("prefilled", request, now)

    def held(self, request, now):
        self._hear("held", request, now)

    def resumed(self, request, now):
        self._hear("resumed", request, now)

    def evicted(self, request, now):
        self._hear("evicted", request, now)

    def finished(self, request, now, how):
        self._hear("finished", request, now, how)

    def stepped(self, steps):
        self._hear("stepped", steps)


def _raises(view: View) -> Plan:
    raise ZeroDivisionError("a bug in a policy")


NONSENSE = {
    "raises": _raises,
    "no plan": lambda view: None,
    "strangers decode": lambda view: Plan(frozenset({10**9})),
    "strangers prefill": lambda view: Plan(ALL, (10**9,)),
    "strangers leave": lambda view: Plan(ALL, evict=(10**9,)),
    "no budget": lambda view: Plan(ALL, (*view.prefilling, *view.waiting), budget=0, chunk=0),
    "a lease of nothing": lambda view: Plan(ALL, until=Until(steps=0)),
    "nobody decodes": lambda view: Plan(NONE),
    "nobody enters": lambda view: Plan(ALL, until=Until(steps=1)),
    "nothing at all": lambda view: Plan(frozenset(), until=Until(time=view.now + 10**6)),
}
STARVES = ("nobody decodes", "nobody enters", "nothing at all")
