"""Many engines, one router, one clock: the event loop of a fleet at token level. Read `_serve` first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from headgate.core.errors import InputError, RunError, told
from headgate.core.fleet import STAY, FleetObserver, Move, RoutePolicy, Stage, endless, room
from headgate.core.ledger import Entry, Ledger
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.roster import Roster
from headgate.drivers.arrivals import Arrivals
from headgate.drivers.engine import Engine
from headgate.drivers.exchange import Exchange
from headgate.drivers.handover import Handover, Transfer
from headgate.drivers.porter import Porter
from headgate.drivers.simulator import PATIENT_DOG, REPORT_EVERY
from headgate.drivers.station import RUNNING, Station
from headgate.results.fleet_recorder import FleetRecorder
from headgate.workloads.workload import Workload

DUE, WAKE, TIMER, LANDS = range(4)
NOT_HERE, IN_PROMPT, IN_DECODE = range(3)  # what an engine does with a request
AT_ONCE = Transfer()


class FleetSimulator:
    """Engines of one kind, each with a policy of its own, behind one router.

    An engine is touched when its step ends, when the last step of a span begins, or when something reaches
    it; so a request costs the same in a fleet of any size. At one moment steps end first, then requests
    come and are routed, then engines begin their next step.

    A request that can never fit is refused at the fleet's door. Patience counts until the first token: in
    the fleet's queue, and in an engine's. A request whose prompt is done waits for its decode as long as it
    takes (the stochastic network lets it give up), unless its client hangs up.
    """

    def __init__(
        self,
        engine: Engine,
        engines: int,
        policy: Callable[[str], BatchPolicy],
        router: RoutePolicy,
        workload: Workload,
        *,
        transfer: Transfer = AT_ONCE,
        leases: bool = True,
        watchdog: float = PATIENT_DOG,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if engines < 1:
            raise InputError(f"{engines} engines; give at least 1")
        self.router = router
        self.arrivals = Arrivals(workload)
        self.now = 0.0
        kinds = [kind.name for kind in workload.kinds]
        self.recorder = FleetRecorder(len(workload), kinds, engines)
        roles = router.roles(engines)
        if len(roles) != engines:
            raise InputError(f"{len(roles)} roles for {engines} engines; the router must give each one")
        seats = engine.running
        rooms = endless if router.sends_at_once else lambda role: room(role, seats)
        self.fleet = Roster(roles, rooms, kinds)
        self._lengths: list[int] = workload.output.tolist()
        self._porter = Porter(transfer.checked(), self._push_landing, self._reach, self._joined)
        self.stations = [
            self._station(id, engine, policy(role), leases, watchdog) for id, role in enumerate(roles)
        ]
        for seat, station in zip(self.fleet.replicas, self.stations, strict=True):
            seat.inside = station.replica
        self._longest = engine.longest
        self._lobby = Ledger(
            self.stations[0].replica.ledger.limits, 0
        )  # of those who wait before the engines
        self._phase = bytearray(len(workload))
        self._at: dict[int, Station] = {}
        self._patience: list[float] = workload.patience.tolist()
        self._abort: list[float] = workload.abort.tolist()
        self._heap: list[tuple[float, int, int, Any]] = []
        self._ready: list[Station] = []
        self._sequence = 0
        self._wake = inf
        self._asks = False  # something has happened that the router should know
        self._progress = progress
        listens = type(router)
        self._tell_arrived = None if listens.arrived is FleetObserver.arrived else router.arrived
        self._tell_moved = None if listens.moved is FleetObserver.moved else router.moved
        self._tell_prefilled = None if listens.prefilled is FleetObserver.prefilled else router.prefilled
        self._tell_finished = None if listens.finished is FleetObserver.finished else router.finished

    def _station(
        self, id: int, engine: Engine, policy: BatchPolicy, leases: bool, watchdog: float
    ) -> Station:
        def on_end(entry: Entry, how: End) -> None:
            self._ended(id, entry, how)

        def on_part(entry: Entry) -> None:
            self._parted(id, entry)

        recorder = self.recorder.engines[id]
        replica = Exchange(engine, policy, self._lengths, recorder, leases, on_end, on_part)
        return Station(id, replica, watchdog, self._porter)

    def run(self) -> None:
        """Serve everybody. Whatever goes wrong in a policy's or the router's own code is a RunError."""
        try:
            self._serve()
        except (RunError, InputError):
            raise
        except Exception as error:
            raise RunError(
                f"router {type(self.router).__name__} or a policy broke at {self.now:.6f} s: {told(error)}"
            ) from error
        if self.arrivals.outstanding:
            raise RunError(self._left_behind())

    def _serve(self) -> None:
        """The main loop."""
        heap, arrivals, ready, fleet = self._heap, self.arrivals, self._ready, self.fleet
        while True:
            now = arrivals.next_time
            if heap and heap[0][0] < now:
                now = heap[0][0]
            if now == inf:
                if not self._porter.recompute_one():
                    return
                now = self.now
            elif now < self.now:
                now = self.now  # a closed loop sends the next one at once
            self.now = fleet.now = now
            while heap and heap[0][0] <= now:
                time, _, what, who = heappop(heap)
                if what != DUE:
                    self._happen(what, who)
                elif who.due == time:
                    self._turn(who)
            if self._asks:
                self._route(now)
            while arrivals.next_time <= now:
                self._arrive(now)
            while ready:
                self._begin(now)

    # -- what happens -------------------------------------------------------------------------------------

    def _turn(self, station: Station) -> None:
        """An engine is due."""
        ended = station.state == RUNNING
        if not station.turn():
            self._push(station.due, DUE, station)
            return
        self._ready.append(station)
        if not ended:
            return
        if station.replica.done:
            self._prompts_done(station)
        station.settle()

    def _prompts_done(self, station: Station) -> None:
        """The step that ended has completed prompts; those sent for that alone part when it is settled."""
        replica, seat = station.replica, self.fleet.replicas[station.id]
        for entry in replica.done:
            if self._phase[entry.id] == IN_PROMPT and not replica.passes(entry):
                self._phase[entry.id] = IN_DECODE
                self.fleet.end_prompt(entry, seat, True)
                if self._tell_prefilled:
                    self._tell_prefilled(entry, station.id, self.now)
                self._asks = True
        replica.done.clear()

    def _begin(self, now: float) -> None:
        """Engines begin their next step; whom that lets go may make the router move others."""
        for station in self._ready:
            station.begin(now)
            if station.due < inf:
                self._push(station.due, DUE, station)
        self._ready.clear()
        if self._asks:
            self._route(now)

    def _happen(self, what: int, who: Any) -> None:
        if what == WAKE:
            if self.now >= self._wake:
                self._wake = inf
                self._asks = True
        elif what == TIMER:
            self._time_is_up(*who)
        else:
            self._porter.landed(who)

    def _arrive(self, now: float) -> None:
        entry = self.arrivals.take(self._lobby)
        id = entry.id
        if self._progress and id % REPORT_EVERY == 0:
            self._progress(id)
        self.recorder.rows.arrived(entry, entry.arrival)
        if entry.prompt >= self._longest:
            self.recorder.rows.finished(entry, entry.arrival, End.REFUSED)
            self.arrivals.returned(now)
            return
        if self._patience[id] < inf:
            self._push(entry.arrival + self._patience[id], TIMER, (id, False))
        if self._abort[id] < inf:
            self._push(entry.arrival + self._abort[id], TIMER, (id, True))
        self.fleet.arrive(entry)
        if self._tell_arrived:
            self._tell_arrived(entry, now)
        self._route(now)

    def _ended(self, id: int, entry: Entry, how: End) -> None:
        """A request has left an engine for good."""
        seat, now = self.fleet.replicas[id], self.now
        served = how is End.STOPPED or how is End.LIMIT
        if self._phase[entry.id] == IN_PROMPT and not served:
            self.fleet.drop_prompt(entry, seat)
        else:
            if self._phase[entry.id] == IN_PROMPT:  # sent for its prompt alone, and that was all
                self.fleet.end_prompt(entry, seat, True)
            self.fleet.finish(entry, seat)
        self._phase[entry.id] = NOT_HERE
        del self._at[entry.id]
        self.arrivals.returned(now)
        self._asks = True
        if not served:
            self.router.left(entry, now, how)
        elif self._tell_finished:
            self._tell_finished(entry, id, now)

    def _parted(self, id: int, entry: Entry) -> None:
        """Its prompt is done, and it was sent for that alone."""
        self._phase[entry.id] = NOT_HERE
        self._porter.take(entry, self._at.pop(entry.id))
        self.fleet.end_prompt(entry, self.fleet.replicas[id], False)
        self._asks = True
        if self._tell_prefilled:
            self._tell_prefilled(entry, id, self.now)

    def _joined(self, handover: Handover) -> None:
        """It decodes at its receiver."""
        assert handover.receiver is not None
        self._at[handover.entry.id] = handover.receiver

    def _time_is_up(self, id: int, hangs_up: bool) -> None:
        """Patience has ended, or the client hangs up."""
        waiting = self.fleet.queued(id)
        if waiting is not None:
            self._leaves(waiting, End.ABORTED if hangs_up else End.ABANDONED)
        elif id in self._at:
            station = self._at[id]
            station.timers.append((self.now, id, hangs_up))
            self._reach(station)
        elif hangs_up and (handover := self._porter.drop(id)):
            if handover.receiver is None:
                self._leaves(handover.entry, End.ABORTED)
            else:
                self.fleet.finish(handover.entry, self.fleet.replicas[handover.receiver.id])
                self._gone(handover.entry, End.ABORTED)

    def _leaves(self, request: Request, how: End) -> None:
        """One who waits before the engines, or between two of them, goes away."""
        self.fleet.leave(request)
        self._gone(request, how)

    def _gone(self, request: Request, how: End) -> None:
        self._asks = True
        self.recorder.rows.finished(request, self.now, how)
        self.arrivals.returned(self.now)
        self.router.left(request, self.now, how)

    # -- what the router wants -------------------------------------------------------------------------

    def _route(self, now: float) -> None:
        """Ask until nobody is moved."""
        self._asks = False
        route, fleet = self.router.route, self.fleet
        while fleet.anybody:
            routing = route(fleet)
            if routing is STAY:
                return
            moves, reject, wake = routing
            for move in moves:
                self._move(move, now)
            for id in reject:
                self._leaves(fleet.waiting_one(id), End.REFUSED)
            if moves or reject:
                continue
            if wake < self._wake:
                if wake <= now:
                    raise RunError(
                        f"{type(self.router).__name__} asks to be woken at {wake}, but it is {now}"
                    )
                self._wake = wake
                self._push(wake, WAKE, None)
            return

    def _move(self, move: Move, now: float) -> None:
        found, seat = self.fleet.find(move)
        assert isinstance(found, Entry)  # the roster holds what it was given
        station = self.stations[move.replica]
        if move.stage is Stage.DECODE:
            self.fleet.start_decode(found, seat)
            self._phase[found.id] = IN_DECODE
            self._porter.bind(found.id, station)
        else:
            self.fleet.start_prompt(found, seat)
            self._phase[found.id] = IN_PROMPT
            self._at[found.id] = station
            found.arrival = now
            if move.stage is Stage.PREFILL:
                station.replica.send_for_prompt(found)
            station.sent.append(found)
        self._reach(station)
        if self._tell_moved:
            self._tell_moved(found, move, now)

    # -- time --------------------------------------------------------------------------------------------

    def _reach(self, station: Station) -> None:
        """Something was put at its door."""
        due = station.due
        if station.reached(self.now):
            self._ready.append(station)
        elif station.due != due:
            self._push(station.due, DUE, station)

    def _push(self, time: float, what: int, who: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, what, who))

    def _push_landing(self, time: float, handover: Handover) -> None:
        self._push(time, LANDS, handover)

    def _left_behind(self) -> str:
        """Why the run cannot go on."""
        name = type(self.router).__name__
        waiting = sum(map(len, self.fleet.queues.values())) + len(self.fleet.handoff)
        stuck = next((station for station in self.stations if station.replica.occupied), None)
        where = f"; {stuck.told()}, {stuck.replica.plan}" if stuck else ""
        return (
            f"{self.arrivals.outstanding} requests are left unserved at {self.now:.6f} s and nothing else will "
            f"happen: {waiting} wait for router {name}{where}"
        )
