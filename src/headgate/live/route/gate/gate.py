"""The gate: any `RoutePolicy` before real engines, without a word of HTTP. Read `Gate` first."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Protocol

from headgate.core.errors import InputError, RunError, one_line
from headgate.core.fleet import Move, RoutePolicy, Stage
from headgate.core.policy import End
from headgate.core.request import NO_SLO, Request, Slo
from headgate.core.roster import Roster
from headgate.live.route.config import ClassLimits, Waits
from headgate.live.route.gate.queue import (
    SOONEST,
    Content,
    Desk,
    EngineState,
    Lapsed,
    Refused,
    Ticket,
    TicketState,
)
from headgate.methods.balance.balance import LeastLoaded, full_for_background

__all__ = ["ClassLimits", "EngineState", "Gate", "Lapsed", "Refused", "Ticket", "TicketState"]

log = logging.getLogger("headgate.route")
OF_LEASE = 0.6  # of the time for which KV is kept, a request may wait for its decode place
SERVED = (End.STOPPED, End.LIMIT)
SHUT = 5  # seconds of Retry-After when the router ends
ON_ENGINE = (TicketState.PREFILLING, TicketState.DECODING)
PATIENT_DOG = 60.0  # seconds without any move although a request waits and an engine has a place
MOST_GAUGES = 512
COUNTS = ("arrived", "moved", "returned", "lapsed", "ended_twice", "disabled", "fallback_failed")


class Scheduler(Protocol):
    def call_soon(self, callback: Callable[[], object], /) -> Any: ...
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Any: ...


class Gate:
    """Requests wait here until the router finds them an engine. One per process; used from one event loop.

    A request's handler calls `arrive`, awaits `place`, reports `first_token` or `parted` (and then awaits
    `place` again), `back` where a leg failed before the client saw a byte, and `end` exactly once, when its
    upstream connection is closed. Only `place` waits; everything else returns at once. Events of one turn of
    the loop are booked first and routed together, arrivals are routed at once, as in the simulator.

    A router that raises, answers nonsense or moves nothing for `watchdog` seconds although a request waits
    and an engine has a place is disabled, once and loudly: `fallen` says why, and least-loaded goes on.
    """

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
    ) -> None:
        """`kinds` are the classes, the default one first; engines get the numbers 0, 1, 2, ..."""
        if not kinds:
            raise InputError("no class of requests; give at least the default")
        self._clock, self._origin, self._loop = clock, clock(), loop
        self.desk = Desk(router, kinds, self._sent, self._turn_away, self._set_wake)
        self.roster = self.desk.roster
        self.waits = Waits(draw)
        self.tickets: dict[int, Ticket] = {}  # all that have not ended
        self.fallen: str | None = None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.refused: Counter[str] = Counter()  # by reason
        self._patience = watchdog
        self._watchdog: Any = None  # a timer, while requests wait
        self._stuck_since = inf  # since when requests have waited and none was moved
        self._number = 0
        self._soon = False
        self.closed = False  # no request is let in or placed any more
        self.set_classes(kinds, limits or {})
        for state in engines:
            self.desk.add_engine(state.checked())
        self.engines_changed()

    # -- the life of a request

    def arrive(
        self,
        kind: str,
        prompt: int,
        limit: int,
        *,
        guess: int | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        whole: bool = False,
        most_wait: float = inf,
        content: Content | None = None,
        tenant: str = "",
        share: float | None = None,
    ) -> Ticket:
        """Raises Refused. `prompt` is an estimate; `share` is that of the queue which its tenant may have."""
        if self.closed:
            raise Refused(503, "draining", SHUT)
        now = self._look()
        kind = self.roster.kind(kind)
        ticket = Ticket(self._number, kind, now, prompt, limit, guess, priority, slo, whole, content, tenant)
        self._number += 1
        self.tickets[ticket.id] = ticket
        self.counts["arrived"] += 1
        self._tell(self.desk.arrived, ticket, now)
        self._routed(now)
        if ticket.state is TicketState.QUEUED:
            self._bound(ticket, now, most_wait, share)
        if isinstance(ticket.answer, Refused):
            raise ticket.answer
        return ticket

    async def place(self, ticket: Ticket) -> Move:
        """WHOLE or PREFILL, after `parted` DECODE; raises Refused or Lapsed. A cancelled wait needs `end`."""
        while ticket.answer is None and not ticket.lapsed:
            if ticket.state is TicketState.GONE:
                raise RunError(f"{ticket} has ended and waits for nothing")
            ticket.waiter = asyncio.get_running_loop().create_future()
            try:
                await ticket.waiter
            finally:
                ticket.waiter = None
        if ticket.lapsed:
            ticket.lapsed = False
            raise Lapsed(f"{ticket}: its KV would not be there any more")
        answer, ticket.answer = ticket.answer, None
        if isinstance(answer, Refused):
            raise answer
        assert answer is not None
        return answer

    def first_token(self, ticket: Ticket) -> None:
        """It decodes where it is, also one that came back without KV parameters. May be told again."""
        if ticket.state is not TicketState.PREFILLING:
            return
        now, apart = self._look(), self.roster.places[ticket.id].stage is Stage.PREFILL
        ticket.state = TicketState.DECODING
        if apart:  # the router expects it in `handoff`, and must not hear that its prompt is done
            self.roster.end_prompt(ticket, self.roster.replicas[ticket.engine], True)
        else:
            self._tell(self.desk.prompt_done, ticket, ticket.engine, now)
        self._settle_soon()

    def parted(self, ticket: Ticket, lease: float = inf) -> None:
        """Its prompt's engine keeps its KV for `lease` seconds. At 60 % of them `place` raises Lapsed."""
        if ticket.state is not TicketState.PREFILLING:
            raise RunError(f"{ticket} has no prompt under way that could be done")
        now = self._look()
        if self.closed:
            raise Refused(503, "draining", SHUT)
        ticket.state = TicketState.HANDED_OVER
        ticket.tell(None)
        self._tell(self.desk.prompt_done, ticket, ticket.engine, now, False)
        self._limit_wait(ticket, OF_LEASE * lease)
        self._settle_soon()

    def back(self, ticket: Ticket, whole: bool | None = None) -> None:
        """To the head of its queue, another engine preferred; `whole` changes whether it may be split."""
        if self.closed:
            raise Refused(503, "draining", SHUT)
        if ticket.state is TicketState.QUEUED or ticket.state is TicketState.GONE:
            raise RunError(f"{ticket} is on no engine and cannot come back from one")
        ticket.tries += 1
        ticket.avoid |= {ticket.engine}
        self._take_back(ticket, self._look(), ticket.whole if whole is None else whole)
        self._settle_soon()

    def end(self, ticket: Ticket, how: End, tokens: int = 0) -> None:
        """STOPPED and LIMIT: served; ABORTED: client or stream was gone. A second call is only counted."""
        self.counts["ended_twice"] += ticket.ended
        ticket.ended = True
        if ticket.state is TicketState.GONE:
            return
        now, state = self._look(), ticket.state
        ticket.state, ticket.generated = TicketState.GONE, max(tokens, ticket.generated)
        ticket.tell(None)
        del self.tickets[ticket.id]
        if state in ON_ENGINE:
            self._tell(self.desk.ended, ticket, ticket.engine, now, how)
        else:
            self._tell(self.desk.left, ticket, now, End.ABORTED if how in SERVED else how)
        self._settle_soon()

    def shut(self) -> None:
        self.closed = True
        now = self._look()
        for ticket in [*self.tickets.values()]:
            if ticket.state is TicketState.QUEUED or ticket.state is TicketState.HANDED_OVER:
                self._refuse(ticket, now, "draining")

    # -- engines, classes and routers

    def add_engine(self, state: EngineState) -> int:
        id = self.desk.add_engine(state.checked())
        self.engines_changed()
        return id

    def set_engine(self, id: int, **changes: Any) -> None:
        """Of its state changes what is not None. Down or drained is `up=False`: requests on it stay counted
        until `end`.
        """
        if id not in self.desk.engines:
            raise InputError(f"there is no engine {id}; add it first")
        given = {name: value for name, value in changes.items() if value is not None}
        self.desk.engines[id] = replace(self.desk.engines[id], **given).checked()
        self.engines_changed()

    def set_rooms(self, rooms: Mapping[int, tuple[int, int]]) -> None:
        before = {id: (state.most, state.prompts) for id, state in self.desk.engines.items()}
        changed = {id: room for id, room in rooms.items() if before.get(id, room) != room}
        for id, (most, prompts) in changed.items():
            self.desk.engines[id].most, self.desk.engines[id].prompts = most, prompts
        if changed:
            self.engines_changed()

    def retire(self, id: int) -> None:
        self.desk.retire(id)
        self.engines_changed()

    def set_classes(self, kinds: Sequence[str], limits: Mapping[str, ClassLimits]) -> None:
        for kind in kinds:
            self.roster.add_kind(kind)
        self._limits = {kind: limits.get(kind, ClassLimits()) for kind in self.roster.queues}
        longest = max((each.ttl for each in limits.values() if each.ttl < inf), default=0.0)
        self.watchdog = max(self._patience, longest + 1.0)

    # -- the router under guard

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
        waits = self.roster.waiting or self.roster.handoff
        self._stuck_since = min(self._stuck_since, now) if waits else inf
        if waits and self._watchdog is None and self.watchdog < inf:
            self._watchdog = self.loop().call_later(self.watchdog, self._look_for_stuck)

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
        self._stuck_since = now
        ticket.tell(move)

    def _turn_away(self, request: Request, now: float) -> None:
        self._refuse(self.tickets[request.id], now, "router")

    def _set_wake(self, when: float) -> None:
        self.loop().call_later(max(0.0, when - self.roster.now) + SOONEST, self.wake)

    def _bound(self, ticket: Ticket, now: float, most_wait: float, share: float | None) -> None:
        limits, ahead = self._limits[ticket.kind], len(self.roster.queues[ticket.kind]) - 1
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
            self._limit_wait(ticket, limits.ttl)

    def _makes_room(self, ticket: Ticket, now: float) -> bool:
        """In a full queue the tenant with the most requests there gives up its newest, for one with fewer."""
        if (newest := self.desk.newest_of_most(ticket)) is None:
            return False
        self._refuse(newest, now, "queue full")
        return True

    def _limit_wait(self, ticket: Ticket, seconds: float) -> None:
        if seconds < inf:  # by its number: a timer that knows its ticket would be a cycle
            ticket.timer = self.loop().call_later(seconds + SOONEST, partial(self._waited, ticket.id))

    def _waited(self, id: int) -> None:
        ticket, now = self.tickets[id], self._look()
        if ticket.state is TicketState.QUEUED:
            self._refuse(ticket, now, "queue time", End.ABANDONED)  # routers learn patience from it
        elif ticket.state is TicketState.HANDED_OVER:
            self.counts["lapsed"] += 1
            ticket.lapsed = True
            self._take_back(ticket, now, whole=True)
        self._settle_soon()

    def _take_back(self, ticket: Ticket, now: float, whole: bool) -> None:
        ticket.state, ticket.whole, ticket.queued = TicketState.QUEUED, whole, now
        ticket.tell(None)
        self.counts["returned"] += 1
        self._tell(self.desk.returned, ticket, now)
        self._limit_wait(ticket, self._limits[ticket.kind].ttl)

    def _refuse(
        self, ticket: Ticket, now: float, reason: str, how: End = End.REFUSED, tell_router: bool = True
    ) -> None:
        up = any(state.up for state in self.desk.engines.values()) and not self.closed
        reason = reason if up or self.closed else "no engines"
        ahead = len(self.roster.queues[ticket.kind])
        self.refused[reason] += 1
        ticket.state = TicketState.GONE
        del self.tickets[ticket.id]
        if tell_router:
            self._tell(self.desk.left, ticket, now, how)
        else:
            self.desk.dropped(ticket)
        ticket.tell(Refused(429 if up else 503, reason, self.waits.retry_after(ticket.kind, ahead, now)))

    def _look_for_stuck(self) -> None:
        self._watchdog, now = None, self._look()
        if now - self._stuck_since >= self.watchdog:
            if self.fallen is None and self._has_place():
                seconds = self.watchdog
                self._fall(f"moved nobody for {seconds:g} s although requests wait and an engine has a place")
            self._stuck_since = now
        if self._stuck_since < inf:
            wait = max(0.0, self._stuck_since + self.watchdog - now) + SOONEST
            self._watchdog = self.loop().call_later(wait, self._look_for_stuck)

    def _has_place(self) -> bool:
        roster = self.roster
        last = all(each.slo.background for each in roster.waiting.values())  # the room above is for others
        idle = [roster.replicas[id] for pool in roster.idle.values() for id in pool]
        prompts = bool(roster.waiting) and any(not last or not full_for_background(each) for each in idle)
        return prompts or (bool(roster.handoff) and any(roster.open.values()))

    # -- books

    def books(self) -> dict[str, Any]:
        roster, desk = self.roster, self.desk
        return {
            "router": type(self.router).__name__,
            "fallen": self.fallen,
            "queued": {kind: len(queue) for kind, queue in roster.queues.items()},
            "handed_over": len(roster.handoff),
            "engines": {
                id: {
                    "role": roster.replicas[id].role,
                    "up": state.up,
                    "room": list(roster.replicas[id].room),
                    "prompts": roster.replicas[id].prompts,
                    "decodes": roster.replicas[id].decodes,
                }
                for id, state in desk.engines.items()
            },
            "retiring": {id: roster.replicas[id].load for id in roster.retired if roster.replicas[id].load},
            "counts": dict(self.counts),
            "refused": dict(self.refused),
            "gauges": self.gauges() if self.fallen is None else {},
        }

    def check(self) -> list[str]:
        roster, faults = self.roster, []
        for ticket in self.tickets.values():
            queued = ticket.id in roster.waiting and ticket.id in roster.queues[ticket.kind]
            stay = roster.places.get(ticket.id)
            between = ticket.id in roster.handoff
            is_there = {
                TicketState.QUEUED: queued and stay is None and not between,
                TicketState.PREFILLING: bool(stay and not stay.decoding and not between and not queued),
                TicketState.HANDED_OVER: bool(stay and not stay.decoding and between and not queued),
                TicketState.DECODING: bool(stay and stay.decoding and not between and not queued),
            }
            if not is_there.get(ticket.state, False):
                faults.append(
                    f"{ticket} is not where it says: queued={queued}, place={stay}, between={between}"
                )
            elif stay is not None and stay.replica != ticket.engine:
                faults.append(f"{ticket} is on engine {stay.replica}")
        inside = len(roster.waiting) + len(roster.places)
        if inside != len(self.tickets):
            faults.append(f"{inside} requests in the roster, {len(self.tickets)} in the gate")
        return faults + _engine_faults(self.roster)


def _engine_faults(roster: Roster) -> list[str]:
    faults = []
    prompts: Counter[tuple[int, str]] = Counter()
    decodes: Counter[tuple[int, str]] = Counter()
    for id, stay in roster.places.items():
        if id not in roster.handoff:
            (decodes if stay.decoding else prompts)[stay.replica, stay.request.kind] += 1
    for member in roster.replicas:
        booked = ("prompts", prompts, member.prefilling), ("decodes", decodes, member.decoding)
        for name, counted, by_kind in booked:
            if wrong := {kind: n for kind, n in by_kind.items() if n != counted[member.id, kind]}:
                faults.append(f"engine {member.id}: {name} {wrong} are not there")
        held = sum(member.prefilling.values()), sum(member.decoding.values())
        if (member.prompts, member.decodes) != held:
            faults.append(f"{member} does not add up")
    for kind, number in roster.prefilling.items():
        if number != sum(member.prefilling[kind] for member in roster.replicas):
            faults.append(f"class {kind!r}: {number} prompts in the fleet do not add up")
    if roster.free_slots != sum(member.slots for member in roster.replicas):
        faults.append(f"{roster.free_slots} free slots do not add up")
    return faults
