"""Who comes next and when: a workload unrolled in time, open or closed loop."""

from __future__ import annotations

from math import inf
from typing import Any

from headgate.core.ledger import Entry, Ledger, entry_of
from headgate.workloads.workload import Workload


class Arrivals:
    """Hands out a workload's requests as handles, each at its time.

    Open loop: at the workload's times. Closed loop: request i is sent as soon as fewer than
    `clients[i]` requests are outstanding, so one that leaves lets the next one in at that moment.

    With `hits` a request comes with the cached tokens that were recorded for it. Which other requests hold
    them is not known, so they take memory as if no other did.
    """

    def __init__(self, workload: Workload, hits: bool = False) -> None:
        self.total = len(workload)
        self.sent = 0
        self.outstanding = 0
        self.closed = workload.closed
        self.times: list[float] = workload.arrival.tolist()
        self._clients: list[int] = workload.clients.tolist()
        self.known = workload.identities()
        self._now = 0.0
        recorded = hits and workload.contents is None and workload.cached.any()
        self.cached: list[int] = workload.cached.tolist() if recorded else []
        self.next_time: float = -inf if self.closed else self.times[0]

    @property
    def pending(self) -> bool:
        """Is anybody still to come?"""
        return self.sent < self.total

    def time_of(self, ahead: float) -> float:
        """When the `ahead`-th next request arrives (1: the next one); inf: never, or not known yet."""
        if ahead == 1 or (self.closed and ahead < inf):
            return self.next_time
        index = self.sent + ahead - 1
        return self.times[int(index)] if index < self.total else inf

    def take(self, ledger: Ledger) -> Entry:
        """The next request, as a handle of that ledger."""
        id = self.sent
        self.sent += 1
        self.outstanding += 1
        self._look_ahead()
        arrival = self._now if self.closed else self.times[id]
        return self._handle(ledger, id, arrival, next(self.known))

    def _handle(self, ledger: Ledger, id: int, arrival: float, known: tuple[Any, ...]) -> Entry:
        entry = entry_of(ledger, id, arrival, known)
        if self.cached:
            entry.cached = entry.hit = entry.loose = self.cached[id]
            entry.todo -= entry.hit
        return entry

    def returned(self, now: float) -> None:
        """One request has left; in a closed loop its client sends the next."""
        self.outstanding -= 1
        self._now = now
        if self.closed:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """`next_time`: in a closed loop the next one comes at once, or when somebody has left."""
        if self.sent == self.total:
            self.next_time = inf
        elif not self.closed:
            self.next_time = self.times[self.sent]
        else:
            self.next_time = -inf if self.outstanding < self._clients[self.sent] else inf
