"""The dispatch of a gate: engines that differ, requests that cannot be split, and those nobody places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.core.dispatch import Dispatch
from headgate.core.fleet import CLOSED, PREFILL, Move, RoutePolicy, Stage
from headgate.core.request import Request
from headgate.live.route.gate_engines import AUTO, EngineState, assign, paired
from headgate.live.route.ticket import Ticket

SOONEST = 0.001  # seconds: a wake-up that lies in the past


class Desk(Dispatch):
    """What `core.dispatch` does, for real engines.

    A request that must be sent whole is, also where no other engine could take its KV over. One that an
    engine has failed goes to another while there is one with a place. Requests between two engines are placed
    even if the router of the day hands nothing over; those whose KV is at an engine that is drained or down
    before all others.
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
        super().__init__(router, (), lambda role: CLOSED, kinds, send, refuse, wake, SOONEST)

    def add_engine(self, state: EngineState) -> int:
        """One more engine; its role comes with `arrange`."""
        seat = self.roster.add(state.role if state.role != AUTO else "any", CLOSED)
        self.engines[seat.id] = state
        return seat.id

    def retire(self, id: int) -> None:
        """No request is sent there any more."""
        self.roster.retire(id)
        del self.engines[id]

    def arrange(self) -> None:
        """Roles as the router wants them for the engines that are up, and the room of each."""
        self._paired = paired(self.engines)
        up = sum(each.up for each in self.engines.values())
        now = {id: self.roster.replicas[id].role for id in self.engines}
        roles = assign(self.engines, now, self.router.roles(up) if up else ())
        for id, state in self.engines.items():
            role = roles[id]
            room = state.room(role, self.router.sends_at_once)
            seat = self.roster.replicas[id]
            if seat.role != role:
                self.roster.set_role(id, role, room)
            elif seat.room != room:
                self.roster.set_room(id, room)

    def set_role(self, engine: int, role: str) -> bool:
        """As the router wishes, unless the role of that engine is fixed."""
        state = self.engines.get(engine)
        if state is None or state.role != AUTO or self.roster.replicas[engine].role == role:
            return False
        self.roster.set_role(engine, role, state.room(role, self.router.sends_at_once))
        self.engines_changed()
        return True

    def route(self, now: float) -> None:
        """Ask the router, after hand-overs from engines that take nothing more have found a place."""
        roster = self.roster
        for id in [*roster.handoff]:
            if roster.replicas[roster.places[id].replica].room == CLOSED:
                able = [seat for seat in roster.replicas if seat.room.decodes > 0]
                able = [seat for seat in able if seat.role != PREFILL] or able
                best = max(able, key=lambda seat: seat.seats, default=None)
                if best is None or not best.seats:
                    break
                self._move(Move(id, best.id, Stage.DECODE), now)
        super().route(now)

    def place_left(self, now: float) -> None:
        """Requests between two engines, under a router that never moves those."""
        roster = self.roster
        for id in [*roster.handoff]:
            home = roster.replicas[roster.places[id].replica]
            open = [home.id] if home.seats > 0 else [each for pool in roster.open.values() for each in pool]
            if not open:
                return
            engine = max(open, key=lambda each: roster.replicas[each].seats)
            self._move(Move(id, engine, Stage.DECODE), now)

    def _move(self, move: Move, now: float) -> None:
        amended = self._amended(move)
        if amended.replica == move.replica or amended.stage is not Stage.WHOLE:
            return super()._move(amended, now)
        seat, room = self.roster.replicas[amended.replica], self.roster.replicas[amended.replica].room
        self.roster.set_room(seat.id, room._replace(prompts=max(room.prompts, seat.prompts + 1)))
        try:
            super()._move(amended, now)
        finally:
            self.roster.set_room(seat.id, room)

    def _amended(self, move: Move) -> Move:
        """The same move, whole where it must be, and to an engine that has not failed the request yet."""
        roster, decode = self.roster, move.stage is Stage.DECODE
        ticket = (roster.handoff if decode else roster.waiting).get(move.request)
        if not isinstance(ticket, Ticket):
            return move  # a number that nobody has is refused by the roster
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
        """Another engine with a seat, whatever its role: all that usually take prompts have failed it."""
        others = [self.roster.replicas[id] for id in self.engines if id not in avoid]
        free = [seat for seat in others if seat.load < seat.room.total]
        return min(free, key=lambda seat: seat.load).id if free else engine
