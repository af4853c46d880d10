"""The router's side of a fleet: waiting requests, events for the router, and its moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headgate.core.ask_router import Asking
from headgate.core.errors import InputError
from headgate.core.fleet import FleetObserver, Move, RoutePolicy, Stage, endless, room
from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.roster import Roster, Seat

NOT_HERE, IN_PROMPT, IN_DECODE = range(3)  # what an engine does with a request


class Dispatch:
    """Keeps the roster by what engines report, and carries out what the router answers.

    Hooks that the router does not override cost nothing. `pending` says that something has happened since
    the router was last asked.
    """

    def __init__(
        self,
        router: RoutePolicy,
        engines: int,
        seats: int,
        kinds: Sequence[str],
        requests: int,
        send: Callable[[Entry, Move], None],
        refuse: Callable[[Request, float], None],
        wake: Callable[[float], None],
    ) -> None:
        roles = router.roles(engines)
        if len(roles) != engines:
            raise InputError(f"{len(roles)} roles for {engines} engines; the router must give each one")
        if seats < 2 and not router.sends_at_once:
            raise InputError(
                f"{type(router).__name__} needs at least 2 seats per engine, one for a prompt beside a "
                "decode; raise --slots, or choose a router such as least-loaded"
            )
        rooms = endless if router.sends_at_once else lambda role: room(role, seats)
        self.router = router
        self.roster = Roster(roles, rooms, kinds)
        self.pending = False
        self._send = send
        self._asking = Asking(router, self.roster, self._move, refuse, wake)
        self._phase = bytearray(requests)
        listens = type(router)
        self._tell_arrived = None if listens.arrived is FleetObserver.arrived else router.arrived
        self._tell_moved = None if listens.moved is FleetObserver.moved else router.moved
        self._tell_prefilled = None if listens.prefilled is FleetObserver.prefilled else router.prefilled
        self._tell_finished = None if listens.finished is FleetObserver.finished else router.finished

    def arrived(self, entry: Entry, now: float) -> None:
        """It waits for its prompt."""
        self.roster.arrive(entry)
        if self._tell_arrived:
            self._tell_arrived(entry, now)
        self.route(now)

    def prompt_done(self, entry: Entry, engine: int, now: float) -> None:
        """It decodes where its prompt was."""
        if self._phase[entry.id] == IN_PROMPT:  # not when it was evicted and comes again
            self._phase[entry.id] = IN_DECODE
            self.roster.end_prompt(entry, self.roster.replicas[engine], True)
            self.pending = True
            if self._tell_prefilled:
                self._tell_prefilled(entry, engine, now)

    def parted(self, entry: Entry, engine: int, now: float) -> None:
        """It was sent there for its prompt alone and waits for a place to decode."""
        self._phase[entry.id] = NOT_HERE
        self.roster.end_prompt(entry, self.roster.replicas[engine], False)
        self.pending = True
        if self._tell_prefilled:
            self._tell_prefilled(entry, engine, now)

    def ended(self, entry: Entry, engine: int, now: float, how: End) -> None:
        """It has left an engine, or its way there, for good."""
        seat, phase = self.roster.replicas[engine], self._phase[entry.id]
        served = how is End.STOPPED or how is End.LIMIT
        if phase == IN_PROMPT and not served:
            self.roster.drop_prompt(entry, seat)
        else:
            if phase == IN_PROMPT:  # sent for its prompt alone, and that was all
                self.roster.end_prompt(entry, seat, True)
            self.roster.finish(entry, seat)
        self._phase[entry.id] = NOT_HERE
        self.pending = True
        if not served:
            self.router.left(entry, now, how)
        elif self._tell_finished:
            self._tell_finished(entry, engine, now)

    def left(self, request: Request, now: float, how: End) -> None:
        """A request that waits before the engines, or between two of them, leaves."""
        self.roster.leave(request)
        self.pending = True
        self.router.left(request, now, how)

    def woken(self, now: float) -> None:
        """A time the router asked for may have come."""
        if self._asking.woken(now):
            self.pending = True

    def route(self, now: float) -> None:
        """Ask until no request is moved."""
        self.pending = False
        self._asking.ask(now)

    def _move(self, move: Move, now: float) -> None:
        found, seat = self.roster.find(move)
        assert isinstance(found, Entry)  # the roster holds what it was given
        self._start(found, seat, move)
        self._send(found, move)
        if self._tell_moved:
            self._tell_moved(found, move, now)

    def _start(self, entry: Entry, seat: Seat, move: Move) -> None:
        if move.stage is Stage.DECODE:
            self.roster.start_decode(entry, seat)
            self._phase[entry.id] = IN_DECODE
        else:
            self.roster.start_prompt(entry, seat)
            self._phase[entry.id] = IN_PROMPT
