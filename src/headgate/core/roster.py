"""The one implementation of Fleet: waiting requests and their engines, kept by O(1) transitions.

Drivers feed it transitions and it refuses those that cannot be: a seat taken twice, a request that is not
there. Engines with room stand in lists from which a router can draw by position, so neither a transition nor
a draw depends on how many engines there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from headgate.core.errors import RunError
from headgate.core.fleet import ENDLESS, ROLES, Move, Room, Stage
from headgate.core.request import Request


class Inside(Protocol):
    """What an engine knows of itself, where the driver models it."""

    @property
    def waiting(self) -> int:
        """Requests in its queue."""

    @property
    def kv_free(self) -> int:
        """Tokens."""


class Nothing:
    """An engine without a queue and with endless memory."""

    waiting = 0
    kv_free = ENDLESS


class Seat:
    """One engine on the roster; routers see it as a read-only `Replica`."""

    __slots__ = (
        "_roster",
        "decodes",
        "decoding",
        "id",
        "idle",
        "inside",
        "prefilling",
        "prompts",
        "role",
        "room",
        "seats",
    )

    def __init__(self, roster: Roster, id: int, role: str, room: Room, kinds: Sequence[str]) -> None:
        self._roster = roster
        self.id = id
        self.role = role
        self.room = room
        self.prefilling = dict.fromkeys(kinds, 0)
        self.decoding = dict.fromkeys(kinds, 0)
        self.prompts = 0  # in service
        self.decodes = 0
        self.inside: Inside = Nothing()
        self.seats = 0  # decodes it may still take, as the roster has counted
        self.idle = False  # whether a prompt may start

    @property
    def load(self) -> int:
        """Both together."""
        return self.prompts + self.decodes

    @property
    def waiting(self) -> int:
        """As the engine says."""
        return self.inside.waiting

    @property
    def kv_free(self) -> int:
        """As the engine says."""
        return self.inside.kv_free

    @property
    def seen(self) -> float:
        """The roster is always up to date."""
        return self._roster.now

    def __repr__(self) -> str:
        return f"Replica({self.id}, {self.role}, prompts={self.prompts}, decodes={self.decodes})"


class Pool:
    """Engines in a list without holes: joined, left and drawn from in O(1)."""

    __slots__ = ("_place", "members")

    def __init__(self) -> None:
        self.members: list[int] = []
        self._place: dict[int, int] = {}

    def put(self, id: int, inside: bool) -> None:
        """In or out, whatever it was before."""
        place = self._place.get(id)
        if inside == (place is not None):
            return
        if place is None:
            self._place[id] = len(self.members)
            self.members.append(id)
            return
        del self._place[id]
        last = self.members.pop()
        if last != id:
            self.members[place] = last
            self._place[last] = place


class Roster:
    """Live state of a fleet, as routers read it."""

    __slots__ = (
        "_idle",
        "_open",
        "free_seats",
        "handoff",
        "idle",
        "now",
        "open",
        "prefilling",
        "queues",
        "replicas",
        "waiting",
    )

    def __init__(self, roles: Sequence[str], rooms: Callable[[str], Room], kinds: Sequence[str]) -> None:
        self.now = 0.0
        self.queues: dict[str, OrderedDict[int, Request]] = {kind: OrderedDict() for kind in kinds}
        self.handoff: OrderedDict[int, Request] = OrderedDict()
        self.prefilling = dict.fromkeys(kinds, 0)
        self.replicas = [Seat(self, id, role, rooms(role), kinds) for id, role in enumerate(roles)]
        known = dict.fromkeys((*ROLES, *roles))
        self._idle = {role: Pool() for role in known}
        self._open = {role: Pool() for role in known}
        self.waiting: dict[int, Request] = {}  # all requests in `queues`
        self.idle = {role: pool.members for role, pool in self._idle.items()}
        self.open = {role: pool.members for role, pool in self._open.items()}
        self.free_seats = 0
        for seat in self.replicas:
            self._count(seat)

    def arrive(self, request: Request) -> None:
        """It waits for its prompt."""
        self.waiting[request.id] = request
        self.queues[request.kind][request.id] = request

    def leave(self, request: Request) -> None:
        """A request that waits, before its prompt or before its decode, leaves."""
        if self.waiting.pop(request.id, None) is None:
            del self.handoff[request.id]
        else:
            del self.queues[request.kind][request.id]

    def waiting_one(self, id: int) -> Request:
        """A request that waits for its prompt, by number."""
        found = self.waiting.get(id)
        if found is None:
            raise RunError(f"request {id} does not wait for its prompt and cannot be turned away")
        return found

    def find(self, move: Move) -> tuple[Request, Seat]:
        """The request that is moved and its engine, if the move is allowed."""
        if not 0 <= move.replica < len(self.replicas):
            raise RunError(f"{move}: there are {len(self.replicas)} engines")
        seat = self.replicas[move.replica]
        if move.stage is Stage.DECODE:
            found = self.handoff.get(move.request)
            if seat.seats < 1:
                raise RunError(f"{move}: no decode seat there")
        else:
            found = self.waiting.get(move.request)
            if seat.prompts >= seat.room.prompts or seat.prompts + seat.decodes >= seat.room.total:
                raise RunError(f"{move}: no place for a prompt there")
        if found is None:
            raise RunError(f"{move}: request {move.request} does not wait for that")
        return found, seat

    def start_prompt(self, request: Request, seat: Seat) -> None:
        """Its prompt runs there."""
        kind = request.kind
        del self.waiting[request.id]
        del self.queues[kind][request.id]
        seat.prefilling[kind] += 1
        seat.prompts += 1
        self.prefilling[kind] += 1
        self._count(seat)

    def end_prompt(self, request: Request, seat: Seat, stays: bool) -> None:
        """It decodes in the same place, or waits for one."""
        kind = request.kind
        seat.prefilling[kind] -= 1
        seat.prompts -= 1
        self.prefilling[kind] -= 1
        if stays:
            seat.decoding[kind] += 1
            seat.decodes += 1
        else:
            self.handoff[request.id] = request
        self._count(seat)

    def drop_prompt(self, request: Request, seat: Seat) -> None:
        """It goes away from there before its prompt is done."""
        seat.prefilling[request.kind] -= 1
        seat.prompts -= 1
        self.prefilling[request.kind] -= 1
        self._count(seat)

    def start_decode(self, request: Request, seat: Seat) -> None:
        """Its output comes from there."""
        del self.handoff[request.id]
        seat.decoding[request.kind] += 1
        seat.decodes += 1
        self._count(seat)

    def finish(self, request: Request, seat: Seat) -> None:
        """Its last token came."""
        seat.decoding[request.kind] -= 1
        seat.decodes -= 1
        self._count(seat)

    def _count(self, seat: Seat) -> None:
        """Its room has changed: the pools and the number of free seats follow."""
        (prompts_room, decodes_room, total), prompts, decodes = seat.room, seat.prompts, seat.decodes
        left = total - prompts - decodes
        seats = decodes_room - decodes
        if seats > left:
            seats = left
        if seats < 0:
            seats = 0
        before = seat.seats
        if seats != before:
            seat.seats = seats
            self.free_seats += seats - before
            if not seats or not before:
                self._open[seat.role].put(seat.id, seats > 0)
        idle = left > 0 and prompts < prompts_room
        if idle is not seat.idle:
            seat.idle = idle
            self._idle[seat.role].put(seat.id, idle)
