"""State of routers that choose an engine at once: assigned requests that wait, and the least load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from headgate.core.fleet import Fleet, Replica
from headgate.core.request import Request

SPARE = 64  # rows of the heap beyond some per engine before it is made anew


class Assigned:
    """Requests that were given to an engine and are not sent there yet, first come first served.

    Where engines take whatever they are sent, no request ever waits in one.
    """

    def __init__(self, engines: Iterable[int], has_room: Callable[[Replica], bool]) -> None:
        self._lines: dict[int, OrderedDict[int, Request]] = {engine: OrderedDict() for engine in engines}
        self._has_room = has_room
        self._given: dict[int, int] = {}  # request: its line
        self._touched: list[int] = []  # engines on which something has changed

    def give(self, request: Request, engine: int, first: bool = False) -> None:
        """It waits for that engine, behind the others or before them."""
        line = self._lines.setdefault(engine, OrderedDict())
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


class Loads:
    """What every engine of a pool has to carry; the least loaded is found without looking at all of them.

    A heap in which one row of each engine counts, never above what the engine has now. A load that rises
    leaves its row behind until that comes up; only one that falls below its row writes another. Of equals,
    the one that was chosen longest ago. `only` says which engines may be chosen; the others are counted.
    """

    def __init__(self, engines: Sequence[int]) -> None:
        self.load = dict.fromkeys(engines, 0)
        self.total = 0
        self._chosen = dict.fromkeys(engines, 0)  # the number of the choice that fell on it
        self._choices = 0
        self._rows = {engine: (0, 0, engine) for engine in engines}  # those that count
        self._order = [*self._rows.values()]

    def add(self, engine: int, weight: int) -> None:
        """Its load changes by so much."""
        self.load[engine] += weight
        self.total += weight
        if weight < 0 and engine in self._rows and (row := self._row(engine)) < self._rows[engine]:
            self._rows[engine] = row
            heappush(self._order, row)
            if len(self._order) > SPARE + 8 * len(self.load):
                self._order = [*self._rows.values()]
                heapify(self._order)

    def only(self, engines: Sequence[int], known: int) -> None:
        """These may be chosen, of `known` engines in all; whoever is new has no load."""
        for engine in range(known):
            self.load.setdefault(engine, 0)
            self._chosen.setdefault(engine, 0)
        self._rows = {engine: self._row(engine) for engine in engines}
        self._order = sorted(self._rows.values())

    def least(self) -> int:
        """The engine with the least load; it counts as chosen."""
        order, rows = self._order, self._rows
        while True:
            row = order[0]
            engine = row[2]
            if row is not rows[engine]:
                heappop(order)  # another one counts
            elif row == (now := self._row(engine)):
                break
            else:
                rows[engine] = now
                heapreplace(order, now)
        self._choices += 1
        self._chosen[engine] = self._choices
        return engine

    def _row(self, engine: int) -> tuple[int, int, int]:
        return self.load[engine], self._chosen[engine], engine
