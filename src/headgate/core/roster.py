"""The one implementation of Fleet: waiting requests and their engines, kept by O(1) transitions.

Drivers feed it transitions and it refuses those that cannot be: a slot taken twice, a request that is not
there. Engines with room stand in lists from which a router can draw by position, so neither a transition nor
a draw depends on how many engines there are. Engines may come, go and change while requests are inside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from headgate.core.build import mypyc_attr
from headgate.core.errors import RunError
from headgate.core.fleet import CLOSED, ENDLESS, ROLES, Move, Room, Stage
from headgate.core.request import Request

__all__ = ["Member", "Roster"]

DECODE: Final = Stage.DECODE


class Roster:
    __slots__ = (
        "_idle", "_open", "free_slots", "handoff", "idle", "instead", "now", "open", "places", "prefilling",
        "queues", "replicas", "retired", "waiting",
    )  # fmt: skip

    def __init__(self, roles: Sequence[str], rooms: Callable[[str], Room], kinds: Sequence[str]) -> None:
        self.now = 0.0
        self.queues: dict[str, OrderedDict[int, Request]] = {kind: OrderedDict() for kind in kinds}
        self.handoff: OrderedDict[int, Request] = OrderedDict()
        self.places: dict[int, Stay] = {}  # requests that were sent to an engine and have not left
        self.prefilling = dict.fromkeys(kinds, 0)
        self.replicas: list[Member] = []
        self.retired: set[int] = set()
        self._idle: dict[str, OpenEngines] = {}
        self._open: dict[str, OpenEngines] = {}
        self.waiting: dict[int, Request] = {}  # all requests in `queues`
        self.instead: dict[int, int] = {}  # of requests that went first: in whose place
        self.idle: dict[str, list[int]] = {}
        self.open: dict[str, list[int]] = {}
        self.free_slots = 0
        for role in (*ROLES, *roles):
            self._pools(role)
        for role in roles:
            self.add(role, rooms(role))

    # -- engines

    def add(self, role: str, room: Room) -> Member:
        """One more engine; it takes the number of a retired one that is empty, if there is one."""
        kept = {stay.replica for stay in self.places.values()} if self.retired else ()
        free = next((id for id in sorted(self.retired) if id not in kept), None)
        id = len(self.replicas) if free is None else free
        member = Member(id, role, room, tuple(self.queues))
        if free is None:
            self.replicas.append(member)
        else:
            self.retired.discard(free)
            self.replicas[free] = member
        self._pools(role)
        self._count(member)
        return member

    def retire(self, id: int) -> None:
        """Nothing is sent there any more; its number may be given to another engine once it is empty."""
        self.set_room(id, CLOSED)
        self.retired.add(id)

    def set_room(self, id: int, room: Room) -> None:
        """It takes so much from now on; requests inside stay, even if they are more than that."""
        member = self.member(id)
        member.room = room
        self._count(member)

    def set_role(self, id: int, role: str, room: Room) -> None:
        """Another role and its room. Whatever runs there ends there, so a change of role drains by itself."""
        member = self.member(id)
        self.free_slots -= member.slots
        member.slots, member.idle = 0, False
        for pools in (self._idle, self._open):
            pools[member.role].put(id, False)
        self._pools(role)
        member.role, member.room = role, room
        self._count(member)

    def member(self, id: int) -> Member:
        if not 0 <= id < len(self.replicas) or id in self.retired:
            raise RunError(f"there is no engine {id} among {len(self.replicas)}")
        return self.replicas[id]

    def catch_up(self) -> None:
        """Tokens of requests on engines are counted up to the steps under way."""
        for member in self.replicas:
            member.inside.catch_up()

    def _pools(self, role: str) -> None:
        if role not in self._idle:
            self._idle[role], self._open[role] = OpenEngines(), OpenEngines()
            self.idle[role], self.open[role] = self._idle[role].members, self._open[role].members

    # -- requests

    def kind(self, name: str) -> str:
        """The class of that name; the first one, which is the default, where the name is not known."""
        return name if name in self.queues else next(iter(self.queues))

    def add_kind(self, name: str) -> None:
        if name not in self.queues:
            self.queues[name] = OrderedDict()
            self.prefilling[name] = 0
            for member in self.replicas:
                member.prefilling[name] = member.decoding[name] = 0

    def arrive(self, request: Request) -> None:
        self.waiting[request.id] = request
        self.queues[request.kind][request.id] = request

    def leave(self, request: Request) -> None:
        if self.waiting.pop(request.id, None) is None:
            del self.handoff[request.id]
            del self.places[request.id]
        else:
            del self.queues[request.kind][request.id]

    def take_back(self, request: Request) -> None:
        """One that was sent somewhere is at the head of its queue again, with its number."""
        stay = self.places[request.id]
        if request.id in self.handoff:
            del self.handoff[request.id], self.places[request.id]
        elif stay.decoding:
            self.finish(request, self.replicas[stay.replica])
        else:
            self.drop_prompt(request, self.replicas[stay.replica])
        self.arrive(request)
        self.queues[request.kind].move_to_end(request.id, last=False)

    def waiting_one(self, id: int) -> Request:
        request = self.waiting.get(self.in_place_of(id))
        if request is None:
            raise RunError(f"request {id} does not wait for its prompt and cannot be turned away")
        return request

    def in_place_of(self, id: int) -> int:
        """The same, or the request in whose place it was sent already."""
        while id not in self.waiting and id in self.instead:
            id = self.instead[id]
        return id

    def find(self, move: Move) -> tuple[Request, Member]:
        id, engine, stage = move
        if not 0 <= engine < len(self.replicas):
            raise RunError(f"{move}: there are {len(self.replicas)} engines")
        member = self.replicas[engine]
        if stage is DECODE:
            request = self.handoff.get(id)
            if member.slots < 1:
                raise RunError(f"{move}: no decode slot there")
        else:
            request = self.waiting.get(id)
            if member.prompts >= member.room.prompts or member.prompts + member.decodes >= member.room.total:
                raise RunError(f"{move}: no place for a prompt there")
        if request is None:
            raise RunError(f"{move}: request {id} does not wait for that")
        return request, member

    def start_prompt(self, request: Request, member: Member, stage: Stage) -> None:
        kind = request.kind
        self.places[request.id] = Stay(request, member.id, stage)
        del self.waiting[request.id]
        del self.queues[kind][request.id]
        member.prefilling[kind] += 1
        member.prompts += 1
        self.prefilling[kind] += 1
        self._count(member)

    def end_prompt(self, request: Request, member: Member, stays: bool) -> None:
        """It decodes in the same place, or waits for one."""
        kind = request.kind
        self._leave_prompt(kind, member)
        if stays:
            self.places[request.id].decoding = True
            member.decoding[kind] += 1
            member.decodes += 1
        else:
            self.handoff[request.id] = request
        self._count(member)

    def drop_prompt(self, request: Request, member: Member) -> None:
        del self.places[request.id]
        self._leave_prompt(request.kind, member)
        self._count(member)

    def start_decode(self, request: Request, member: Member) -> None:
        del self.handoff[request.id]
        stay = self.places[request.id]
        stay.replica, stay.stage, stay.decoding = member.id, DECODE, True
        member.decoding[request.kind] += 1
        member.decodes += 1
        self._count(member)

    def finish(self, request: Request, member: Member) -> None:
        del self.places[request.id]
        member.decoding[request.kind] -= 1
        member.decodes -= 1
        self._count(member)

    def _leave_prompt(self, kind: str, member: Member) -> None:
        member.prefilling[kind] -= 1
        member.prompts -= 1
        self.prefilling[kind] -= 1

    def _count(self, member: Member) -> None:
        """Its room has changed: the pools and the number of free slots follow."""
        prompts_room, decodes_room, total = member.room
        prompts, decodes = member.prompts, member.decodes
        left = total - prompts - decodes
        slots = decodes_room - decodes
        if slots > left:
            slots = left
        if slots < 0:
            slots = 0
        before = member.slots
        if slots != before:
            member.slots = slots
            self.free_slots += slots - before
            if not slots or not before:
                self._open[member.role].put(member.id, slots > 0)
        idle = left > 0 and prompts < prompts_room
        if idle != member.idle:
            member.idle = idle
            self._idle[member.role].put(member.id, idle)


class Inside(Protocol):
    @property
    def waiting(self) -> int: ...  # requests in its queue
    @property
    def kv_free(self) -> int: ...  # tokens
    def cached(self, request: Request) -> int: ...  # tokens of its prompt in the prefix cache
    def catch_up(self) -> None: ...  # count the tokens of all steps that have begun by now


@mypyc_attr(allow_interpreted_subclasses=True)
class Nothing:
    def __init__(self) -> None:
        self.waiting, self.kv_free = 0, ENDLESS

    def cached(self, request: Request) -> int:
        return 0

    def catch_up(self) -> None:
        pass


class Stay:
    """Where one request is; routers see it as a read-only `Place`."""

    __slots__ = ("decoding", "replica", "request", "stage")

    def __init__(self, request: Request, replica: int, stage: Stage) -> None:
        self.request = request
        self.replica = replica
        self.stage = stage
        self.decoding = False

    def __repr__(self) -> str:
        return f"Stay({self.request.id} on {self.replica}, {self.stage.value}, decoding={self.decoding})"


class Member:
    """One engine on the roster; routers see it as a read-only `Replica`."""

    __slots__ = (
        "decodes", "decoding", "id", "idle", "inside", "prefilling", "prompts", "role", "room", "slots",
    )  # fmt: skip

    def __init__(self, id: int, role: str, room: Room, kinds: Sequence[str]) -> None:
        self.id = id
        self.role = role
        self.room = room
        self.prefilling = dict.fromkeys(kinds, 0)
        self.decoding = dict.fromkeys(kinds, 0)
        self.prompts = 0  # in service
        self.decodes = 0
        self.inside: Inside = Nothing()
        self.slots = 0  # decodes it may still take, as the roster has counted
        self.idle = False  # whether a prompt may start

    @property
    def load(self) -> int:
        return self.prompts + self.decodes

    @property
    def waiting(self) -> int:
        return self.inside.waiting

    @property
    def kv_free(self) -> int:
        return self.inside.kv_free

    def cached(self, request: Request) -> int:
        return self.inside.cached(request)

    def __repr__(self) -> str:
        return f"Replica({self.id}, {self.role}, prompts={self.prompts}, decodes={self.decodes})"


class OpenEngines:
    """Engines in a list without holes: joined, left and drawn from in O(1)."""

    __slots__ = ("_place", "members")

    def __init__(self) -> None:
        self.members: list[int] = []
        self._place: dict[int, int] = {}

    def put(self, id: int, inside: bool) -> None:
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
