"""The stochastic network of the gate-and-route paper: a fleet whose phases are drawn, not stepped.

All decodes of an engine advance together, at solo or at mixed speed, so each engine has one counter of
tokens per slot, and a request that joins knows at which count it will end. A change of speed touches the
counter, not the requests: the cost of an event depends neither on the engines nor on the slots. Exponential
phases make this the Markov chain of section 2.3; any other law works too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any

from headgate.core.dispatch import Dispatch
from headgate.core.errors import InputError, RunError
from headgate.core.fleet import CLOSED, FleetObserver, Move, Room, RoutePolicy, Stage, room
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.roster import Member
from headgate.methods.fluid.flows import Instance
from headgate.sim.fleet.fleet import Outage, check_outages
from headgate_papers.network.counts import HANDOFF, MIXED, PREFILLING, SOLO, WAITING, Counts, Page, Window
from headgate_papers.network.job import DECODING, GONE, IN_PREFILL, WAITS_DECODE, WAITS_PROMPT, Clock, Job
from headgate_papers.network.outages import lose_all
from headgate_papers.network.source import Block, Source

PROMPT_DONE, DUE, GIVES_UP, DROPS, WAKE, OUTAGE = range(6)


class Network:
    """Runs a router against a source of requests; `windows` and `books` say what happened."""

    def __init__(
        self,
        instance: Instance,
        engines: int,
        router: RoutePolicy,
        source: Source,
        outages: Sequence[Outage] = (),
    ) -> None:
        slots = instance.pace.slots
        if engines < 1:
            raise InputError(f"{engines} engines; give at least 1")
        if slots < 2:
            raise InputError(f"{slots} slots per engine; give at least 2, one for a prompt beside a decode")
        self.instance, self.engines, self.router = instance, engines, router
        self.kinds = [flow.name for flow in instance.flows]
        self._dispatch = Dispatch(
            router,
            router.roles(engines),
            self._room,
            self.kinds,
            self._send,
            self._turn_away,
            self._push_wake,
        )
        self.fleet = self._dispatch.roster
        self.books = Counts(len(self.kinds))
        self.events = 0
        self._fast, self._slow = instance.pace.solo_speed, 1 / instance.pace.mixed_step
        self._clocks = [Clock(self.fleet, self._fast) for _ in range(engines)]
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._source = source
        self._sent = 0
        self._turn_page()
        check_outages(outages, engines)
        for outage in outages:
            self._push(outage.start, OUTAGE, outage)
            self._push(outage.end, OUTAGE, outage)
        listens = type(router)
        self._tell_arrived = None if listens.arrived is FleetObserver.arrived else router.arrived
        self._tell_finished = None if listens.finished is FleetObserver.finished else router.finished

    def run(self, until: float = inf, marks: Iterable[float] = ()) -> list[Page]:
        """Go on to that time, or until nobody is left; the books at each mark on the way, and at the end."""
        pages: list[Page] = []
        pending = sorted(mark for mark in marks if self.fleet.now <= mark < until)[::-1]
        mark = pending.pop() if pending else inf
        heap = self._heap
        while True:
            now = self._arrival
            if heap and heap[0][0] < now:
                now = heap[0][0]
            if now > until or now == inf:
                break
            while now > mark:
                pages.append(self.books.page(mark))
                mark = pending.pop() if pending else inf
            self.fleet.now = now
            self.events += 1
            if now == self._arrival:
                self._arrive(now)
            else:
                _, _, what, who = heappop(heap)
                if self._happen(now, what, who):
                    self._dispatch.route(now)
                    if what == PROMPT_DONE and who.state == WAITS_DECODE and who.decode_patience < inf:
                        self._push(now + who.decode_patience, DROPS, who)
        self._end(until)
        while mark < inf:
            pages.append(self.books.page(mark))
            mark = pending.pop() if pending else inf
        return [*pages, self.books.page(self.fleet.now)]

    def windows(self, until: float, marks: Iterable[float]) -> list[Window]:
        """Run, and the windows between marks; what happens before the first mark is warm-up."""
        pages = self.run(until, marks)
        self.books.check()
        return [Window(self.instance, self.engines, first, last) for first, last in pairwise(pages)]

    # -- what happens ----------------------------------------------------------------------------------

    def _arrive(self, now: float) -> None:
        place, block = self._next, self._block
        kind = block.kind[place]
        job = Job(self._sent, self.instance, kind, now, block, place)
        self._sent += 1
        self._next += 1
        if self._next == len(block.time):
            self._turn_page()
        else:
            self._arrival = block.time[self._next]
        self.fleet.arrive(job)
        self.books.counts["arrivals"][kind] += 1
        self.books.enter(WAITING, kind, now)
        if self._tell_arrived:
            self._tell_arrived(job, now)
        self._dispatch.route(now)
        if job.state == WAITS_PROMPT and job.patience < inf:
            self._push(now + job.patience, GIVES_UP, job)

    def _happen(self, now: float, what: int, who: Any) -> bool:
        """One event; False if it is out of date and nothing happened."""
        if what == DUE:
            return self._decode_done(now, who)
        if what == PROMPT_DONE:
            return who.state == IN_PREFILL and who.done_at == now and self._prompt_done(now, who)
        if what == OUTAGE:
            self._outage(now, who)
            return True
        if what == WAKE:
            self._dispatch.woken(now)
            return True
        if who.state != (WAITS_PROMPT if what == GIVES_UP else WAITS_DECODE):
            return False
        self._leaves(now, who, End.ABANDONED)
        return True

    def _prompt_done(self, now: float, job: Job) -> bool:
        member, kind, books = job.member, job.number, self.books
        clock = self._clocks[member.id]
        books.counts["prompts_done"][kind] += 1
        self.fleet.end_prompt(job, member, job.whole)
        if not member.prompts:
            decodes = list(member.decoding.values())
            decodes[kind] -= job.whole  # it joins only now
            books.switch(decodes, False, now)
            clock.set_speed(now, self._fast)
            self._schedule(clock)
        self.router.prefilled(job, member.id, now)
        if job.whole:
            self._join(job, member, now, PREFILLING)
        else:
            job.state = WAITS_DECODE
            books.move(PREFILLING, HANDOFF, kind, now)
        return True

    def _decode_done(self, now: float, clock: Clock) -> bool:
        if clock.due != now:
            return False
        clock.due = inf
        if clock.next_end() > now:  # the engine was slowed down since this was set
            self._schedule(clock)
            return False
        _, _, job = heappop(clock.ends)
        member, kind, books = job.member, job.number, self.books
        mixed = member.prompts > 0
        books.counts["mixed_done" if mixed else "solo_done"][kind] += 1
        books.leave(MIXED if mixed else SOLO, kind, now)
        self.fleet.finish(job, member)
        job.state = GONE
        self._schedule(clock)
        if self._tell_finished:
            self._tell_finished(job, member.id, now)
        return True

    def _leaves(self, now: float, job: Job, how: End) -> None:
        level, count = (WAITING, "gave_up") if job.state == WAITS_PROMPT else (HANDOFF, "dropped")
        self.books.counts["rejected" if how is End.REFUSED else count][job.number] += 1
        self.books.leave(level, job.number, now)
        self.fleet.leave(job)
        job.state = GONE
        self.router.left(job, now, how)

    def _turn_away(self, request: Request, now: float) -> None:
        self._leaves(now, _job(request), End.REFUSED)

    # -- what the router wants -------------------------------------------------------------------------

    def _send(self, request: Request, move: Move) -> None:
        job, member, now, books = _job(request), self.fleet.replicas[move.replica], self.fleet.now, self.books
        kind = job.number
        job.member = member
        if move.stage is Stage.DECODE:
            self._join(job, member, now, HANDOFF)
            return
        books.counts["prompts_started"][kind] += 1
        books.move(WAITING, PREFILLING, kind, now)
        job.state, job.whole = IN_PREFILL, move.stage is Stage.WHOLE
        if member.prompts == 1:
            books.switch(member.decoding.values(), True, now)
            self._clocks[member.id].set_speed(now, self._slow)
            self._schedule(self._clocks[member.id])
        job.done_at = now + job.seconds
        self._push(job.done_at, PROMPT_DONE, job)

    def _room(self, role: str) -> Room:
        return room(role, self.instance.pace.slots)

    def _outage(self, now: float, outage: Outage) -> None:
        """An engine fails, drains or comes back."""
        member = self.fleet.replicas[outage.engine]
        if now >= outage.end:
            self.fleet.set_room(member.id, self._room(member.role))
        else:
            self.fleet.set_room(member.id, CLOSED)
            if not outage.drain:
                for job in lose_all(self.fleet, self.books, self._clocks[member.id], member, now):
                    self.fleet.take_back(job)
                    self.router.returned(job, now)
                    if job.patience < inf:
                        self._push(now + job.patience, GIVES_UP, job)
                self._clocks[member.id].set_speed(now, self._fast)
        self.router.engines_changed(self.fleet)

    def _join(self, job: Job, member: Member, now: float, out: int) -> None:
        """Its first token is under way."""
        clock, kind, mixed = self._clocks[member.id], job.number, member.prompts > 0
        self.books.counts["mixed_started" if mixed else "solo_started"][kind] += 1
        self.books.move(out, MIXED if mixed else SOLO, kind, now)
        job.state = DECODING
        job.clock, job.end = clock, clock.count(now) + job.output
        heappush(clock.ends, (job.end, job.id, job))
        self._schedule(clock)

    # -- time ------------------------------------------------------------------------------------------

    def _schedule(self, clock: Clock) -> None:
        """Its next end, if that is sooner than what is set; a later one is noticed when that comes."""
        end = clock.next_end()
        if end < clock.due:
            clock.due = end
            self._push(end, DUE, clock)

    def _push(self, time: float, what: int, who: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, what, who))

    def _push_wake(self, time: float) -> None:
        self._push(time, WAKE, None)

    def _turn_page(self) -> None:
        block = self._source.next_block()
        self._block: Block = block or Block([], [], [], [], [], [])
        self._next = 0
        self._arrival = self._block.time[0] if self._block.time else inf

    def _end(self, until: float) -> None:
        """Time is over, or everybody has gone: nobody may be left behind."""
        if until < inf:
            self.fleet.now = until
            return
        left = len(self.fleet.handoff) + sum(map(len, self.fleet.queues.values()))
        if left:
            raise RunError(f"{type(self.router).__name__} leaves {left} requests unserved and nothing runs")


def _job(request: Request) -> Job:
    """The roster holds what it was given."""
    assert isinstance(request, Job)
    return request
