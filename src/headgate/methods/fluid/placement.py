"""Decode routers: on which engine a request decodes whose prompt is done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from headgate.core.fleet import MIXED, SOLO, Fleet, Move, Stage
from headgate.core.request import Request
from headgate.methods.fluid.plan import FluidPlan

Draw = Callable[[], float]  # uniform on [0, 1)
POOLS = (SOLO, MIXED)


def pick(members: Sequence[int], draw: Draw) -> int:
    """One of them, each with the same chance."""
    return members[int(draw() * len(members))] if len(members) > 1 else members[0]


def at_home(fleet: Fleet, id: int, places: Sequence[int], draw: Draw) -> int:
    """The engine that did its prompt if that is among these, which have a seat: nothing need be copied then.

    Ours: the paper draws among all, because its model moves KV in no time.
    """
    home = fleet.replicas[fleet.places[id].replica]
    at_hand = home.seats > 0 and fleet.open[home.role] is places
    return home.id if at_hand else pick(places, draw)


class Placement:
    """Which request decodes where next; asked only while one waits for that."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def next(self, fleet: Fleet) -> Move | None:
        """The next decode to start; None: none now."""
        raise NotImplementedError

    def prefilled(self, request: Request) -> None:
        """It waits for a place from now on."""

    def gone(self, request: Request) -> None:
        """It does not wait any more."""

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines came, went, or have another role or room."""


class SoloFirst(Placement):
    """The greedy router (section 4.2): a free seat on a solo engine, else on a mixed one, else one queue."""

    def next(self, fleet: Fleet) -> Move | None:
        """The head of the queue."""
        places = fleet.open[SOLO] or fleet.open[MIXED]
        if not places:
            return None
        id = next(iter(fleet.handoff))
        return Move(id, at_home(fleet, id, places, self.draw), Stage.DECODE)


def solo_shares(plan: FluidPlan) -> dict[str, float]:
    """p_s: the share of a kind's decodes that the plan starts on solo engines."""
    pace, found = plan.instance.pace, {}
    for flow, mixed, solo in zip(plan.instance.flows, plan.mixed, plan.solo, strict=True):
        tokens = mixed / pace.mixed_step + solo * pace.solo_speed
        found[flow.name] = solo * pace.solo_speed / tokens if tokens > 0 else 1.0
    return found


class ByPool(Placement):
    """The randomised router (section 5.2): each request draws its pool once and waits for a seat there.

    So the decodes of every kind come to stand where the plan wants them, which the greedy router only does
    for their totals.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(draw)
        self.shares = solo_shares(plan)
        self._waiting: dict[str, OrderedDict[int, str]] = {pool: OrderedDict() for pool in POOLS}
        self._roles: set[str] | None = None

    def prefilled(self, request: Request) -> None:
        """The draw; a kind the plan does not know decodes on solo engines."""
        alone = self.draw() < self.shares.get(request.kind, 1.0)
        self._waiting[SOLO if alone else MIXED][request.id] = request.kind

    def gone(self, request: Request) -> None:
        """Out of whichever pool it waits for."""
        for waiting in self._waiting.values():
            waiting.pop(request.id, None)

    def next(self, fleet: Fleet) -> Move | None:
        """The next of a pool that has a seat; a pool without engines leaves its requests to the other."""
        for pool, other in ((SOLO, MIXED), (MIXED, SOLO)):
            waiting = self._waiting[pool]
            if not waiting:
                continue
            places = fleet.open[pool] or (fleet.open[other] if not self._exists(fleet, pool) else ())
            if places:
                id = self.head(pool, waiting)
                return Move(id, at_home(fleet, id, places, self.draw), Stage.DECODE)
        return None

    def head(self, pool: str, waiting: OrderedDict[int, str]) -> int:
        return next(iter(waiting))

    def _exists(self, fleet: Fleet, pool: str) -> bool:
        """Has any engine that takes decodes that role? Looked up again when engines change."""
        if self._roles is None:
            self._roles = {replica.role for replica in fleet.replicas if replica.room.decodes > 0}
        return pool in self._roles

    def engines_changed(self, fleet: Fleet) -> None:
        """Roles must be looked up again."""
        self._roles = None


class ByPoolAndKind(ByPool):
    """The general router (EC.6), for plans that let people wait for decode seats.

    When a seat is free in a pool the kind is drawn by its planned rate there, among waiting kinds.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(plan, draw)
        pace, flows = plan.instance.pace, plan.instance.flows
        speed = {SOLO: pace.solo_speed, MIXED: 1 / pace.mixed_step}
        decodes = {SOLO: plan.solo, MIXED: plan.mixed}
        self.weights = {
            pool: {f.name: y * speed[pool] / f.output for f, y in zip(flows, decodes[pool], strict=True)}
            for pool in POOLS
        }
        self._by_kind: dict[str, dict[str, OrderedDict[int, None]]] = {pool: {} for pool in POOLS}

    def prefilled(self, request: Request) -> None:
        """Into the queue of its kind in its pool."""
        super().prefilled(request)
        pool = SOLO if request.id in self._waiting[SOLO] else MIXED
        self._by_kind[pool].setdefault(request.kind, OrderedDict())[request.id] = None

    def gone(self, request: Request) -> None:
        super().gone(request)
        for kinds in self._by_kind.values():
            if request.kind in kinds:
                kinds[request.kind].pop(request.id, None)

    def head(self, pool: str, waiting: OrderedDict[int, str]) -> int:
        """The head of the kind that was drawn; first come, first served where no weight says anything."""
        weights = self.weights[pool]
        present = [(weights.get(kind, 0.0), queue) for kind, queue in self._by_kind[pool].items() if queue]
        total = sum(weight for weight, _ in present)
        if total <= 0:
            return next(iter(waiting))
        mark = self.draw() * total
        for weight, queue in present:
            mark -= weight
            if mark < 0:
                return next(iter(queue))
        return next(iter(present[-1][1]))
