"""Deadlines of requests that wait, and whether the router has moved anybody lately."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from math import inf

from headgate.core.errors import InputError
from headgate.live.route.ticket import Ticket

OUT_OF_DATE = 256  # deadlines beyond one for each request inside, after which the heap is cleared of them


class Deadlines:
    """One heap for all. A deadline that is out of date is dropped when it comes up, or when they are many."""

    def __init__(self, watchdog: float, tickets: Mapping[int, Ticket]) -> None:
        """`tickets` are the requests inside, by number."""
        if not watchdog > 0:
            raise InputError(f"watchdog is {watchdog} s; give a time above 0")
        self.watchdog, self._tickets = watchdog, tickets
        self._heap: list[tuple[float, int]] = []
        self._held_since = inf  # since when somebody has waited without a break
        self._moved = -inf

    def set(self, ticket: Ticket, when: float) -> None:
        """It may stay in its state until then; infinite: for ever."""
        ticket.deadline = when
        if when < inf:
            heappush(self._heap, (when, ticket.id))
            if len(self._heap) > 2 * len(self._tickets) + OUT_OF_DATE:
                self._heap = [each for each in self._heap if self._holds(*each)]
                heapify(self._heap)

    def moved(self, now: float) -> None:
        """The router has moved a request."""
        self._moved = now

    def held(self, now: float, waiting: bool) -> None:
        """Does anybody wait after the router was asked?"""
        self._held_since = (now if self._held_since == inf else self._held_since) if waiting else inf

    @property
    def next_look(self) -> float:
        """When to look again at the latest."""
        dog = self._dog()
        return self._heap[0][0] if self._heap and self._heap[0][0] < dog else dog

    def due(self, now: float) -> list[Ticket]:
        """Those whose time is over. Their state tells what that means."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            when, id = heappop(self._heap)
            if self._holds(when, id):
                found.append(self._tickets[id])
        return found

    def _holds(self, when: float, id: int) -> bool:
        ticket = self._tickets.get(id)
        return ticket is not None and ticket.deadline == when

    def starving(self, now: float) -> bool:
        """Has nobody been moved for too long, although somebody waits? Then time begins anew."""
        if now < self._dog():
            return False
        self._moved = now
        return True

    def _dog(self) -> float:
        since = self._held_since if self._held_since > self._moved else self._moved
        return since + self.watchdog
