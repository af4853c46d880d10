"""One engine of a fleet: what was sent to it, and when it must be looked at next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from headgate.core.errors import RunError
from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.watchdog import Watchdog
from headgate.sim.fleet.fleet_replica import AT_ONCE, FleetReplica
from headgate.sim.fleet.handover import Handover

IDLE: Final = 0
WAITS: Final = 1
PENDING: Final = 2
RUNNING: Final = 3
READY: Final = 4
MOST_WAITS: Final = 100_000  # plans in a row that run nothing, each for a little time: it will never stop
Timer = tuple[float, int, bool]  # when whose patience ends, and whether by hanging up


class HandsOver(Protocol):
    """Who carries KV from one engine to another."""

    def copy(self, handover: Handover, now: float) -> bool:
        """Begin to copy; False: it is there already."""

    def joined(self, handover: Handover) -> None:
        """It decodes at its receiver now."""


class FleetEngine:
    """Works as the simulator of one engine does, but only when it is due or something reaches it.

    Whatever is sent to it waits at the door until the step under way has ended: nothing changes inside an
    engine during a step. A span of decode steps is put off until its last step is nearly done, so a request
    that comes earlier ends it where it would have ended in a simulator of one engine. So does a router that
    looks inside: it sees every token of the steps that have begun.
    """

    __slots__ = (
        "_catch_up",
        "_idle_since",
        "_porter",
        "_waits",
        "_watchdog",
        "bound",
        "due",
        "freed",
        "id",
        "landed",
        "news",
        "owed",
        "replica",
        "sent",
        "state",
        "stripped",
        "timers",
        "unneeded",
    )

    def __init__(
        self,
        id: int,
        replica: FleetReplica,
        watchdog: float,
        porter: HandsOver,
        catch_up: Callable[[FleetEngine], None],
    ) -> None:
        self.id, self.replica, self._catch_up = id, replica, catch_up
        self.state = IDLE
        self.due = inf  # when it must be looked at although nothing reaches it
        self.sent: deque[Entry] = deque()  # to its queue
        self.timers: list[Timer] = []  # of requests that were here when they went off
        self.bound: deque[Handover] = deque()  # to decode here; no KV is reserved yet
        self.landed: deque[Handover] = deque()  # their KV is here; they want a seat
        self.stripped: list[Handover] = []  # to decode here, but without KV
        self.freed: list[Handover] = []  # their prompt was here; the KV kept for them may go
        self.unneeded: list[Handover] = []  # KV was reserved for them, and they will not come
        self.owed = 0.0  # seconds it will be busy with sending before its next step
        self.news = False  # about KV that comes or goes
        self._porter = porter
        self._watchdog = Watchdog(watchdog)
        self._idle_since, self._waits = -inf, 0

    # -- called by the fleet ----------------------------------------------------------------------------

    def reached(self, now: float) -> bool:
        """Something has just been put at the door; True if it can begin at once."""
        if self.state == PENDING:
            if self._cares():
                self.run_until(now)
            return False
        if self.state == RUNNING or self.state == READY:
            return False
        self.replica.lease.ended = True
        self.state, self.due = READY, inf
        return True

    def finish_span(self) -> float:
        """Nobody has shortened the span that was put off: it runs, and ends at this time."""
        self.run_until(inf)
        return self.due

    def run_until(self, wake: float) -> None:
        """The span that was put off runs, up to about `wake`."""
        self.replica.run_span(wake)
        self.state, self.due = RUNNING, self.replica.now

    def wake(self) -> None:
        """It is due: a step has ended, or the time has come until which the policy waited."""
        if self.state == WAITS:
            self.replica.lease.ended = True
        self.state, self.due = READY, inf

    def settle(self) -> None:
        """The step has ended: those go whose last token came."""
        replica = self.replica
        if self.sent and self.sent[0].queued <= replica.last_start:
            self._receive(replica.last_start)  # they came before the step that lets others go
        replica.settle()

    def begin(self, now: float) -> None:
        """Take in what is at the door and start what comes next."""
        replica = self.replica
        replica.now = max(replica.now, now) + self.owed
        self.owed = 0.0
        if self.sent or self.timers:
            self._receive(replica.now)
        if self.news:
            self._let_in()
        lease = replica.lease
        while True:
            if lease.ended:
                if not replica.occupied:
                    self.state, self.due = IDLE, inf
                    return
                self._ask()
            if self._start():
                break
            lease.ended = True
            if replica.asked_now and not self._joined_late():
                self._wait()
                break
        if replica.now >= self._watchdog.next_look:
            self._look()

    # -- read by routers -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self.replica.ledger.waiting)

    @property
    def kv_free(self) -> int:
        self.catch_up()
        return self.replica.blocks.free * self.replica.blocks.size

    def cached(self, request: Request) -> int:
        self.catch_up()
        return self.replica.cached(request)

    def catch_up(self) -> None:
        if self.state == PENDING:
            self._catch_up(self)

    # -- time --------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """A step with prompts at once, or a span of decodes some time; False: nothing can run."""
        replica = self.replica
        if replica.start_prompts():
            self.state, self.due = RUNNING, replica.now
            return True
        due = replica.span_due()
        if due is None:
            return False
        if due == AT_ONCE:
            if not replica.run_now():
                return False
            self.state, self.due = RUNNING, replica.now
            return True
        self.state, self.due = PENDING, due
        return True

    def _cares(self) -> bool:
        """Does what is at the door end the lease?"""
        if self.timers or self.news:
            return True
        return len(self.sent) >= self.replica.lease.arrivals

    def _wait(self) -> None:
        """The policy runs nothing now: until its time comes, or something reaches it."""
        replica = self.replica
        if replica.last_start != self._idle_since:
            self._idle_since, self._waits = replica.last_start, 0
        self._waits += 1
        if self._waits > MOST_WAITS:
            raise RunError(f"{self.one_line()} runs nothing again and again; {replica.plan}")
        self.state, self.due = WAITS, replica.plan.until.time

    def _look(self) -> None:
        starving = self._watchdog.look(self.replica.ledger, self.replica.now)
        if starving:
            raise RunError(f"{self.one_line()}: {starving}")

    @property
    def lacks_memory(self) -> bool:
        """Does somebody wait for KV here?"""
        blocks, head = self.replica.blocks, next(iter(self.replica.ledger.waiting.values()), None)
        return bool(self.bound) or (head is not None and blocks.of(head.todo + head.hit) > blocks.free)

    def one_line(self) -> str:
        """Who and in which state, for error messages."""
        replica = self.replica
        name = type(replica.policy).__name__
        return f"policy {name} on engine {self.id} at {replica.now:.6f} s: {replica.state()}"

    # -- the door -----------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        """Everybody who has come by now joins the queue; whoever has lost patience by now leaves."""
        sent, timers = self.sent, self.timers
        while sent and sent[0].queued <= now:
            self.replica.receive(sent.popleft())
        while timers and timers[0][0] <= now:
            self._give_up(*timers.pop(0))

    def _give_up(self, when: float, id: int, hangs_up: bool) -> None:
        """Its patience has ended: it leaves the queue if it never had a seat; an abort ends it anywhere."""
        replica = self.replica
        entry = replica.ledger.find(id)
        if entry is None:
            return
        if id in replica.ledger.waiting and entry.evictions == 0 and not entry.generated:
            replica.leave(entry, when, End.ABORTED if hangs_up else End.ABANDONED)
        elif hangs_up:
            replica.leave(entry, replica.now, End.ABORTED)

    def _ask(self) -> None:
        """A new plan; for one step alone while somebody waits at the door."""
        self.replica.ask()
        if self.news:
            self.replica.lease.steps = 1.0

    def _let_in(self) -> None:
        """KV moves by what the policy wants now, not by what it wanted when its lease began.

        Seats and memory are kept for the prompts of the plan, and a plan of a moment ago may name prompts
        that the policy has given up since. While somebody still waits at the door the policy is therefore
        asked at every step: the same as without leases. Only a plan that still holds, where nobody has a
        prompt to run, keeps nothing for anybody and need not be asked for again.
        """
        replica, ledger = self.replica, self.replica.ledger
        stale = replica.lease.ended or bool(ledger.waiting) or bool(ledger.prefilling)
        if stale and (self.bound or self.landed) and replica.occupied:
            replica.ask()
        self._exchange()
        if self.news:
            replica.lease.ended = True

    def _exchange(self) -> None:
        """KV that goes, KV that is awaited, and those whose KV is here."""
        if self.freed:
            for handover in self.freed:
                self.replica.release(handover.entry.id)
            self.freed.clear()
        if self.unneeded or self.stripped:
            self._clear_up()
        while self.bound and (self.bound[0].dropped or self._expect(self.bound[0])):
            self.bound.popleft()
        while self.landed and (self.landed[0].dropped or self._join(self.landed[0])):
            self.landed.popleft()
        self.news = bool(self.bound or self.landed)

    def _joined_late(self) -> bool:
        """Nothing can run. Has an eviction left a seat to somebody whose KV is here?"""
        before = len(self.landed)
        if before:
            self._exchange()
        return len(self.landed) < before

    def _clear_up(self) -> None:
        """KV was reserved in vain, or could not come."""
        for handover in self.unneeded:
            self.replica.give_up_reserved(handover)
        for handover in self.stripped:
            if not handover.dropped:
                self._porter.joined(handover)
                self.replica.take_back(handover.entry)
        self.unneeded.clear()
        self.stripped.clear()

    def _expect(self, handover: Handover) -> bool:
        """Its KV comes here, or was here all the time; False: there is no room for it."""
        if handover.sender is self:
            self.replica.unpark(handover)
        elif not self.replica.reserve(handover):
            return False
        elif self._porter.copy(handover, self.replica.now):
            return True
        self.landed.append(handover)
        return True

    def _join(self, handover: Handover) -> bool:
        if not self.replica.join(handover.entry):
            return False
        self._porter.joined(handover)
        return True
