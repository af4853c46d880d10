"""Prefill gates: whose prompt starts next.

Every gate answers the same question for a fleet that has a place for a prompt. `wake` says when its answer
could change by itself; only the token bucket's can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from headgate.core.fleet import Fleet
from headgate.core.request import Request
from headgate.methods.fluid.plan import FluidPlan

BUCKET = 5.0  # most admissions a class may save up
FULL = 1 - 1e-6  # a bucket that holds one admission, but for rounding of the clock
SHED_AFTER = 10.0  # seconds of its planned rate that may wait in a class that never gives up


class Admission:
    """Which prompt starts next, and which requests to turn away."""

    closes = False  # are there kinds it never lets in?

    def choose(self, fleet: Fleet) -> str | None:
        """The kind whose oldest request enters; None: none now."""
        raise NotImplementedError

    def refuse(self, fleet: Fleet) -> tuple[int, ...]:
        """Requests that will never be let in, or not in reasonable time."""
        return ()

    def entered(self, request: Request, now: float) -> None:
        """That one's prompt has started."""

    def adopt(self, fleet: Fleet, before: Admission | None) -> None:
        """It takes over a running fleet, perhaps from another gate."""

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines came, went, or have another role or room."""

    def wake(self, fleet: Fleet) -> float:
        """When to ask again although nothing happens."""
        return inf


class Strict(Admission):
    """Kinds in a fixed order; those not named come last, in the fleet's order."""

    def __init__(self, order: Sequence[str]) -> None:
        self.order = order

    def choose(self, fleet: Fleet) -> str | None:
        """The first kind of the order with a waiting request."""
        queues = fleet.queues
        for kind in self.order:
            if queues.get(kind):
                return kind
        return next((kind for kind, queue in queues.items() if queue), None)


class Occupancy(Admission):
    """The paper's gate (section 4.1): the kind furthest below its planned share of engines that prefill.

    The index is ξ = (X - n x*) / x*, whose smallest is the smallest X / x*. Ties: the queue that exceeds its
    planned length most, then the plan's order. It never holds back a kind that the plan serves at all. A
    kind the plan does not serve (x* = 0, or not in the plan) is closed; those of it that never give up are
    turned away, and so is what a throttled kind of that sort has waiting beyond some seconds of its rate.
    With `spill` a closed kind enters while no other could and decode seats are plenty.

    Ours: where engines take several prompts at once (real ones do), prompts of all kinds stand in one queue
    inside the engine and are in service equally long. Shares of engines would then give a kind with long
    prompts as many times more admissions as its prompts are longer. The planned rates take their place.
    """

    def __init__(self, plan: FluidPlan, engines: int, spill: bool = False) -> None:
        flows = plan.instance.flows
        self.spill = spill
        self.closes = not spill
        self.targets: dict[str, tuple[float, float]] = {}  # x*, and the planned queue of the whole fleet
        self._shares: dict[str, tuple[float, float]] = {}  # the same by name, x* and planned rate
        self.throttled: dict[str, float] = {}  # admissions per second planned for kinds not served in full
        self._shed: dict[str, int] = {}  # the most that may wait of kinds that never give up
        self._patient = {flow.name for flow in flows if flow.impatience > 0}
        self._watched: list[str] | None = None  # kinds of which some may have to be turned away
        columns = (flows, plan.prefill, plan.waiting, plan.prompts, plan.throttled)
        for flow, share, waiting, rate, throttled in zip(*columns, strict=True):
            if share <= 0:
                continue
            self.targets[flow.name] = (share, engines * waiting)
            self._shares[flow.name] = (share, rate)
            if throttled:
                self.throttled[flow.name] = engines * rate
                if flow.impatience == 0:
                    self._shed[flow.name] = max(1, ceil(engines * rate * SHED_AFTER))

    def engines_changed(self, fleet: Fleet) -> None:
        """Shares of engines are the targets while each takes one prompt at a time, else rates."""
        several = any(replica.room.prompts > 1 for replica in fleet.replicas)
        for kind, (share, rate) in self._shares.items():
            self.targets[kind] = (rate if several else share, self.targets[kind][1])

    def choose(self, fleet: Fleet) -> str | None:
        """The smallest index among waiting kinds that are admitted."""
        chosen, least, longest = None, inf, -inf
        prefilling, queues = fleet.prefilling, fleet.queues
        for kind, (share, planned) in self.targets.items():
            queue = queues.get(kind)
            if not queue:
                continue
            index = prefilling[kind] / share
            if index > least or not self.lets_in(kind, fleet):
                continue
            excess = len(queue) - planned
            if index < least or excess > longest:
                chosen, least, longest = kind, index, excess
        return self._closed_one(fleet) if chosen is None and self.spill else chosen

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        """May this kind enter now? Here: always."""
        return True

    def refuse(self, fleet: Fleet) -> tuple[int, ...]:
        """Closed kinds that would wait for ever, and the newest of throttled ones that never give up."""
        if self._watched is None:  # the fleet's kinds are known from the first question on
            shut = [kind for kind in fleet.queues if kind not in self.targets and kind not in self._patient]
            self._watched = [] if self.spill else shut
            self._watched += self._shed
        refused: list[int] = []
        for kind in self._watched:
            queue, most = fleet.queues.get(kind, {}), self._shed.get(kind, 0)
            if len(queue) > most:
                refused += [*queue][most:]
        return tuple(refused)

    def _closed_one(self, fleet: Fleet) -> str | None:
        """A kind the plan does not serve, while no request waits for a decode seat and enough are free."""
        if fleet.handoff or fleet.free_seats <= sum(fleet.prefilling.values()):
            return None
        return next((k for k, queue in fleet.queues.items() if queue and k not in self.targets), None)


class BackPressure(Occupancy):
    """The same, but a throttled kind enters only while no request waits for a decode seat and one is free.

    Ours (GG-SP+). The paper's gate fills every prompt place that happens to be idle, which at finite n
    over-serves kinds whose prompts are cheap and whose decodes are not.
    """

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        """A throttled kind waits for room behind it."""
        return kind not in self.throttled or (not fleet.handoff and fleet.free_seats > 0)


class TokenBucket(Occupancy):
    """The same, but a throttled kind enters at its planned rate: one token each, a few may be saved up.

    Ours, for plans that leave decode seats idle on purpose (fairness, TPOT caps), where a free seat is no
    licence to admit.
    """

    def __init__(self, plan: FluidPlan, engines: int, spill: bool = False) -> None:
        super().__init__(plan, engines, spill)
        self._level = {kind: (1.0, 0.0) for kind in self.throttled}  # tokens, and when there were so many

    def level(self, kind: str, now: float) -> float:
        """Tokens in the bucket of a throttled kind."""
        tokens, since = self._level[kind]
        return min(BUCKET, tokens + (now - since) * self.throttled[kind])

    def adopt(self, fleet: Fleet, before: Admission | None) -> None:
        """Levels go on from where they were; a kind that was not throttled before begins as at the start."""
        now = fleet.now
        known = before.throttled if isinstance(before, TokenBucket) else {}
        for kind in self.throttled:
            level = before.level(kind, now) if isinstance(before, TokenBucket) and kind in known else 1.0
            self._level[kind] = (level, now)

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        """Kinds served in full always enter."""
        return kind not in self.throttled or self.level(kind, fleet.now) >= FULL

    def entered(self, request: Request, now: float) -> None:
        if request.kind in self.throttled:
            self._level[request.kind] = (self.level(request.kind, now) - 1.0, now)

    def wake(self, fleet: Fleet) -> float:
        """When the first bucket of a waiting kind is full enough."""
        times = [
            fleet.now + (1.0 - self.level(kind, fleet.now)) / rate
            for kind, rate in self.throttled.items()
            if fleet.queues.get(kind)
        ]
        return min(times, default=inf)
