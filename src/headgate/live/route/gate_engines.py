"""Engines before the gate: what each may take by its role, and which roles the router's wish gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import ceil

from headgate.core.errors import InputError
from headgate.core.fleet import ANY, CLOSED, DECODE, MIXED, PREFILL, SOLO, Room

AUTO = "auto"  # the router chooses the role
UNBOUNDED = 1 << 30
SPARE = 1 / 16  # of its seats that an engine may have queued inside, before routers that send at once


class EngineState:
    """What is known of one engine apart from the requests on it."""

    __slots__ = ("group", "most", "prompts", "role", "rooms", "seats", "taken", "up")

    def __init__(
        self,
        seats: int,
        prompts: int = 1,
        role: str = AUTO,
        rooms: Callable[[str], Room] | None = None,
        group: str = "",
    ) -> None:
        """`rooms` replaces the usual room of a role: to repeat a simulation one needs the simulator's."""
        self.seats, self.prompts, self.role, self.rooms = seats, prompts, role, rooms
        self.group = group  # engines of one group can send KV to each other
        self.up = True
        self.taken = 0  # seats held by requests that this gate did not send
        self.most = UNBOUNDED  # requests it may have in all: a breaker that tries it again allows one

    def checked(self) -> EngineState:
        """The same, or an error that names what cannot be."""
        if self.seats < 1 or self.prompts < 1 or self.taken < 0:
            raise InputError(
                f"an engine with {self.seats} seats, {self.prompts} prompts at once and {self.taken} seats "
                "taken; give at least 1 seat, 1 prompt and 0 taken"
            )
        if self.most < 0:
            raise InputError(f"an engine that may have {self.most} requests; give 0 or more")
        if self.role not in (AUTO, ANY, MIXED, SOLO, PREFILL, DECODE):
            raise InputError(f"role {self.role!r} of an engine is not known; give auto, any, mixed or solo")
        return self

    def room(self, role: str, deep: bool) -> Room:
        """Its room in that role; `deep` before a router that sends at once."""
        if not self.up:
            return CLOSED
        if self.rooms is not None:
            return self.rooms(role)
        return live_room(role, self.seats, self.prompts, deep, self.taken, self.most)


def live_room(role: str, seats: int, prompts: int, deep: bool, taken: int = 0, most: int = UNBOUNDED) -> Room:
    """The room of a role on a real engine, which may run several prompts at once.

    Routers that send at once keep a few requests more than seats on every engine, so that a seat that falls
    free is filled without waiting for the router; the others keep to the seats. With one prompt at a time it
    is the simulator's `core.fleet.room`, but a prefill engine may decode: requests that cannot be split, or
    come back from a failed hand-over, are sent there whole.
    """
    total = max(0, min((ceil(seats * (1 + SPARE)) if deep else seats) - taken, most))
    at_once = total if deep else min(prompts, total)
    if role == MIXED:
        return Room(at_once, max(0, total - 1), total)
    if role in (SOLO, DECODE):
        return Room(0, total, total)
    return Room(at_once, total, total)


def paired(engines: Mapping[int, EngineState]) -> set[int]:
    """Engines that can hand KV to another one of their group that is up; all that repeat a simulation."""
    up: Counter[str] = Counter(each.group for each in engines.values() if each.up)
    return {id for id, each in engines.items() if each.rooms is not None or up[each.group] > each.up}


def assign(
    engines: Mapping[int, EngineState], now: Mapping[int, str], wanted: Sequence[str]
) -> dict[int, str]:
    """The role of every engine: fixed ones keep theirs, as few of the others as possible change.

    `wanted` are the roles that the router wants for the engines that are up, in any order.
    """
    found = {id: each.role for id, each in engines.items() if each.role != AUTO}
    left = Counter(wanted) - Counter(role for id, role in found.items() if engines[id].up)
    free = [id for id, each in engines.items() if each.role == AUTO and each.up]
    for id in free:
        if left[now[id]] > 0:
            found[id] = now[id]
            left[now[id]] -= 1
    rest = list(left.elements())
    for id in free:
        if id not in found:
            found[id] = rest.pop(0) if rest else now[id]
    for id in engines:
        found.setdefault(id, now[id])
    return found
