"""Parts of the roster: one engine's seats, one request's place, and pools of engines with room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from headgate.core.build import mypyc_attr
from headgate.core.fleet import ENDLESS, Room, Stage
from headgate.core.request import Request

if TYPE_CHECKING:
    from headgate.core.roster import Roster


class Inside(Protocol):
    """What an engine knows of itself, where the driver models it."""

    @property
    def waiting(self) -> int:
        """Requests in its queue."""

    @property
    def kv_free(self) -> int:
        """Tokens."""

    def cached(self, request: Request) -> int:
        """Tokens of its prompt in the prefix cache."""

    def catch_up(self) -> None:
        """Count the tokens of all steps that have begun by now."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Nothing:
    """An engine without a queue and with endless memory."""

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
        return self.prompts + self.decodes

    @property
    def waiting(self) -> int:
        return self.inside.waiting

    @property
    def kv_free(self) -> int:
        return self.inside.kv_free

    def cached(self, request: Request) -> int:
        return self.inside.cached(request)

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
