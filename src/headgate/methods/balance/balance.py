"""Routers that balance: every request goes to one engine at once and stays there.

Where engines have no queues of their own (the stochastic network), a request waits before the engine it was
given. None of them looks at more than a few engines, whatever the size of the fleet.
"""

from __future__ import annotations

from bisect import bisect_right
from zlib import crc32

from headgate.core.errors import InputError
from headgate.core.fleet import STAY, Fleet, Move, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.balance.assigned import Lines, Loads
from headgate.methods.fluid.placement import Draw

POINTS = 64  # of each engine on the ring
TOO_FULL = 1.25  # times the mean load, beyond which an engine passes its sessions on


class Balance(RoutePolicy):
    """Chooses an engine when a request arrives; it is sent there as soon as there is room.

    The load of an engine is the sum of `weigh` over the requests assigned to it that have not left.
    """

    sends_at_once = True

    def __init__(self, engines: int) -> None:
        if engines < 1:
            raise InputError(f"{engines} engines; give at least 1")
        self.engines = engines
        self.loads = Loads(range(engines))
        self._weights: dict[int, tuple[int, int]] = {}  # request: its weight and engine
        self._lines = Lines(range(engines), lambda replica: replica.idle)
        self._adopted = False

    def choose(self, request: Request) -> int:
        """The engine that shall serve it."""
        raise NotImplementedError

    def weigh(self, request: Request) -> int:
        """How much it adds to the load of its engine."""
        return 1

    def arrived(self, request: Request, now: float) -> None:
        """It is given to an engine."""
        engine, weight = self.choose(request), self.weigh(request)
        self._lines.give(request.id, engine)
        self._weights[request.id] = engine, weight
        self.loads.add(engine, weight)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """There may be room for another prompt."""
        self._lines.touch(replica)

    def finished(self, request: Request, replica: int, now: float) -> None:
        """It weighs no more."""
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
        if not self._adopted:
            self._adopt(fleet)
        found = self._lines.next(fleet)
        return STAY if found is None else Routing((Move(*found),))

    def _adopt(self, fleet: Fleet) -> None:
        """Requests that waited before this router took over; it was notified of all others."""
        self._adopted = True
        for stranger in self._lines.strangers(fleet.queues.values()):
            self.arrived(stranger, fleet.now)

    def lift(self, request: Request) -> int | None:
        """Take its weight off its engine, which is returned."""
        engine, weight = self._weights.pop(request.id, (None, 0))
        if engine is not None and weight:
            self.loads.add(engine, -weight)
        return engine


class RoundRobin(Balance):
    """One engine after the other."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._next = 0

    def choose(self, request: Request) -> int:
        """The next one."""
        engine = self._next
        self._next = (engine + 1) % self.engines
        return engine


class AtRandom(Balance):
    """Any engine with the same chance."""

    def __init__(self, engines: int, draw: Draw) -> None:
        super().__init__(engines)
        self.draw = draw

    def choose(self, request: Request) -> int:
        """Drawn."""
        return int(self.draw() * self.engines)


class LeastLoaded(Balance):
    """The engine with the fewest requests: join the shortest queue."""

    def choose(self, request: Request) -> int:
        """Of equals, the one that was chosen longest ago."""
        return self.loads.least()


class LeastPending(LeastLoaded):
    """The engine with the fewest prompt tokens to prefill; a prompt counts in full until it is done."""

    def weigh(self, request: Request) -> int:
        """Its prompt."""
        return request.prompt

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its prompt is done and weighs no more."""
        super().prefilled(request, replica, now)
        engine = self.lift(request)
        if engine is not None:
            self._weights[request.id] = engine, 0


class PowerOfTwo(AtRandom):
    """Two engines are drawn, the one with fewer requests takes it (Mitzenmacher 2001)."""

    def choose(self, request: Request) -> int:
        """The less loaded of two."""
        first, second = super().choose(request), super().choose(request)
        return second if self.loads.load[second] < self.loads.load[first] else first


class Affinity(LeastLoaded):
    """Requests of one kind keep to one engine, unless that is too full: then the least loaded takes it.

    A request says nothing of its session or tenant but its `kind`, so that is what is hashed, to a point on
    a ring on which every engine has many (consistent hashing): when engines are added few kinds move. An
    engine is too full beyond `bound` times the mean load.
    """

    def __init__(self, engines: int, bound: float = TOO_FULL) -> None:
        super().__init__(engines)
        if not bound >= 1:
            raise InputError(f"router affinity: bound={bound:g} is below the mean load; give 1 or more")
        self.bound = bound
        names = ((f"{engine}/{point}", engine) for engine in range(engines) for point in range(POINTS))
        ring = sorted((crc32(name.encode()), engine) for name, engine in names)
        self._places, self._owners = zip(*ring, strict=True)

    def choose(self, request: Request) -> int:
        """Its home, or the least loaded."""
        place = bisect_right(self._places, crc32(request.kind.encode())) % len(self._owners)
        home: int = self._owners[place]
        fair = self.bound * (self.loads.total + 1) / self.engines
        return home if self.loads.load[home] < max(1.0, fair) else super().choose(request)
