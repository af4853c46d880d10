"""The router's side of a fleet: waiting requests, events for the router, and its moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError, RunError
from headgate.core.fleet import CLOSED, STAY, FleetObserver, Move, Room, RoutePolicy, Stage, endless, room
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.roster import Roster

Rooms = Callable[[str], Room]  # from the role of an engine
DECODE: Final = Stage.DECODE
STOPPED: Final = End.STOPPED
LIMIT: Final = End.LIMIT


def simulated_rooms(router: RoutePolicy, slots: int) -> Rooms:
    """Engines of a simulation: endless before a router that sends at once, else one prompt at a time."""
    if router.sends_at_once:
        return endless
    if slots < 2:
        raise InputError(
            f"{type(router).__name__} needs at least 2 slots per engine, one for a prompt beside a "
            "decode; raise --slots, or choose a router such as least-loaded"
        )
    return lambda role: room(role, slots)


@mypyc_attr(allow_interpreted_subclasses=True)
class Dispatch:
    """Keeps the roster by what engines report, and carries out what the router answers.

    Hooks that the router does not override cost nothing. `pending` says that something has happened since
    the router was last asked. Another router takes over with `serve`.
    """

    def __init__(
        self,
        router: RoutePolicy,
        roles: Sequence[str],
        rooms: Rooms,
        kinds: Sequence[str],
        send: Callable[[Request, Move], None],
        refuse: Callable[[Request, float], None],
        wake: Callable[[float], None],
        soonest: float = 0.0,
    ) -> None:
        """`rooms` also gives the room of an engine whose role the router changes."""
        self.roster = Roster(roles, rooms, kinds)
        self.pending = False
        self._rooms, self._send, self._refuse, self._set_wake = rooms, send, refuse, wake
        self._soonest = soonest  # seconds from now that a wake-up in the past means; 0: it is an error
        self.serve(router)

    def serve(self, router: RoutePolicy) -> None:
        """This router decides from now on; it must have adopted the fleet unless that is empty."""
        self.router = router
        self.wakes_at = inf  # when the router wants to be asked at the latest; inf: never
        listens = type(router)
        self._tell_arrived = None if listens.arrived is FleetObserver.arrived else router.arrived
        self._tell_moved = None if listens.moved is FleetObserver.moved else router.moved
        self._tell_prefilled = None if listens.prefilled is FleetObserver.prefilled else router.prefilled
        self._tell_finished = None if listens.finished is FleetObserver.finished else router.finished

    # -- what happens to requests

    def arrived(self, request: Request, now: float) -> None:
        self.roster.arrive(request)
        if self._tell_arrived:
            self._tell_arrived(request, now)
        self.route(now)

    def prompt_done(self, request: Request, engine: int, now: float, stays: bool = True) -> None:
        """`stays`: it decodes there; else it was sent there for its prompt alone and waits for a place."""
        if not self.roster.places[request.id].decoding:  # not when it was evicted and comes again
            self.roster.end_prompt(request, self.roster.replicas[engine], stays)
            self.pending = True
            if self._tell_prefilled:
                self._tell_prefilled(request, engine, now)

    def ended(self, request: Request, engine: int, now: float, how: End) -> None:
        member, decodes = self.roster.replicas[engine], self.roster.places[request.id].decoding
        served = how is STOPPED or how is LIMIT
        if not decodes and not served:
            self.roster.drop_prompt(request, member)
        else:
            if not decodes:  # sent for its prompt alone, and that was all
                self.roster.end_prompt(request, member, True)
            self.roster.finish(request, member)
        self.pending = True
        if not served:
            self.router.left(request, now, how)
        elif self._tell_finished:
            self._tell_finished(request, engine, now)

    def left(self, request: Request, now: float, how: End) -> None:
        self.roster.leave(request)
        self.pending = True
        self.router.left(request, now, how)

    def returned(self, request: Request, now: float) -> None:
        """Its engine failed it, or its KV is lost: it waits for its prompt again, before all others."""
        self.roster.take_back(request)
        self.pending = True
        self.router.returned(request, now)

    # -- what happens to engines

    def set_role(self, engine: int, role: str) -> bool:
        """It has another role from now on; False: it had that already."""
        member = self.roster.member(engine)
        if member.role == role:
            return False
        self.roster.set_role(engine, role, CLOSED if member.room == CLOSED else self._rooms(role))
        self.engines_changed()
        return True

    def close(self, engine: int) -> None:
        """Nothing is sent there until it is opened; requests inside stay."""
        self.roster.set_room(engine, CLOSED)
        self.engines_changed()

    def open(self, engine: int) -> None:
        self.roster.set_room(engine, self._rooms(self.roster.member(engine).role))
        self.engines_changed()

    def engines_changed(self) -> None:
        self.pending = True
        self.router.engines_changed(self.roster)

    # -- what the router wants

    def woken(self, now: float) -> bool:
        if now < self.wakes_at:
            return False
        self.wakes_at = inf
        self.pending = True
        return True

    def route(self, now: float) -> None:
        """Ask until no request is moved; while none waits there is nothing to ask.

        The router's own moves and refusals are no news to it: it was asked again after each of them. News
        left over would reach it at the next event, and engines that jump over steps have fewer of those.
        """
        try:
            self._ask(now)
        finally:
            self.pending = False

    def _ask(self, now: float) -> None:
        roster, route = self.roster, self.router.route
        while roster.waiting or roster.handoff:
            routing = route(roster)
            if routing is STAY:
                return
            moves, reject, wake, roles = routing
            changed = bool(roles) and any([self.set_role(engine, role) for engine, role in roles])
            for move in moves:
                self._move(move, now)
            for id in reject:
                self._refuse(roster.waiting_one(id), now)
            if moves or reject or changed:
                continue
            if wake >= self.wakes_at:
                return
            if wake <= now:
                if not self._soonest:
                    raise RunError(
                        f"{type(self.router).__name__} asks to be woken at {wake}, but it is {now}"
                    )
                wake = now + self._soonest
            self.wakes_at = wake
            self._set_wake(wake)
            return

    def _move(self, move: Move, now: float) -> None:
        request, member = self.roster.find(move)
        if move.stage is DECODE:
            self.roster.start_decode(request, member)
        else:
            self.roster.start_prompt(request, member, move.stage)
        self._send(request, move)
        if self._tell_moved:
            self._tell_moved(request, move, now)
