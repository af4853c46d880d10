"""A router under guard: it is told and asked, and least-loaded takes over when it fails."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any, Protocol

from headgate.core.errors import InputError, one_line
from headgate.core.fleet import Move, RoutePolicy, Stage
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.live.route.config import ClassLimits, Waits
from headgate.live.route.gate.queue import SOONEST, Deadlines, Desk, EngineState, Refused, Ticket, TicketState
from headgate.methods.balance.balance import LeastLoaded

log = logging.getLogger("headgate.route")
PATIENT_DOG = 60.0  # seconds without any move although a request waits and an engine has a place
MOST_GAUGES = 512
COUNTS = ("arrived", "moved", "returned", "lapsed", "ended_twice", "disabled", "fallback_failed")


class Scheduler(Protocol):
    def call_soon(self, callback: Callable[[], object], /) -> Any: ...
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any: ...


class GuardedRouter:
    """Books first: the roster is right before a router decides, so another can always adopt the fleet."""

    def __init__(
        self,
        router: RoutePolicy,
        kinds: Sequence[str],
        engines: Sequence[EngineState] = (),
        *,
        limits: Mapping[str, ClassLimits] | None = None,
        watchdog: float = PATIENT_DOG,
        clock: Callable[[], float] = time.monotonic,
        loop: Scheduler | None = None,
        draw: Callable[[], float] = random.random,
        on_fall: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`kinds` are the classes, the default one first; engines get the numbers 0, 1, 2, ..."""
        if not kinds:
            raise InputError("no class of requests; give at least the default")
        self._clock, self._origin, self._loop = clock, clock(), loop
        self.desk = Desk(router, kinds, self._sent, self._turn_away, self._set_wake)
        self.roster = self.desk.roster
        self.waits = Waits(limits or {}, draw)
        self.tickets: dict[int, Ticket] = {}  # all that have not ended
        self.fallen: str | None = None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.refused: dict[str, int] = {}  # by reason
        self._deadlines, self._watchdog = Deadlines(watchdog, self.tickets), watchdog
        self.set_limits(limits or {})
        self._timer: Any = None
        self._timer_at = 0.0
        self._on_fall = on_fall
        self._number = 0
        self._soon = False
        self.closed = False  # no request is let in or placed any more
        for state in engines:
            self.desk.add_engine(state.checked())
        self.engines_changed()

    def set_limits(self, limits: Mapping[str, ClassLimits]) -> None:
        self.waits.set_limits(limits)
        longest = max((each.ttl for each in limits.values() if each.ttl < inf), default=0.0)
        self._deadlines.watchdog = max(self._watchdog, longest + 1.0)

    @property
    def router(self) -> RoutePolicy:
        return self.desk.router

    def loop(self) -> Scheduler:
        return self._loop or asyncio.get_running_loop()

    def settle(self) -> None:
        self._soon = False
        if self.desk.pending:
            now = self._look()
            self._tell(self.desk.route, now)
            self._routed(now)

    def swap(self, router: RoutePolicy) -> None:
        self.fallen = None
        self._look()
        self._tell(self._serve, router)
        self._settle_soon()

    def engines_changed(self) -> None:
        self._look()
        self._tell(self.desk.arrange)
        self._tell(self.desk.engines_changed)
        if self.tickets:
            self._settle_soon()

    def wake(self) -> None:
        if self.desk.woken(self._look()):
            self.settle()
        elif self.desk.wakes_at <= self.roster.now + SOONEST:  # the loop's clock is not quite ours
            self._set_wake(self.desk.wakes_at)

    @property
    def seconds(self) -> float:
        return self._clock() - self._origin

    def _look(self) -> float:
        now, roster = self.seconds, self.roster
        if now < roster.now:
            return roster.now
        roster.now = now
        return now

    def _settle_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self.loop().call_soon(self.settle)

    def _tell(self, what: Callable[..., object], *about: Any) -> None:
        try:
            what(*about)
        except Exception as error:
            self._fall(one_line(error))

    def _routed(self, now: float) -> None:
        if self.roster.handoff and not self.router.hands_over:
            self._tell(self.desk.place_left, now)
        self._deadlines.held(now, bool(self.roster.waiting or self.roster.handoff))
        self._arm(now)

    def gauges(self) -> dict[str, float]:
        try:
            shown = islice(self.router.gauges().items(), MOST_GAUGES)
            return {str(name)[:64]: float(value) for name, value in shown}
        except Exception as error:
            self._fall(one_line(error))
            return {}

    def _fall(self, reason: str) -> None:
        name = type(self.router).__name__
        if self.fallen is None:
            self.fallen = reason
            self.counts["disabled"] += 1
            log.error("router %s is disabled, least-loaded takes over: %s", name, reason)
            self._on_fall(reason)
        else:
            self.counts["fallback_failed"] += 1
            log.error("router %s failed as a fall-back: %s", name, reason)
        now = self.roster.now
        try:
            self._serve(LeastLoaded(max(1, len(self.roster.replicas))))
            self.desk.route(now)
        except Exception as error:  # ours is broken too: no request may wait for ever
            log.exception("least-loaded cannot take over: %s", one_line(error))
            for ticket in [*self.tickets.values()]:
                if ticket.state is TicketState.QUEUED:
                    self._refuse(ticket, now, "router", tell_router=False)

    def _serve(self, router: RoutePolicy) -> None:
        before = self.desk.router
        self.desk.serve(router)
        self.desk.arrange()
        router.adopt(self.roster, before)
        self.desk.pending = True

    def _sent(self, request: Request, move: Move) -> None:
        ticket, now = self.tickets[request.id], self.roster.now
        decode = move.stage is Stage.DECODE
        if not decode:
            self.waits.served(ticket.kind, now)
        ticket.state, ticket.engine = TicketState.DECODING if decode else TicketState.PREFILLING, move.replica
        self.counts["moved"] += 1
        self._deadlines.moved(now)
        ticket.tell(move)

    def _turn_away(self, request: Request, now: float) -> None:
        self._refuse(self.tickets[request.id], now, "router")

    def _set_wake(self, when: float) -> None:
        self.loop().call_later(max(0.0, when - self.roster.now) + SOONEST, self.wake)

    def _bound(self, ticket: Ticket, now: float, most_wait: float, share: float | None) -> None:
        limits, ahead = self.waits.limits(ticket.kind), len(self.roster.queues[ticket.kind]) - 1
        mine, tenants = self.desk.waiting_of(ticket)
        before = ahead if tenants < 2 else min(ahead, mine * tenants)  # tenants take turns
        share = limits.tenant if share is None else share
        if share < 1 and mine > max(1, int(share * limits.queue)):
            self._refuse(ticket, now, "tenant queue")
        elif ahead >= limits.queue and not self._makes_room(ticket, now):
            self._refuse(ticket, now, "queue full")
        elif most_wait <= 0 or self.waits.predicted(ticket.kind, before, now) > most_wait:
            self._refuse(ticket, now, "wait too long")
        else:
            self._queued(ticket, now)

    def _makes_room(self, ticket: Ticket, now: float) -> bool:
        """In a full queue the tenant with the most requests there gives up its newest, for one with fewer."""
        if (newest := self.desk.newest_of_most(ticket)) is None:
            return False
        self._refuse(newest, now, "queue full")
        return True

    def _queued(self, ticket: Ticket, now: float) -> None:
        self._deadlines.set(ticket, now + self.waits.limits(ticket.kind).ttl)
        self._arm(now)

    def _take_back(self, ticket: Ticket, now: float, whole: bool) -> None:
        ticket.state, ticket.whole, ticket.queued = TicketState.QUEUED, whole, now
        ticket.tell(None)
        self.counts["returned"] += 1
        self._tell(self.desk.returned, ticket, now)
        self._queued(ticket, now)

    def _refuse(
        self, ticket: Ticket, now: float, reason: str, how: End = End.REFUSED, tell_router: bool = True
    ) -> None:
        up = any(state.up for state in self.desk.engines.values()) and not self.closed
        reason = reason if up or self.closed else "no engines"
        ahead = len(self.roster.queues[ticket.kind])
        self.refused[reason] = self.refused.get(reason, 0) + 1
        ticket.state = TicketState.GONE
        del self.tickets[ticket.id]
        if tell_router:
            self._tell(self.desk.left, ticket, now, how)
        else:
            self.desk.dropped(ticket)
        ticket.tell(Refused(429 if up else 503, reason, self.waits.retry_after(ticket.kind, ahead, now)))

    def _arm(self, now: float) -> None:
        due = self._deadlines.next_look
        if self._timer is not None and self._timer_at <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < inf:
            self._timer_at = due
            self._timer = self.loop().call_later(max(0.0, due - now) + SOONEST, self.tick)

    def tick(self) -> None:
        self._timer = None
        now = self._look()
        for ticket in self._deadlines.due(now):
            if ticket.state is TicketState.QUEUED:
                self._refuse(ticket, now, "queue time", End.ABANDONED)  # routers learn patience from it
            elif ticket.state is TicketState.HANDED_OVER:
                self.counts["lapsed"] += 1
                ticket.lapsed = True
                self._take_back(ticket, now, whole=True)
        if self.fallen is None and self._deadlines.starving(now) and self._has_place():
            seconds = self._deadlines.watchdog
            self._fall(f"moved nobody for {seconds:g} s although requests wait and an engine has a place")
        self.settle()
        self._arm(now)

    def _has_place(self) -> bool:
        prompts = bool(self.roster.waiting) and any(self.roster.idle.values())
        return prompts or (bool(self.roster.handoff) and any(self.roster.open.values()))
