"""What the gate keeps books of: requests with a place, engines with rooms and roles."""

from __future__ import annotations

from asyncio import Future
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Any, ClassVar, NamedTuple

from headgate.core.dispatch import Dispatch
from headgate.core.errors import InputError
from headgate.core.fleet import ANY, CLOSED, DECODE, MIXED, PREFILL, SOLO, Move, Room, RoutePolicy, Stage
from headgate.core.policy import End
from headgate.core.request import NO_SLO, Request, Slo
from headgate.kv.prefix import Pieces
from headgate.methods.orders import TenantAccounts, TenantQueues

# -- requests

NOWHERE: frozenset[int] = frozenset()


class Content(NamedTuple):
    pieces: Pieces
    tokens: int  # in the measure of the pieces, four bytes each
    session: bytes | None


class TicketState(Enum):
    QUEUED = "queued"  # in the queue of its class
    PREFILLING = "prefilling"  # holds a prompt slot at an engine, sent WHOLE or for its PREFILL
    HANDED_OVER = "handed over"  # prompt done, waits for a decode place; its KV stays at the prefill engine
    DECODING = "decoding"  # holds a decode slot at an engine
    GONE = "gone"


class Refused(Exception):  # noqa: N818  (an answer to the client, not a fault)
    def __init__(self, status: int, reason: str, retry_after: int) -> None:
        super().__init__(f"{status} {reason}; retry after {retry_after} s")
        self.status = status  # 429: the queue is full or too slow; 503: no engine, or the router ends
        self.reason = reason  # queue full, queue time, wait too long, router, no engines or draining
        self.retry_after = retry_after


class Lapsed(Exception):  # noqa: N818  (news, not a fault)
    """No decode place came before the KV's deadline: give it up, wait for `place` again, to be sent WHOLE."""


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """`prompt` is an estimate. The handler may write `generated` while tokens come; estimators read it."""

    id: int
    kind: str
    arrival: float
    prompt: int
    limit: int
    guess: int | None = None
    priority: int = 0
    slo: Slo = NO_SLO
    whole: bool = False  # never split, whatever the router says
    content: Content | None = None  # None: no router asks what it shares with others
    tenant: str = ""
    queued: float = 0.0  # when it entered its queue; later where a failed leg brought it back
    state: TicketState = TicketState.QUEUED
    engine: int = -1  # where it is; for HANDED_OVER where its KV is
    tries: int = 0  # engines it was sent to that failed
    avoid: frozenset[int] = NOWHERE  # those engines
    generated: int = 0
    cached: int = 0  # prompt tokens its engine had, where it says so at the end
    last_token: float | None = None
    timer: Any = None  # runs out with its time in the queue, or with its KV
    ended: bool = False  # its handler said so
    lapsed: bool = False  # its handler must give up its KV before anything else
    answer: Move | Refused | None = None  # what `place` will return or raise
    waiter: Future[None] | None = None
    evictions: ClassVar[int] = 0
    wasted: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self.queued = self.arrival

    @property
    def room(self) -> int:
        return self.todo

    @property
    def todo(self) -> int:
        return self.prompt if self.state in (TicketState.QUEUED, TicketState.PREFILLING) else 0

    def tell(self, answer: Move | Refused | None) -> None:
        self.answer = answer
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if (answer is not None or self.lapsed) and self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def __repr__(self) -> str:
        where = f"{self.state.value}, engine={self.engine}"
        return f"Ticket({self.id}, {self.kind!r}, {where}, tries={self.tries})"


# -- engines: rooms and roles

AUTO = "auto"  # the router chooses the role
UNBOUNDED = 1 << 30
SPARE = 1 / 16  # of its slots that an engine may have queued inside, before routers that send at once


@dataclass(slots=True, eq=False)
class EngineState:
    slots: int
    prompts: int = 1
    role: str = AUTO
    rooms: Callable[[str], Room] | None = None  # instead of the usual ones, to repeat a simulation
    group: str = ""  # engines of one group can send KV to each other
    up: bool = True
    most: int = UNBOUNDED  # requests it may have in all: a breaker that tries it again allows one

    def checked(self) -> EngineState:
        if self.slots < 1 or self.prompts < 1:
            raise InputError(
                f"an engine with {self.slots} slots and {self.prompts} prompts at once; give at least 1 slot "
                "and 1 prompt"
            )
        if self.role not in (AUTO, ANY, MIXED, SOLO, PREFILL, DECODE):
            raise InputError(f"role {self.role!r} of an engine is not known; give auto, any, mixed or solo")
        return self

    def room(self, role: str, deep: bool, background: int = 0) -> Room:
        if not self.up:
            return CLOSED
        if self.rooms is not None:
            return self.rooms(role)
        room = live_room(role, self.slots, self.prompts, deep, self.most)
        if not deep or room.total == self.most:
            return room
        return room._replace(prompts=room.prompts + background, total=room.total + background)


def live_room(role: str, slots: int, prompts: int, deep: bool, most: int = UNBOUNDED) -> Room:
    """Routers that send at once keep a few requests more than slots on every engine, so that a free slot is
    filled without waiting for the router. With one prompt at a time it is the simulator's `core.fleet.room`,
    but a prefill engine may decode what cannot be split or failed to be handed over. Background work is not
    counted against others before a router that sends at once: it fills what they leave, and an engine with
    `keep` evicts it for them.
    """
    total = min(ceil(slots * (1 + SPARE)) if deep else slots, most)
    at_once = total if deep else min(prompts, total)
    if role == MIXED:
        return Room(at_once, max(0, total - 1), total)
    return Room(0 if role in (SOLO, DECODE) else at_once, total, total)


def paired(engines: Mapping[int, EngineState]) -> set[int]:
    """Engines that can hand KV to another one of their group that is up; all that repeat a simulation."""
    up: Counter[str] = Counter(each.group for each in engines.values() if each.up)
    return {id for id, each in engines.items() if each.rooms is not None or up[each.group] > each.up}


def assign(
    engines: Mapping[int, EngineState], now: Mapping[int, str], wanted: Sequence[str]
) -> dict[int, str]:
    """Fixed roles stay, and as few others as possible change to those that the router wants."""
    roles = {id: state.role for id, state in engines.items() if state.role != AUTO}
    left = Counter(wanted) - Counter(role for id, role in roles.items() if engines[id].up)
    free = [id for id, state in engines.items() if state.role == AUTO and state.up]
    for id in free:
        if left[now[id]] > 0:
            roles[id] = now[id]
            left[now[id]] -= 1
    rest = left.elements()
    for id in free:
        if id not in roles:
            roles[id] = next(rest, now[id])
    return {**now, **roles}


# -- dispatch to engines that differ

SOONEST = 0.001  # seconds: a wake-up that lies in the past


class Desk(Dispatch):
    """A request that must be sent whole is, also where no other engine could take its KV over. One that an
    engine has failed goes to another while there is one with a place. Requests between two engines are placed
    even if the router of the day hands nothing over; those whose KV is at an engine that is drained or down
    before all others.

    A router chooses class and engine. Which request of the class goes, its tenants' accounts decide: the
    oldest of the tenant that was served least. Where the router chose an engine for what a prompt shares, its
    choice stands as long as its tenant is no more than a quantum ahead.
    """

    def __init__(
        self,
        router: RoutePolicy,
        kinds: Sequence[str],
        send: Callable[[Request, Move], None],
        refuse: Callable[[Request, float], None],
        wake: Callable[[float], None],
    ) -> None:
        self.engines: dict[int, EngineState] = {}
        self._paired: set[int] = set()  # engines with another one to hand KV to
        self.accounts = TenantAccounts()
        self._named = False  # has any tenant been named? Before that there is nothing to share
        self._unsent: set[int] = set()  # requests that wait for the first time
        self._queues: dict[str, TenantQueues] = {}  # the same by class
        self._waiting: dict[str, Counter[str]] = {}  # how many of each tenant
        self._background: dict[int, int] = {}  # requests on engines that were promised nothing: where
        self._many = Counter[int]()  # how many an engine has
        super().__init__(router, (), lambda role: CLOSED, kinds, send, refuse, wake, SOONEST)

    def add_engine(self, state: EngineState) -> int:
        member = self.roster.add(state.role if state.role != AUTO else "any", CLOSED)
        self.engines[member.id] = state
        return member.id

    def retire(self, id: int) -> None:
        self.roster.retire(id)
        del self.engines[id]

    def arrange(self) -> None:
        self._paired = paired(self.engines)
        up = sum(each.up for each in self.engines.values())
        now = {id: self.roster.replicas[id].role for id in self.engines}
        roles = assign(self.engines, now, self.router.roles(up) if up else ())
        for id in self.engines:
            role = roles[id]
            room = self._room(id, role)
            member = self.roster.replicas[id]
            if member.role != role:
                self.roster.set_role(id, role, room)
            elif member.room != room:
                self.roster.set_room(id, room)

    def arrived(self, request: Request, now: float) -> None:
        if self._named or request.tenant:
            self._named = True
            self._enqueue(request)
        super().arrived(request, now)

    def left(self, request: Request, now: float, how: End) -> None:
        self._gone(request)
        super().left(request, now, how)

    def ended(self, request: Request, engine: int, now: float, how: End) -> None:
        self.accounts.left(request)
        self._makes_room(request)
        super().ended(request, engine, now, how)

    def returned(self, request: Request, now: float) -> None:
        self._makes_room(request)
        super().returned(request, now)

    def _makes_room(self, request: Request) -> None:
        engine = self._background.pop(request.id, None)
        if engine is not None:
            self._fill(engine, -1)

    def _fill(self, engine: int, more: int) -> None:
        self._many[engine] += more
        if engine in self.engines:
            self.roster.set_room(engine, self._room(engine, self.roster.replicas[engine].role))

    def _room(self, engine: int, role: str) -> Room:
        return self.engines[engine].room(role, self.router.sends_at_once, self._many[engine])

    def dropped(self, request: Request) -> None:
        self._gone(request)
        self.roster.leave(request)

    def waiting_of(self, ticket: Ticket) -> tuple[int, int]:
        waiting = self._waiting.get(ticket.kind, Counter())
        return waiting[ticket.tenant], len(waiting)

    def newest_of_most(self, ticket: Ticket) -> Ticket | None:
        waiting = self._waiting.get(ticket.kind, Counter())
        tenant, most = max(waiting.items(), key=lambda item: item[1], default=("", 0))
        if most <= waiting[ticket.tenant]:
            return None
        for request in reversed(self.roster.queues[ticket.kind].values()):
            if request.tenant == tenant and request.id in self._unsent and isinstance(request, Ticket):
                return request
        return None

    def _gone(self, request: Request) -> None:
        self._unqueue(request)
        self.accounts.left(request)

    def _enqueue(self, request: Request) -> None:
        self.accounts.arrived(request)
        kind = request.kind
        if kind not in self._queues:
            self._queues[kind], self._waiting[kind] = TenantQueues(self.accounts), Counter()
        self._queues[kind].add(request, (request.arrival, request.id))
        self._waiting[kind][request.tenant] += 1
        self._unsent.add(request.id)

    def _unqueue(self, request: Request) -> None:
        if request.id not in self._unsent:
            return
        self._unsent.discard(request.id)
        self._queues[request.kind].drop(request)
        waiting = self._waiting[request.kind]
        waiting[request.tenant] -= 1
        if not waiting[request.tenant]:
            del waiting[request.tenant]

    def _in_turn(self, id: int) -> int:
        roster, accounts = self.roster, self.accounts
        if id not in self._unsent:
            return id
        named = roster.waiting[id]
        if len(self._waiting[named.kind]) < 2:
            return id
        tenant = accounts.name(named)
        if self.router.reads_contents and tenant not in accounts.ahead():
            return id
        first = next(self._queues[named.kind].ids(roster.waiting), id)
        if accounts.name(roster.waiting[first]) == tenant:
            return id
        roster.instead[first] = id
        return first

    def set_role(self, engine: int, role: str) -> bool:
        state = self.engines.get(engine)
        if state is None or state.role != AUTO or self.roster.replicas[engine].role == role:
            return False
        self.roster.set_role(engine, role, self._room(engine, role))
        self.engines_changed()
        return True

    def route(self, now: float) -> None:
        roster = self.roster
        roster.instead.clear()
        for id in [*roster.handoff]:
            if roster.replicas[roster.places[id].replica].room == CLOSED:
                able = [member for member in roster.replicas if member.room.decodes > 0]
                able = [member for member in able if member.role != PREFILL] or able
                best = max(able, key=lambda member: member.slots, default=None)
                if best is None or not best.slots:
                    break
                self._move(Move(id, best.id, Stage.DECODE), now)
        super().route(now)

    def place_left(self, now: float) -> None:
        roster = self.roster
        for id in [*roster.handoff]:
            home = roster.replicas[roster.places[id].replica]
            open = [home.id] if home.slots > 0 else [each for pool in roster.open.values() for each in pool]
            if not open:
                return
            engine = max(open, key=lambda each: roster.replicas[each].slots)
            self._move(Move(id, engine, Stage.DECODE), now)

    def _move(self, move: Move, now: float) -> None:
        if move.stage is Stage.DECODE or not self._named:
            return self._place(move, now)
        named = self.roster.in_place_of(move.request)
        id = self._in_turn(named)
        request = self.roster.waiting.get(id)
        try:
            self._place(move if id == move.request else move._replace(request=id), now)
        finally:  # whatever the router does when it hears of it
            if request is not None and id not in self.roster.waiting:
                self._unqueue(request)
                self.accounts.admitted(request)
        if id != named:
            self.router.passed_over(self.roster.waiting[named], now)

    def _place(self, move: Move, now: float) -> None:
        amended = self._amended(move)
        request, engine = self.roster.waiting.get(move.request), amended.replica
        if engine == move.replica or amended.stage is not Stage.WHOLE:
            super()._move(amended, now)
        else:
            member, room = self.roster.replicas[engine], self.roster.replicas[engine].room
            self.roster.set_room(engine, room._replace(prompts=max(room.prompts, member.prompts + 1)))
            try:
                super()._move(amended, now)
            finally:
                self.roster.set_room(engine, room)
        if request and request.slo.background and amended.stage is Stage.WHOLE:
            self._background[request.id] = engine
            self._fill(engine, 1)

    def _amended(self, move: Move) -> Move:
        roster, decode = self.roster, move.stage is Stage.DECODE
        ticket = (roster.handoff if decode else roster.waiting).get(move.request)
        if not isinstance(ticket, Ticket):
            return move  # an unknown number is refused by the roster
        engine, stage = move.replica, move.stage
        if engine in ticket.avoid and 0 <= engine < len(roster.replicas):
            places = (roster.open if decode else roster.idle)[roster.replicas[engine].role]
            engine = next((each for each in places if each not in ticket.avoid), engine)
            if engine in ticket.avoid and ticket.whole and not decode:
                engine = self._elsewhere(ticket.avoid, engine)
        if stage is Stage.PREFILL and (ticket.whole or engine not in self._paired):
            stage = Stage.WHOLE
        return move if (engine, stage) == move[1:] else Move(move.request, engine, stage)

    def _elsewhere(self, avoid: frozenset[int], engine: int) -> int:
        """Another engine with a slot, whatever its role: all that usually take prompts have failed it."""
        others = [self.roster.replicas[id] for id in self.engines if id not in avoid]
        free = [member for member in others if member.load < member.room.total]
        return min(free, key=lambda member: member.load).id if free else engine
