"""State of routers that choose an engine at once: assigned requests that wait, and the least load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from headgate.core.build import quick
from headgate.core.fleet import Fleet, Move, Replica, Routing, Stage
from headgate.core.request import Request

CHOICES: Final = 40  # bits of a key for the number of a choice, below its load
CLOSED: Final = 1 << 100  # a key above all others


def one_move(id: int, engine: int, stage: Stage) -> Routing:
    """The answer that moves this request."""
    return quick(Routing, ((quick(Move, (id, engine, stage)),), (), inf, ()))


class Assigned:
    """Requests that were given to an engine and are not sent there yet, first come first served.

    Where engines take whatever they are sent, no request ever waits in one.
    """

    def __init__(self, engines: Iterable[int], decodes: bool = False) -> None:
        """They wait for a place for their prompt, or for their decode."""
        self._lines: dict[int, OrderedDict[int, Request]] = {engine: OrderedDict() for engine in engines}
        self._decodes = decodes
        self._given: dict[int, int] = {}  # request: its line
        self._touched: list[int] = []  # engines on which something has changed

    def give(self, request: Request, engine: int, first: bool = False) -> None:
        """It waits for that engine, behind the others or before them."""
        line = self._lines.get(engine)
        if line is None:
            line = self._lines[engine] = OrderedDict()
        line[request.id] = request
        if first:
            line.move_to_end(request.id, last=False)
        self._given[request.id] = engine
        self._touched.append(engine)

    def drop(self, id: int) -> None:
        """It waits no more, if it did."""
        engine = self._given.pop(id, None)
        if engine is not None:
            del self._lines[engine][id]

    def touch(self, engine: int) -> None:
        if self._given and engine in self._lines:
            self._touched.append(engine)

    def clear_up(self, open: Sequence[int]) -> list[Request]:
        """Those who wait for any other engine than these; they wait in no line any more."""
        keep: set[int] = set(open)
        found: list[Request] = []
        for engine, line in self._lines.items():
            if engine in keep:
                self._touched.append(engine)
                continue
            found += line.values()
            for id in line:
                del self._given[id]
            line.clear()
        return found

    def next(self, fleet: Fleet) -> tuple[int, int] | None:
        """A request whose engine has room, and that engine; None: there is none now."""
        while self._touched:
            engine = self._touched[-1]
            line = self._lines[engine]
            if line and self._has_room(fleet.replicas[engine]):
                id, _ = line.popitem(last=False)
                del self._given[id]
                if not line:  # nobody may ask again while no request waits
                    self._touched.pop()
                return id, engine
            self._touched.pop()
        return None

    def _has_room(self, replica: Replica) -> bool:
        return replica.seats > 0 if self._decodes else replica.idle


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
        """Its load changes by so much."""
        self.load[engine] += weight
        self.total += weight
        if self._tree[self._size + engine] != CLOSED:
            self._set(engine)

    def only(self, engines: Sequence[int], known: int) -> None:
        """These may be chosen, of `known` engines in all; whoever is new has no load."""
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
        """Its key has changed, and so may the minima above it."""
        tree, place = self._tree, self._size + engine
        tree[place] = (self.load[engine] << CHOICES) + self._chosen[engine]
        while place > 1:
            place >>= 1
            left, right = tree[2 * place], tree[2 * place + 1]
            least = left if left <= right else right
            if tree[place] == least:
                return
            tree[place] = least
