"""Many engines, one router, one clock: the event loop of a fleet at token level. Read `_serve` first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf, nextafter
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.dispatch import Dispatch, simulated_rooms
from headgate.core.errors import InputError, RunError
from headgate.core.fleet import Move, RoutePolicy, Stage
from headgate.core.ledger import Entry, Ledger
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.roster import Member
from headgate.record.recorder import FleetRecorder
from headgate.sim.engine.bursts import bursts_of
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import PATIENT_DOG, REPORT_EVERY, Arrivals, arrivals_of, guarded
from headgate.sim.fleet.fleet_engine import (
    PENDING,
    READY,
    RUNNING,
    WAITS,
    FleetEngine,
    FleetReplica,
    Handover,
)
from headgate.sim.fleet.kv_handover import KvHandover, Transfer
from headgate.sim.fleet.lagged import Lagged
from headgate.workloads.workload import Workload

DECODE: Final = Stage.DECODE
PREFILL: Final = Stage.PREFILL
NO_TIME = Transfer()
BY_ID = attrgetter("id")
# When, in which order, and the engine that must be looked at then, or what else happens
Event = tuple[float, int, FleetEngine | Callable[[], object]]
TURN: Final = 64  # requests per engine until the next one's turn, where engines run one by one
OURS: Final = ("headgate.methods.", "headgate.cost.")  # code of others may share what we do not see


class Outage(NamedTuple):
    """One engine takes nothing from `start` to `end`.

    If it drains, what runs there ends there. If it fails, its requests and those whose KV it holds go back to
    the heads of their queues and are served elsewhere; KV is lost. In the stochastic network they begin anew;
    at token level the tokens they have are prefilled again with their prompt.
    """

    engine: int
    start: float
    end: float
    drain: bool = False

    def checked(self, engines: int) -> Outage:
        if not 0 <= self.engine < engines:
            raise InputError(f"an outage of engine {self.engine}; there are {engines}, numbered from 0")
        if not 0 <= self.start < self.end < inf:
            raise InputError(f"an outage from {self.start:g} to {self.end:g} s; it must end after it begins")
        return self


def check_outages(outages: Sequence[Outage], engines: int) -> None:
    last: dict[int, Outage] = {}
    for outage in sorted(outages, key=lambda outage: outage.start):
        before = last.get(outage.checked(engines).engine)
        if before is not None and outage.start < before.end:
            raise InputError(
                f"two outages of engine {outage.engine} at {outage.start:g} s; the first must end before the "
                "second begins"
            )
        last[outage.engine] = outage


class FleetSimulator:
    """Engines of one kind, each with a policy of its own, behind one router.

    An engine is touched when its step or span ends, or when something reaches it; so a request costs the
    same in a fleet of any size. At one moment steps end first, then requests come and are routed, then
    engines begin their next step.

    A request that can never fit is refused at the fleet's door. Patience counts until the first token: in
    the fleet's queue, and in an engine's. A request whose prompt is done waits for its decode as long as it
    takes (the stochastic network lets it give up), unless its client hangs up.

    Where the router can tell its choices before the run, engines run one by one; the tables are the same.

    Engines may fail, drain and come back (`outages`). The tokens a request got from a failed engine count;
    they are prefilled again with its prompt elsewhere, as after an eviction.
    """

    def __init__(
        self,
        engine: Engine,
        engines: int,
        policy: Callable[[str], BatchPolicy],
        router: RoutePolicy,
        workload: Workload,
        *,
        transfer: Transfer = NO_TIME,
        outages: Sequence[Outage] = (),
        leases: bool = True,
        watchdog: float = PATIENT_DOG,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """`policy` makes the policy of an engine from its role."""
        if engines < 1:
            raise InputError(f"{engines} engines; give at least 1")
        # the clock, what is to come, and what was recorded
        self.now = 0.0
        self.working = 0  # engines with a step under way
        self._begun = -inf  # when engines last began steps: what begins at that time has begun
        self._beginning = -1  # up to which engine, while they begin one after the other
        self._heap: list[Event] = []
        self._sequence = engines  # orders what happens at one time; ends of steps come first, by engine
        self._came = 0  # requests so far
        self._progress = progress
        kinds = [kind.name for kind in workload.kinds]
        self.arrivals = arrivals_of(workload, engine.prefix_cache)
        self.recorder = FleetRecorder(kinds, engines)
        # the requests, by number
        numbered = self.arrivals.numbered
        self._lengths: list[int] = numbered(workload.output.tolist())
        self._contents = numbered(workload.pieces()) if engine.prefix_cache else None
        self._bursts = bursts_of(engine, workload, numbered)
        self._patience: list[float] = numbered(workload.patience.tolist())
        self._abort: list[float] = numbered(workload.abort.tolist())
        self._fits = workload.prompt < engine.longest
        self._at: dict[int, FleetEngine] = {}  # where each one is
        # the router, and what lies between engines
        roles = router.roles(engines)
        if len(roles) != engines:
            raise InputError(f"{len(roles)} roles for {engines} engines; the router must give each one")
        self.dispatch = Dispatch(
            router,
            roles,
            simulated_rooms(router, engine.running),
            kinds,
            send=self._send,
            refuse=lambda request, now: self._leaves(request, End.REFUSED),
            wake=lambda time: self._push(time, lambda: self.dispatch.woken(self.now)),
        )
        self._porter = KvHandover(
            transfer.checked(),
            lands=lambda time, handover: self._push(time, partial(self._porter.landed, handover)),
            reach=self._reach,
            arrives=self._joined,
        )
        # the engines
        self._policy = policy
        self._longest, self._cost = engine.longest, engine.cost
        self._ready: list[FleetEngine] = []
        self._failing: set[int] = set()  # engines that fail when their step has ended
        self.alone: FleetEngine | None = None  # the only engine there is, while engines run one by one
        self.turn = TURN
        slots = self.dispatch.roster.replicas
        self.stations = [self._station(member, engine, leases, watchdog) for member in slots]
        self._lobby = Ledger(self.stations[0].replica.ledger.limits, 0)  # whose handles wait at no engine
        self._outages = bool(outages)
        check_outages(outages, engines)
        for outage in outages:
            self._push(outage.start, partial(self._outage, outage))
            self._push(outage.end, partial(self.dispatch.open, outage.engine))

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call it then: for what opens and closes engines while they run."""
        self._outages = True
        self._push(time, call)

    def _station(self, member: Member, engine: Engine, leases: bool, watchdog: float) -> FleetEngine:
        id = member.id

        def on_end(entry: Entry, how: End) -> None:
            del self._at[entry.id]
            self.arrivals.returned(entry.id, self.now)
            if self.alone is None:
                self.dispatch.ended(entry, id, self.now, how)

        def on_part(entry: Entry) -> None:
            self._porter.take(entry, self._at.pop(entry.id))
            self.dispatch.prompt_done(entry, id, self.now, False)

        replica = FleetReplica(
            engine,
            self._policy(member.role),
            self._lengths,
            recorder=self.recorder.engines[id],
            leases=leases,
            on_end=on_end,
            on_part=on_part,
            contents=self._contents,
            bursts=self._bursts,
        )
        member.inside = station = FleetEngine(id, replica, watchdog, self._porter, self._catch_up)
        return station

    def run(self) -> None:
        """Serve all requests. Whatever goes wrong in a policy's or the router's own code is a RunError."""
        name = type(self.dispatch.router).__name__
        guarded(self._serve_all, lambda: f"router {name} or a policy broke at {self.now:.6f} s")
        if self.arrivals.outstanding:
            raise RunError(self._left_behind())

    def _serve_all(self) -> None:
        if (ahead := self._ahead()) is None:
            self._serve(inf)
        else:
            self._serve_one_by_one(ahead)

    def _ahead(self) -> list[int] | None:
        """The engine of every request that fits, where no engine depends on another; else None."""
        arrivals, dispatch = self.arrivals, self.dispatch
        if arrivals.closed or self._outages or type(dispatch) is not Dispatch:
            return None
        policies = [station.replica.policy for station in self.stations]
        policies = [policy.inner if isinstance(policy, Lagged) else policy for policy in policies]
        apart = len({id(policy) for policy in policies}) == len(policies)
        known = all(type(part).__module__.startswith(OURS) for part in (*policies, self._cost))
        return dispatch.router.ahead(int(self._fits.sum())) if apart and known else None

    def _serve_one_by_one(self, ahead: list[int]) -> None:
        """Each engine by itself, because a CPU's caches hold one engine and not hundreds.

        In turns, so that all engines of a run that is interrupted have come about as far.
        """
        whole, engines = self.arrivals, self.stations
        parts = shares(whole, len(engines), self._fits, ahead)
        for until in (*whole.times[:: self.turn * len(engines)][1:], inf):
            for station, share in zip(engines, parts, strict=True):
                self.alone, self._begun = station, -inf
                self.arrivals, self._heap, self.now = share, share.events, share.now
                self._serve(until)
                share.now = self.now
        self.now = max(share.now for share in parts)
        whole.outstanding = sum(share.outstanding for share in parts)
        self.arrivals = whole

    def _serve(self, until: float) -> None:
        heap, arrivals, ready, dispatch = self._heap, self.arrivals, self._ready, self.dispatch
        while (now := self._next()) < until:
            self.now = dispatch.roster.now = now
            while heap and heap[0][0] <= now:
                time, _, what = heappop(heap)
                if not isinstance(what, FleetEngine):
                    what()
                elif what.due == time:
                    self._turn(what)
            now = self.now
            if dispatch.pending:
                dispatch.route(now)
            while arrivals.next_time <= now:
                self._arrive(now)
            while ready:
                self._begin(now)
            self._begun = now
            if not self.working:
                self._unblock()

    def _next(self) -> float:
        heap, now = self._heap, self.arrivals.next_time
        while heap:
            time, _, what = heap[0]
            if isinstance(what, FleetEngine) and what.due != time:
                heappop(heap)  # out of date: something reached that engine
                continue
            if time < now:
                now = time
            break
        return now if now > self.now else self.now  # a closed loop sends the next one at once

    def _unblock(self) -> None:
        """Memory full of KV that waits has brought every engine to a stop: some of it goes."""
        porter, ready = self._porter, self._ready
        while porter.may_block and not self.working and any(one.lacks_memory for one in self.stations):
            if not porter.recompute_one():
                return
            while ready:
                self._begin(self.now)

    def _turn(self, station: FleetEngine) -> None:
        if station.state == PENDING:
            station.run_until(inf)
            end, heap = station.due, self._heap
            others = bool(self._ready) or self.dispatch.pending  # have something to do before that
            if others or self.arrivals.next_time <= end or (heap and heap[0][0] <= end):
                self._push_due(station)
                return
            self.now = self.dispatch.roster.now = end
        ended = station.state == RUNNING
        station.wake()
        self._ready.append(station)
        if ended:
            self.working -= 1
            replica = station.replica
            if replica.done:
                for entry in replica.done:
                    if self.alone is None and not replica.passes(entry):
                        self.dispatch.prompt_done(entry, station.id, self.now)
                replica.done.clear()
            station.settle()
            if station.id in self._failing:
                self._fail(station)

    def _begin(self, now: float) -> None:
        heap, ready = self._heap, self._ready
        if len(ready) > 1:
            ready.sort(key=BY_ID)  # not in the order in which they were pushed, which leases change
        for station in ready:
            self._beginning = station.id
            station.begin(now)
            if station.due < inf:
                heappush(heap, (station.due, station.id, station))
                self.working += station.state != WAITS
        ready.clear()
        self._begun, self._beginning = now, -1
        if self.dispatch.pending:
            self.dispatch.route(now)

    def _arrive(self, now: float) -> None:
        entry = self.arrivals.take(self._lobby)
        id = entry.id
        if self._progress and self._came % REPORT_EVERY == 0:
            self._progress(self._came)
        self._came += 1
        self.recorder.rows.arrived(entry, entry.arrival)
        if entry.prompt >= self._longest:
            self.recorder.rows.finished(entry, entry.arrival, End.REFUSED)
            self.arrivals.returned(id, now)
            return
        if self._patience[id] < inf:
            self._push(entry.arrival + self._patience[id], partial(self._time_is_up, id, False))
        if self._abort[id] < inf:
            self._push(entry.arrival + self._abort[id], partial(self._time_is_up, id, True))
        if self.alone is None:
            self.dispatch.arrived(entry, now)
        else:
            self._put(entry, self.alone)

    def _send(self, entry: Request, move: Move) -> None:
        assert isinstance(entry, Entry)  # the roster holds what it was given
        _, engine, stage = move
        station = self.stations[engine]
        if stage is DECODE:
            self._porter.bind(entry.id, station)
            self._reach(station)
            return
        if stage is PREFILL:
            station.replica.send_for_prompt(entry)
        self._put(entry, station)

    def _put(self, entry: Entry, station: FleetEngine) -> None:
        entry.queued = self.now
        self._at[entry.id] = station
        station.sent.append(entry)
        self._reach(station)

    def _joined(self, handover: Handover) -> None:
        assert handover.receiver is not None
        self._at[handover.entry.id] = handover.receiver

    def _time_is_up(self, id: int, hangs_up: bool) -> None:
        waiting = self.dispatch.roster.waiting.get(id)
        if waiting is not None:
            if waiting.generated and not hangs_up:
                return  # it has its first token and waits because its engine failed
            self._leaves(waiting, End.ABORTED if hangs_up else End.ABANDONED)
        elif id in self._at:
            station = self._at[id]
            station.timers.append((self.now, id, hangs_up))
            self._reach(station)
        elif hangs_up and (handover := self._porter.drop(id)):
            if handover.receiver is None:
                self._leaves(handover.entry, End.ABORTED)
            else:
                self._close(handover.entry, End.ABORTED)
                self.dispatch.ended(handover.entry, handover.receiver.id, self.now, End.ABORTED)

    def _outage(self, outage: Outage) -> None:
        """An engine fails or drains. The step under way when it fails is its last."""
        station = self.stations[outage.engine]
        self.dispatch.close(station.id)
        if outage.drain:
            return
        self._failing.add(station.id)
        station.news = True
        self._reach(station)
        if station.state == READY:
            self._fail(station)

    def _fail(self, station: FleetEngine) -> None:
        """Its requests go back to the heads of their queues; it will come back empty, with a new policy."""
        self._failing.discard(station.id)
        door = {entry.id: entry for entry in station.sent}
        known = station.replica.ledger.known
        here = [door.get(id) or known(id) for id, where in self._at.items() if where is station]
        timers, station.timers = station.timers, []
        station.sent.clear()
        for entry in here:
            station.replica.lose(entry)
            del self._at[entry.id]
        on_their_way = self._porter.lose(station)
        for entry in on_their_way:
            entry.todo = entry.prompt + entry.generated
            entry.wasted += entry.todo - 1
            entry.evictions += 1
            if entry.last_token is not None:
                self.recorder.rows.last_before[entry.id] = entry.last_token
        for entry in sorted((*here, *on_their_way), key=lambda entry: -entry.id):
            self.dispatch.returned(entry, self.now)
        for _, id, hangs_up in timers:
            self._time_is_up(id, hangs_up)
        station.replica.take_over(self._policy(self.dispatch.roster.member(station.id).role))

    def _leaves(self, request: Request, how: End) -> None:
        self._close(request, how)
        self.dispatch.left(request, self.now, how)

    def _close(self, request: Request, how: End) -> None:
        self.recorder.rows.finished(request, self.now, how)
        self.arrivals.returned(request.id, self.now)

    def _reach(self, station: FleetEngine) -> None:
        due = station.due
        if station.reached(self._under_way(station)):
            self._ready.append(station)
        elif station.due != due:
            self._push_due(station)

    def _catch_up(self, station: FleetEngine) -> None:
        station.run_until(self._under_way(station))
        self._push_due(station)

    def _under_way(self, station: FleetEngine) -> float:
        """The step under way in a span ends then or later: the next one has begun if its turn was before."""
        begun = self._begun == self.now or station.id <= self._beginning
        return nextafter(self.now, inf) if begun else self.now

    def _push_due(self, station: FleetEngine) -> None:
        """In the order of engines, because one that jumps over steps is pushed at other times."""
        heappush(self._heap, (station.due, station.id, station))

    def _push(self, time: float, call: Callable[[], object]) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, call))

    def _left_behind(self) -> str:
        name, roster = type(self.dispatch.router).__name__, self.dispatch.roster
        waiting = sum(map(len, roster.queues.values())) + len(roster.handoff)
        stuck = next((station for station in self.stations if station.replica.occupied), None)
        where = f"; {stuck.one_line()}, {stuck.replica.plan}" if stuck else ""
        return (
            f"{self.arrivals.outstanding} requests are left unserved at {self.now:.6f} s and nothing else "
            f"will happen: {waiting} wait for router {name}{where}"
        )


class EngineShare(Arrivals):
    """Some requests of a workload under their own numbers, and where the engine stands that serves them."""

    def __init__(self, whole: Arrivals, known: list[tuple[Any, ...]], numbers: list[int]) -> None:
        self.total, self.sent, self.outstanding = len(numbers), 0, 0
        self.times, self.cached, self.closed = whole.times, whole.cached, False
        self.rows: list[int] = []
        self._known, self._numbers = known, numbers
        self.now = 0.0
        self.events: list[Event] = []
        self._look_ahead()

    def take(self, ledger: Ledger) -> Entry:
        id = self._numbers[self.sent]
        self.sent += 1
        self.outstanding += 1
        self._look_ahead()
        return self._handle(ledger, id, self.times[id], self._known[id])

    def _look_ahead(self) -> None:
        self.next_time = self.times[self._numbers[self.sent]] if self.sent < self.total else inf


def shares(whole: Arrivals, engines: int, fits: NDArray[np.bool_], chosen: list[int]) -> list[EngineShare]:
    """One for each engine. `chosen` are the engines of requests that fit; the first refuses the others."""
    of = np.zeros(len(fits), np.int64)
    of[fits] = chosen
    ends = np.cumsum(np.bincount(of, minlength=engines))
    parts = np.split(np.argsort(of, kind="stable"), ends[:-1])
    known = list(whole.known)
    return [EngineShare(whole, known, part.tolist()) for part in parts]
