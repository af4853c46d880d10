"""Asks a fleet's router which requests move now, until it answers none."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from headgate.core.errors import RunError
from headgate.core.fleet import STAY, Move, RoutePolicy
from headgate.core.request import Request
from headgate.core.roster import Roster


class AskRouter:
    """Asks a router, and has its moves and refusals carried out by the driver it was made for.

    While no request waits there is nothing to ask. A time at which the router wants to be asked again is
    handed to the caller once; `woken` says that it may have come. Before real engines time passes
    while a router thinks: there a wake-up in the past means `soonest` seconds from now. In simulation it is
    an error.
    """

    __slots__ = ("_move", "_refuse", "_roster", "_router", "_set_role", "_set_wake", "_soonest", "_wake")

    def __init__(
        self,
        router: RoutePolicy,
        roster: Roster,
        move: Callable[[Move, float], None],
        refuse: Callable[[Request, float], None],
        set_wake: Callable[[float], None],
        set_role: Callable[[int, str], bool],
        soonest: float = 0.0,
    ) -> None:
        self._router, self._roster = router, roster
        self._set_role, self._soonest = set_role, soonest
        self._move, self._refuse, self._set_wake = move, refuse, set_wake
        self._wake = inf

    def ask(self, now: float) -> None:
        """Until no request is moved or turned away."""
        roster, route, move_one = self._roster, self._router.route, self._move
        while roster.waiting or roster.handoff:
            routing = route(roster)
            if routing is STAY:
                return
            moves, reject, wake, roles = routing
            changed = bool(roles) and any([self._set_role(engine, role) for engine, role in roles])
            for move in moves:
                move_one(move, now)
            for id in reject:
                self._refuse(roster.waiting_one(id), now)
            if not moves and not reject and not changed:
                self._sleep(wake, now)
                return

    @property
    def wakes_at(self) -> float:
        """The time the router asked for; inf: none."""
        return self._wake

    def woken(self, now: float) -> bool:
        """Has the time come that the router asked for?"""
        if now < self._wake:
            return False
        self._wake = inf
        return True

    def _sleep(self, wake: float, now: float) -> None:
        if wake >= self._wake:
            return
        if wake <= now:
            if not self._soonest:
                raise RunError(f"{type(self._router).__name__} asks to be woken at {wake}, but it is {now}")
            wake = now + self._soonest
        self._wake = wake
        self._set_wake(wake)
