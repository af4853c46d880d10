"""Routers that balance: every request goes to one engine at once and stays there.

Where engines have no queues of their own (the stochastic network), a request waits before the engine it was
given. None of them looks at more than a few engines, whatever the size of the fleet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from math import inf
from typing import Final
from zlib import crc32

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import InputError
from headgate.core.fleet import STAY, Fleet, Move, Replica, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Request, weight_of
from headgate.methods.balance.prefix_index import UNKNOWN, Sharing
from headgate.methods.fluid.gates import Draw

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
        self.loads, self.background = Loads(range(engines)), Loads(range(engines))
        self._weights: dict[int, tuple[int, int]] = {}  # request: its weight and engine
        self._lines = Assigned(range(engines))

    def choose(self, request: Request) -> int:
        raise NotImplementedError

    def weigh(self, request: Request) -> int:
        return 1

    def arrived(self, request: Request, now: float) -> None:
        self._give(request, self.choose(request))

    def returned(self, request: Request, now: float) -> None:
        """It goes before the others that wait for the engine that is chosen now."""
        self.lift(request)
        self._lines.drop(request.id)
        self._give(request, self.choose(request), first=True)

    def moved(self, request: Request, move: Move, now: float) -> None:
        """The driver may have sent it elsewhere, or sent one that another router left between engines."""
        self._lines.drop(request.id)
        engine, _ = self._weights.get(request.id, (-1, 0))
        if engine != move.replica:
            self.lift(request)
            self._weigh(request, move.replica)

    def passed_over(self, request: Request, now: float) -> None:
        self._lines.give(request, self._weights[request.id][0], first=True)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        self._lines.touch(replica)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self.lift(request)

    def left(self, request: Request, now: float, how: End) -> None:
        self._lines.drop(request.id)
        self.lift(request)

    def route(self, fleet: Fleet) -> Routing:
        sent = self._lines.next(fleet)
        return STAY if sent is None else one_move(*sent, WHOLE)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
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
        """Requests that waited for an engine that is closed now are given to another; all where one opens."""
        before = {*self.open}
        self._look(fleet)
        for request in self._lines.clear_up(self.open if before.issuperset(self.open) else ()):
            self.lift(request)
            self.arrived(request, fleet.now)

    def _look(self, fleet: Fleet) -> None:
        replicas = fleet.replicas
        able = [engine.id for engine in replicas if engine.room.prompts > 0 and engine.room.decodes > 0]
        self.engines = len(replicas)
        self.open = able or range(self.engines)
        self.loads.only(self.open, self.engines)
        self.background.only(self.open, self.engines)

    def _give(self, request: Request, engine: int, first: bool = False) -> None:
        self._lines.give(request, engine, first)
        self._weigh(request, engine)

    def _weigh(self, request: Request, engine: int) -> None:
        weight = self.weigh(request)
        self._weights[request.id] = engine, weight
        self.loads_of(request).add(engine, weight)

    def lift(self, request: Request) -> int | None:
        """Take its weight off its engine, which is returned: one that waits for it may go there now."""
        engine, weight = self._weights.pop(request.id, (None, 0))
        if engine is not None:
            self._lines.touch(engine)
            if weight:
                self.loads_of(request).add(engine, -weight)
        return engine

    def loads_of(self, request: Request) -> Loads:
        """Those that count for it: background takes no place from others, so its load is one of its own."""
        return self.background if request.slo.background else self.loads


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RoundRobin(Balance):
    """One engine after the other."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._next = 0

    def choose(self, request: Request) -> int:
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
        return self.loads_of(request).least()


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class LeastPending(LeastLoaded):
    """The engine with the fewest prompt tokens to prefill; a prompt counts in full until it is done."""

    def weigh(self, request: Request) -> int:
        return request.prompt

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        super().prefilled(request, replica, now)
        engine = self.lift(request)
        if engine is not None:
            self._weights[request.id] = engine, 0


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PowerOfTwo(AtRandom):
    """Two engines are drawn, the one with fewer requests takes it (Mitzenmacher 2001)."""

    def choose(self, request: Request) -> int:
        first, second, load = self._any(), self._any(), self.loads_of(request).load
        return second if load[second] < load[first] else first


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
        session = self.session(request)
        name = request.kind if session is None else f"session {session}"
        place = bisect_right(self._places, crc32(name.encode())) % len(self._owners)
        home: int = self._owners[place]
        loads = self.loads_of(request)
        fair = self.bound * (loads.total + 1) / len(self.open)
        return home if loads.load[home] < max(1.0, fair) else super().choose(request)


# -- which engine has the least load, and which requests wait

CHOICES: Final = 40  # bits of a key for the number of a choice, below its load
CLOSED: Final = 1 << 100  # a key above all others
LAST: Final = 1.0  # the rank of background work; that of others is their weight, below 0
NOWHERE: Final = (-1, 0.0)


def full_for_background(engine: Replica) -> bool:
    """What it takes beyond its decodes is for others; one for prompts only has no decodes."""
    return 0 < engine.room.decodes <= engine.load


def one_move(id: int, engine: int, stage: Stage) -> Routing:
    return quick(Routing, ((quick(Move, (id, engine, stage)),), (), inf, ()))


class Assigned:
    """Requests that were given to an engine and are not sent there yet: the largest weight first, background
    last, of equals the one that came first.
    """

    def __init__(self, engines: Iterable[int], decodes: bool = False) -> None:
        """They wait for a place for their prompt, or for their decode."""
        self._lines: dict[int, dict[float, OrderedDict[int, Request]]] = {engine: {} for engine in engines}
        self._decodes = decodes
        self._given: dict[int, tuple[int, float]] = {}  # request: its line
        self._touched: list[int] = []  # engines on which something has changed

    def give(self, request: Request, engine: int, first: bool = False) -> None:
        rank = LAST if request.slo.background else -weight_of(request)
        line = self._lines.setdefault(engine, {}).setdefault(rank, OrderedDict())
        line[request.id] = request
        if first:
            line.move_to_end(request.id, last=False)
        self._given[request.id] = engine, rank
        self._touched.append(engine)

    def drop(self, id: int) -> None:
        engine, rank = self._given.pop(id, NOWHERE)
        if engine >= 0:
            self._lines[engine][rank].pop(id)
            self._tidy(engine, rank)

    def _tidy(self, engine: int, rank: float) -> None:
        if not self._lines[engine][rank]:
            del self._lines[engine][rank]

    def touch(self, engine: int) -> None:
        if self._given and engine in self._lines:
            self._touched.append(engine)

    def clear_up(self, open: Sequence[int]) -> list[Request]:
        """Requests that wait for any other engine than these; they wait in no line any more."""
        keep: set[int] = set(open)
        freed: list[Request] = []
        for engine, lines in self._lines.items():
            if engine in keep:
                self._touched.append(engine)
                continue
            for rank in sorted(lines):
                freed += lines[rank].values()
            lines.clear()
        for request in freed:
            del self._given[request.id]
        return freed

    def next(self, fleet: Fleet) -> tuple[int, int] | None:
        while self._touched:
            engine = self._touched[-1]
            lines = self._lines[engine]
            replica = fleet.replicas[engine]
            if lines and (replica.slots > 0 if self._decodes else replica.idle):
                rank = min(lines)
                if rank == LAST and full_for_background(replica):
                    self._touched.pop()  # there is room for others only
                    continue
                id, _ = lines[rank].popitem(last=False)
                del self._given[id]
                self._tidy(engine, rank)
                if not lines:  # it may not be asked again while no request waits
                    self._touched.pop()
                return id, engine
            self._touched.pop()
        return None


class Loads:
    """What every engine of a pool has to carry; the least loaded is found without looking at all of them.

    A tree of minima over one key per engine. Of equals, the one that was chosen longest ago, then the first.
    `only` says which engines may be chosen; the others are counted.
    """

    def __init__(self, engines: Sequence[int]) -> None:
        self.load: list[int] = []
        self.total = 0
        self._chosen: list[int] = []  # the number of the choice that fell on it
        self._choices = 0
        self.only(engines, max(engines) + 1)

    def add(self, engine: int, weight: int) -> None:
        self.load[engine] += weight
        self.total += weight
        if self._tree[self._size + engine] != CLOSED:
            self._set(engine)

    def only(self, engines: Sequence[int], known: int) -> None:
        """These may be chosen, of `known` engines in all; new ones have no load."""
        new = [0] * (known - len(self.load))
        self.load += new
        self._chosen += new
        self._size = 1 << (len(self.load) - 1).bit_length()
        self._tree = [CLOSED] * (2 * self._size)  # the root is 1, below n are 2n and 2n + 1
        for engine in engines:
            self._set(engine)

    def least(self) -> int:
        """The engine with the least load; it counts as chosen."""
        tree, place = self._tree, 1
        while place < self._size:
            place *= 2
            if tree[place + 1] < tree[place]:
                place += 1
        engine = place - self._size
        self._choices += 1
        self._chosen[engine] = self._choices
        self._set(engine)
        return engine

    def _set(self, engine: int) -> None:
        tree, place = self._tree, self._size + engine
        tree[place] = (self.load[engine] << CHOICES) + self._chosen[engine]
        while place > 1:
            place >>= 1
            left, right = tree[2 * place], tree[2 * place + 1]
            least = left if left <= right else right
            if tree[place] == least:
                return
            tree[place] = least
