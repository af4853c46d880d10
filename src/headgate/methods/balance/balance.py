"""Routers that balance: every request goes to one engine at once and stays there.

Where engines have no queues of their own (the stochastic network), a request waits before the engine it was
given. None of them looks at more than a few engines, whatever the size of the fleet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final
from zlib import crc32

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError
from headgate.core.fleet import STAY, Fleet, Move, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.balance.assigned import Assigned, Loads, one_move
from headgate.methods.balance.prefix_index import UNKNOWN, Sharing
from headgate.methods.fluid.placement import Draw

WHOLE: Final = Stage.WHOLE
POINTS = 64  # of each engine on the ring
TOO_FULL = 1.25  # times the mean load, beyond which an engine passes its sessions on


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Balance(RoutePolicy):
    """Chooses an engine when a request arrives; it is sent there as soon as there is room.

    The load of an engine is the sum of `weigh` over the requests assigned to it that have not left. Weights
    are stored with the request, because what is known of its prompt may change. Engines that are down or
    take prompts or decodes only are not chosen; if all are, requests wait for one of them.
    """

    sends_at_once = True

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise InputError(f"{engines} engines; give at least 1")
        self.engines = engines
        self.open: Sequence[int] = range(engines)  # those that may be chosen
        self.loads = Loads(range(engines))
        self._weights: dict[int, tuple[int, int]] = {}  # request: its weight and engine
        self._lines = Assigned(range(engines))

    def choose(self, request: Request) -> int:
        """The engine that shall serve it."""
        raise NotImplementedError

    def weigh(self, request: Request) -> int:
        """How much it adds to the load of its engine."""
        return 1

    def arrived(self, request: Request, now: float) -> None:
        """It is given to an engine."""
        self._give(request, self.choose(request))

    def returned(self, request: Request, now: float) -> None:
        """It goes before those who wait for the engine that is chosen now."""
        self.lift(request)
        self._lines.drop(request.id)
        self._give(request, self.choose(request), first=True)

    def moved(self, request: Request, move: Move, now: float) -> None:
        """The driver may have sent it elsewhere, or sent one that another router left between engines."""
        id, to, _ = move
        if id not in self._weights:
            self._weigh(request, to)
        engine, weight = self._weights[id]
        if engine != to:
            self._weights[id] = to, weight
            self.loads.add(engine, -weight)
            self.loads.add(to, weight)
            self._lines.drop(id)
            self._lines.touch(engine)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """There may be room for another prompt."""
        self._lines.touch(replica)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self.lift(request)
        self._lines.touch(replica)

    def left(self, request: Request, now: float, how: End) -> None:
        """It weighs no more, wherever it was."""
        self._lines.drop(request.id)
        engine = self.lift(request)
        if engine is not None:
            self._lines.touch(engine)

    def route(self, fleet: Fleet) -> Routing:
        """A request whose engine has room, in the order of assignment."""
        found = self._lines.next(fleet)
        return STAY if found is None else one_move(*found, WHOLE)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        """Those who are on an engine weigh there; those who wait are given to one."""
        self._look(fleet)
        for id, place in fleet.places.items():
            if id not in fleet.handoff:
                self._weigh(place.request, place.replica)
                if place.decoding:
                    self.prefilled(place.request, place.replica, fleet.now)
        for queue in fleet.queues.values():
            for request in queue.values():
                self.arrived(request, fleet.now)

    def engines_changed(self, fleet: Fleet) -> None:
        """Who waited for an engine that is closed now is given to another."""
        self._look(fleet)
        for request in self._lines.clear_up(self.open):
            self.lift(request)
            self.arrived(request, fleet.now)

    def _look(self, fleet: Fleet) -> None:
        """Which engines may be chosen?"""
        replicas = fleet.replicas
        found = [each.id for each in replicas if each.room.prompts > 0 and each.room.decodes > 0]
        self.engines = len(replicas)
        self.open = found or range(self.engines)
        self.loads.only(self.open, self.engines)

    def _give(self, request: Request, engine: int, first: bool = False) -> None:
        self._lines.give(request, engine, first)
        self._weigh(request, engine)

    def _weigh(self, request: Request, engine: int) -> None:
        weight = self.weigh(request)
        self._weights[request.id] = engine, weight
        self.loads.add(engine, weight)

    def lift(self, request: Request) -> int | None:
        """Take its weight off its engine, which is returned."""
        engine, weight = self._weights.pop(request.id, (None, 0))
        if engine is not None and weight:
            self.loads.add(engine, -weight)
        return engine


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RoundRobin(Balance):
    """One engine after the other."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._next = 0

    def choose(self, request: Request) -> int:
        """The next one that is open."""
        place = bisect_left(self.open, self._next) % len(self.open)
        self._next = (self.open[place] + 1) % self.engines
        return self.open[place]

    def ahead(self, requests: int) -> list[int] | None:
        if type(self) is not RoundRobin:  # a subclass may look at anything
            return None
        first = bisect_left(self.open, self._next)
        return [*islice(cycle((*self.open[first:], *self.open[:first])), requests)]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class AtRandom(Balance):
    """Any engine with the same chance."""

    def __init__(self, engines: int, draw: Draw) -> None:
        super().__init__(engines)
        self.draw = draw

    def choose(self, request: Request) -> int:
        return self._any()

    def _any(self) -> int:
        return self.open[int(self.draw() * len(self.open))]

    def ahead(self, requests: int) -> list[int] | None:
        return [self._any() for _ in range(requests)] if type(self) is AtRandom else None


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LeastLoaded(Balance):
    """The engine with the fewest requests: join the shortest queue."""

    def choose(self, request: Request) -> int:
        """Of equals, the one that was chosen longest ago."""
        return self.loads.least()


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LeastPending(LeastLoaded):
    """The engine with the fewest prompt tokens to prefill; a prompt counts in full until it is done."""

    def weigh(self, request: Request) -> int:
        return request.prompt

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its prompt is done and weighs no more."""
        super().prefilled(request, replica, now)
        engine = self.lift(request)
        if engine is not None:
            self._weights[request.id] = engine, 0


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PowerOfTwo(AtRandom):
    """Two engines are drawn, the one with fewer requests takes it (Mitzenmacher 2001)."""

    def choose(self, request: Request) -> int:
        """The less loaded of two."""
        first, second = self._any(), self._any()
        return second if self.loads.load[second] < self.loads.load[first] else first


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Affinity(LeastLoaded):
    """Requests of one session keep to one engine, unless that is too full: then the least loaded takes it.

    The session, or the class of a request without one, is hashed to a point on a ring on which every engine
    has many (consistent hashing): when engines are added few sessions move, and nothing is remembered of
    them. An engine is too full beyond `bound` times the mean load.
    """

    reads_contents = True

    def __init__(self, engines: int, sharing: Sharing | None = None, bound: float = TOO_FULL) -> None:
        super().__init__(engines)
        self.session = (sharing or UNKNOWN).session
        if not bound >= 1:
            raise InputError(f"router affinity: bound={bound:g} is below the mean load; give 1 or more")
        self.bound = bound
        self._make_ring(range(engines))

    def _look(self, fleet: Fleet) -> None:
        super()._look(fleet)
        self._make_ring(self.open)

    def _make_ring(self, engines: Sequence[int]) -> None:
        names = ((f"{engine}/{point}", engine) for engine in engines for point in range(POINTS))
        ring = sorted((crc32(name.encode()), engine) for name, engine in names)
        self._places, self._owners = zip(*ring, strict=True)

    def choose(self, request: Request) -> int:
        """Its home, or the least loaded."""
        session = self.session(request)
        name = request.kind if session is None else f"session {session}"
        place = bisect_right(self._places, crc32(name.encode())) % len(self._owners)
        home: int = self._owners[place]
        fair = self.bound * (self.loads.total + 1) / len(self.open)
        return home if self.loads.load[home] < max(1.0, fair) else super().choose(request)
