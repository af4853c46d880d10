"""The gate: any `RoutePolicy` before real engines, without a word of HTTP. Read `Gate` first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from headgate.core.errors import InputError, RunError
from headgate.core.fleet import Move, Stage
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.core.roster import Roster
from headgate.live.route.config import ClassLimits
from headgate.live.route.gate.guard import GuardedRouter
from headgate.live.route.gate.queue import NO_SLO, Content, EngineState, Lapsed, Refused, Ticket, TicketState

__all__ = ["ClassLimits", "EngineState", "Gate", "Lapsed", "Refused", "Ticket", "TicketState"]

OF_LEASE = 0.6  # of the time for which KV is kept, a request may wait for its decode place
SERVED = (End.STOPPED, End.LIMIT)
SHUT = 5  # seconds of Retry-After when the router ends
ON_ENGINE = (TicketState.PREFILLING, TicketState.DECODING)


class Gate(GuardedRouter):
    """Requests wait here until the router finds them an engine. One per process; used from one event loop.

    A request's handler calls `arrive`, awaits `place`, reports `first_token` or `parted` (and then awaits
    `place` again), `back` where a leg failed before the client saw a byte, and `end` exactly once, when its
    upstream connection is closed. Only `place` waits; everything else returns at once. Events of one turn of
    the loop are booked first and routed together, arrivals are routed at once, as in the simulator.

    A router that raises, answers nonsense or moves nothing for `watchdog` seconds although a request waits
    and an engine has a place is disabled, once and loudly: `fallen` says why, and least-loaded goes on.
    """

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
        self._deadlines.set(ticket, now + OF_LEASE * lease)
        self._arm(now)
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

    def set_engine(
        self,
        id: int,
        *,
        up: bool | None = None,
        slots: int | None = None,
        prompts: int | None = None,
        role: str | None = None,
        taken: int | None = None,
        most: int | None = None,
        group: str | None = None,
    ) -> None:
        """What is given changes. Down or drained is `up=False`: requests on it stay counted until `end`."""
        if id not in self.desk.engines:
            raise InputError(f"there is no engine {id}; add it first")
        state = self.desk.engines[id]
        asked = {"up": up, "slots": slots, "prompts": prompts, "role": role, "taken": taken, "most": most,
                 "group": group}  # fmt: skip
        before = {name: getattr(state, name) for name in asked}
        for name, value in asked.items():
            if value is not None:
                setattr(state, name, value)
        try:
            state.checked()
        except InputError:
            for name, value in before.items():
                setattr(state, name, value)
            raise
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
        self.set_limits(limits)

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
