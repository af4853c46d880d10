"""A few requests of classes that a plan closes, so that one still learns how long they are."""

from __future__ import annotations

from headgate.core.fleet import Fleet
from headgate.methods.fluid.plan import FluidPlan

SHARE = 0.005  # of the fleet's decode capacity, for each closed class


class Probes:
    """Ours: a router that learns only from requests it serves would never open a class that it once closed.

    Each closed class may have one request at a time as often as its work stays below half a percent of what
    all engines can decode.
    """

    def __init__(self) -> None:
        self._every: dict[str, float] = {}  # seconds between two probes of closed classes
        self._last: dict[str, float] = {}

    def follow(self, plan: FluidPlan, engines: int, now: float) -> None:
        """Another plan is in force."""
        pace = plan.instance.pace
        spare = SHARE * engines * pace.seats * pace.solo_speed  # tokens per second
        rows = zip(plan.instance.flows, plan.prefill, strict=True)
        self._every = {flow.name: pace.decode_weight(flow) / spare for flow, share in rows if share <= 0}
        for kind in self._every:
            self._last.setdefault(kind, now)

    def due(self, fleet: Fleet) -> str | None:
        """A closed class of which one may enter now."""
        for kind, seconds in self._every.items():
            if fleet.now - self._last[kind] >= seconds and fleet.queues.get(kind):
                return kind
        return None

    def sent(self, kind: str, now: float) -> None:
        self._last[kind] = now
