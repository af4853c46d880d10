"""Virtual time: the event loop. A newcomer should read `run` first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, Final

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError, RunError, one_line
from headgate.core.ledger import Entry, Ledger, Watchdog, entry_of
from headgate.core.policy import BatchPolicy, Observer
from headgate.sim.engine.asynchronous import Ahead
from headgate.sim.engine.bursts import bursts_of
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.workloads.workload import Workload

PATIENT_DOG: Final = 3600.0  # seconds of the run without any progress
REPORT_EVERY: Final = 256  # requests between two reports of progress


def guarded(serve: Callable[[], None], broke: Callable[[], str]) -> None:
    try:
        serve()
    except RunError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{broke()}: {one_line(error)}") from error


@mypyc_attr(allow_interpreted_subclasses=True)
class Simulator:
    """One engine, one policy, one workload.

    With `leases` (the default) a plan runs until its lease ends, and decode steps that repeat are jumped
    over. Without, the policy is asked at every single step. Both give the same schedule to the last bit.
    With `asynchronous` the engine composes a step while the one before it runs (`Ahead`); else it is of the
    given `kind`, and may have no prefix cache but `lost` output tokens of each request it evicts.
    """

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        workload: Workload,
        observers: tuple[Observer, ...] = (),
        *,
        leases: bool = True,
        asynchronous: bool = False,
        lost: int = 0,
        watchdog: float = PATIENT_DOG,
        progress: Callable[[int], None] | None = None,
        kind: type[VirtualEngine] = VirtualEngine,
    ) -> None:
        self.arrivals = arrivals_of(workload, engine.prefix_cache)
        numbered, returned = self.arrivals.numbered, self.arrivals.returned
        lengths: list[int] = numbered(workload.output.tolist())
        contents = numbered(workload.pieces()) if engine.prefix_cache and not lost else None
        bursts = bursts_of(engine, workload, numbered, asynchronous)
        if lost and bursts is not None:
            raise InputError("an engine that speculates loses no output at evictions; give one of the two")
        made: type[VirtualEngine] = Ahead if asynchronous else kind
        self.replica = made(engine, policy, lengths, observers, leases, returned, contents, bursts)
        self.replica.lost = lost
        self._watchdog = Watchdog(watchdog)
        self._progress = progress
        # When each gives up, if still here, and whether by hanging up; at the same moment patience first.
        self._timers: list[tuple[float, int, bool]] = []
        self._patience: list[float] = numbered(workload.patience.tolist())
        self._abort: list[float] = numbered(workload.abort.tolist())
        # Requests may come and leave within a lease: for want of patience, or because they can never fit.
        refused = bool(workload.prompt.max() >= engine.longest)
        self._impatient: bool = refused or min(min(self._patience), min(self._abort)) < inf

    def run(self) -> None:
        """Serve all requests. Whatever goes wrong in the policy's own code is a RunError that names it."""
        replica = self.replica
        name = type(replica.policy).__name__
        guarded(self._serve, lambda: f"policy {name} broke at {replica.now:.6f} s")
        if lost := self.arrivals.outstanding:
            raise RunError(f"policy {name} lost {lost} requests; a policy must not change the view")

    def _serve(self) -> None:
        arrivals, replica, impatient, dog = self.arrivals, self.replica, self._impatient, self._watchdog
        while True:
            if arrivals.next_time <= replica.now or self._timers:
                self._receive(replica.now)
            if replica.lease.ended:
                if replica.occupied:
                    replica.ask()
                elif arrivals.pending:
                    self._wait(arrivals.next_time)
                    continue
                else:
                    return
            if replica.advance(self._wake() if impatient else arrivals.time_of(replica.lease.arrivals)):
                if arrivals.next_time <= replica.last_start:
                    self._receive(replica.last_start)  # they came before the step that lets others go
                replica.settle()
            elif replica.asked_now:
                self._wait(min(arrivals.next_time, replica.plan.until.time))
            if replica.now >= dog.next_look and (starving := dog.look(replica.ledger, replica.now)):
                name = type(replica.policy).__name__
                raise RunError(f"policy {name} starves at {replica.now:.3f} s: {starving}; {replica.state()}")

    def _receive(self, now: float) -> None:
        """Requests that have come by now join the queue; those that have lost patience by now leave.

        One may let the other happen: in a closed loop one that leaves makes room for the next, and one that
        comes during a long step may have lost patience when it ends.
        """
        arrivals, timers = self.arrivals, self._timers
        while arrivals.next_time <= now or (timers and timers[0][0] <= now):
            if arrivals.next_time <= now:
                self._take()
            else:
                when, id, hangs_up = heappop(timers)
                self.replica.give_up(id, when, hangs_up)

    def _take(self) -> None:
        entry = self.arrivals.take(self.replica.ledger)
        if self._progress and entry.id % REPORT_EVERY == 0:
            self._progress(entry.id)
        if not self.replica.receive(entry):
            return
        if self._patience[entry.id] < inf:
            heappush(self._timers, (entry.arrival + self._patience[entry.id], entry.id, False))
        if self._abort[entry.id] < inf:
            heappush(self._timers, (entry.arrival + self._abort[entry.id], entry.id, True))

    def _wake(self) -> float:
        wake = self.arrivals.next_time
        return min(wake, self._timers[0][0]) if self._timers else wake

    def _wait(self, until: float) -> None:
        replica = self.replica
        if self._timers:
            until = min(until, self._timers[0][0])
        if replica.waits_forever() or until == inf:
            raise RunError(
                f"policy {type(replica.policy).__name__} runs nothing at {replica.now:.6f} s and nothing "
                f"else will happen (a plan must name half-done prompts, view.prefilling, too); "
                f"{replica.state()}; {replica.plan}"
            )
        replica.now = max(replica.now, until)
        replica.lease.ended = True


class Arrivals:
    """Hands out a workload's requests as handles, each at its time.

    Open loop: at the workload's times. Closed loop: request i is sent as soon as fewer than
    `clients[i]` requests are outstanding, so one that leaves lets the next one in at that moment. A number
    is a row of the workload.

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
        self.rows: list[int] = []  # by number, where numbers are not the workload's rows
        self._now = 0.0
        recorded = hits and workload.contents is None and workload.cached.any()
        self.cached: list[int] = workload.cached.tolist() if recorded else []
        self.next_time: float = -inf if self.closed else self.times[0]

    @property
    def pending(self) -> bool:
        return self.sent < self.total

    def numbered(self, values: Any) -> Any:
        """A list with a value for each row, by number."""
        return values

    def time_of(self, ahead: float) -> float:
        """When the `ahead`-th next request arrives (1: the next one); inf: never, or not known yet."""
        if ahead == 1 or (self.closed and ahead < inf):
            return self.next_time
        index = self.sent + ahead - 1
        return self.times[int(index)] if index < self.total else inf

    def take(self, ledger: Ledger) -> Entry:
        id = self.sent
        self.sent += 1
        self.outstanding += 1
        self._look_ahead()
        return self._handle(ledger, id, self._now if self.closed else self.times[id], next(self.known))

    def _handle(self, ledger: Ledger, id: int, arrival: float, known: tuple[Any, ...]) -> Entry:
        entry = entry_of(ledger, id, arrival, known)
        if self.cached:
            entry.cached = entry.hit = entry.loose = self.cached[id]
            entry.todo -= entry.hit
        return entry

    def returned(self, id: int, now: float) -> None:
        self.outstanding -= 1
        self._now = now
        if self.closed:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """`next_time`: in a closed loop the next one comes at once, or when one has left."""
        if self.sent == self.total:
            self.next_time = inf
        elif not self.closed:
            self.next_time = self.times[self.sent]
        else:
            self.next_time = -inf if self.outstanding < self._clients[self.sent] else inf


class ArrivalsBeside(Arrivals):
    """The clients of a class and tenant send while a request with a time is still to come, each when its last
    one returns. Which row comes when depends on the policy, so requests are numbered as they are sent.
    """

    def __init__(self, workload: Workload, hits: bool = False) -> None:
        super().__init__(workload, hits)
        self.closed = True  # only the next arrival is known
        self._rows_known: list[tuple[Any, ...]] = list(self.known)
        senders = zip(workload.kind.tolist(), workload.tenant.tolist(), strict=True)
        self._senders: list[tuple[int, int]] = list(senders)
        self._timed = [row for row, clients in enumerate(self._clients) if not clients]
        self._came = 0  # of these
        # of each class and tenant in a closed loop, the next one last
        self._next_rows: dict[tuple[int, int], list[int]] = {}
        for row in range(self.total - 1, -1, -1):
            if self._clients[row]:
                self._next_rows.setdefault(self._senders[row], []).append(row)
        self._out = dict.fromkeys(self._next_rows, 0)  # requests of each that have not returned
        self._by_number: list[tuple[list[Any], list[Any]]] = []
        self.cached = self.numbered(self.cached)
        self._sender: tuple[int, int] | None = None  # whose client sends next; None: the next time is sooner
        self._look_ahead()

    @property
    def pending(self) -> bool:
        return self._came < len(self._timed)

    def numbered(self, values: Any) -> Any:
        if not values:
            return values
        ordered = list(values)
        self._by_number.append((ordered, list(values)))
        return ordered

    def take(self, ledger: Ledger) -> Entry:
        if self._sender is None:
            row = self._timed[self._came]
            self._came += 1
            self._now = max(self._now, self.times[row])
            arrival = self.times[row]
        else:
            row = self._next_rows[self._sender].pop()
            self._out[self._sender] += 1
            arrival = self._now
        id = self.sent
        self.rows.append(row)
        for ordered, by_row in self._by_number:
            ordered[id] = by_row[row]
        self.sent += 1
        self.outstanding += 1
        self._look_ahead()
        return self._handle(ledger, id, arrival, self._rows_known[row])

    def returned(self, id: int, now: float) -> None:
        self.outstanding -= 1
        self._now = max(self._now, now)
        row = self.rows[id]
        if self._clients[row]:
            self._out[self._senders[row]] -= 1
            self._look_ahead()

    def _look_ahead(self) -> None:
        """At one moment the request with a time comes first."""
        timed = self.times[self._timed[self._came]] if self.pending else inf
        self._sender, self.next_time = None, timed
        if self._now < timed < inf:
            for sender, rows in self._next_rows.items():
                if rows and self._out[sender] < self._clients[rows[-1]]:
                    self._sender, self.next_time = sender, self._now
                    return


def arrivals_of(workload: Workload, hits: bool = False) -> Arrivals:
    return ArrivalsBeside(workload, hits) if workload.beside else Arrivals(workload, hits)
