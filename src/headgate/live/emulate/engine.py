"""An engine without a GPU: the simulator's own engine, stepped against a clock. Read `run` first."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from headgate.core.errors import RunError, one_line
from headgate.core.ledger import Entry
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.kv.prefix import Pieces
from headgate.live.emulate.clock import Alarm, Clock
from headgate.live.emulate.job import Job
from headgate.live.emulate.memory import Memory
from headgate.live.emulate.streams import Streams
from headgate.live.emulate.tally import Tally
from headgate.sim.engine.asynchronous import Ahead
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import Replica

LOG = logging.getLogger("headgate.emulate")


class Lengths(dict[int, int]):
    """True output lengths of the jobs inside, by request number."""


class Contents(dict[int, Pieces]):
    """What the jobs inside share with others, by request number."""


class EmulatedEngine:
    """One engine in emulated time. Jobs come by `submit` and go by `abort`; both are felt at the next step.

    The loop is the simulator's: receive, ask, advance, settle. It differs in two places: it advances by one
    step at a time, because who comes next is not known, and it waits until the step has ended. With a virtual
    clock and jobs given beforehand the schedule is the simulator's to the last bit.
    """

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        clock: Clock,
        *,
        asynchronous: bool = False,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.limits, self.clock = engine, clock
        self.tally = Tally(engine.longest)
        self.streams = Streams(self.tally)
        self._lengths = Lengths()
        hear = (self.streams, *observers)
        self._contents = Contents()
        kind = Ahead if asynchronous else Replica
        self.replica: Replica = kind(
            engine,
            policy,
            self._lengths,  # type: ignore[arg-type]
            hear,
            contents=self._contents,  # type: ignore[arg-type]
        )
        self.memory = Memory(self.replica)
        self.dead: str | None = None
        self.crash_at = inf  # output tokens
        self.on_crash: Callable[[], None] = lambda: None
        self._inbox: list[tuple[float, int, Job]] = []  # a heap by arrival
        self._order = self._number = 0
        self._gone: deque[Job] = deque()
        self._changed = False  # memory has come free, or somebody waits for some
        self._timers: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self.on_keep: Callable[[Job], None] = lambda job: None
        self._alarm: Alarm | None = None
        self._held = asyncio.Event()
        self._held.set()
        self._outside: set[Job] = set()  # submitted, not yet in the replica's queue

    # -- called by the front ----------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self.replica.ledger.decoding) + len(self.replica.ledger.prefilling)

    @property
    def waiting(self) -> int:
        return len(self.replica.ledger.waiting) + len(self._outside)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, those kept for other engines included."""
        blocks = self.replica.blocks
        return 1 - blocks.free / blocks.total

    def submit(self, job: Job, arrival: float | None = None) -> None:
        """A job comes, now or (for a virtual clock) at a given time."""
        if self.dead is not None:
            job.error, job.how = self.dead, End.ABORTED
            job.sink.end(job)
            return
        now = self.replica.now if self.clock.virtual else self.clock.now()
        job.arrival = now if arrival is None else max(arrival, 0.0)
        self._outside.add(job)
        if job.loaded:
            self.memory.expect(job)
            self._changed = True
        else:
            self._queue(job, job.arrival)
        self.ring()

    def abort(self, job: Job) -> None:
        """Its client has gone; seat and KV come free at the end of the step under way."""
        if job.how is None:
            self._gone.append(job)
            self.ring()

    def release(self, id: int) -> bool:
        """KV kept for another engine may go; False: it has gone already."""
        released = self.memory.release(id)
        self._changed = self._changed or released
        self.ring()
        return released

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Do something at an emulated time, between two steps."""
        self._order += 1
        heappush(self._timers, (when, self._order, do))
        self.ring()

    def ring(self) -> None:
        """Something has changed outside: look at once if the engine is idle."""
        if self._alarm is not None:
            self._alarm.ring()

    def hold(self) -> None:
        """Take jobs in, run nothing until `go`."""
        self._held.clear()

    def go(self) -> None:
        self._held.set()

    # -- the loop ----------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. An engine whose policy fails is dead, as vLLM's is."""
        self._alarm = Alarm()
        try:
            while True:
                await self._held.wait()
                await self._turn()
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:
            name = type(self.replica.policy).__name__
            self.die(str(error) if isinstance(error, RunError) else f"policy {name} broke: {one_line(error)}")
        finally:
            alarm, self._alarm = self._alarm, None
            alarm.close()

    def die(self, why: str) -> None:
        """Every job fails, and every later one will."""
        LOG.error("the emulated engine is dead: %s", why)
        self.dead = why
        outside, self._outside = self._outside, set()
        self._inbox.clear()
        for job in outside:
            job.error, job.how = why, End.ABORTED
            job.sink.end(job)
        self.streams.fail(why)

    async def _turn(self) -> None:
        """One round of the simulator's loop."""
        replica = self.replica
        self._receive(replica.now)
        if replica.lease.ended:
            if not replica.occupied:
                self._hand_out()
                await self._idle(self._next())
                return
            replica.ask()
        if replica.advance(replica.now):
            late = await self.clock.until(replica.now, self._bell())
            self.tally.late.add(max(0.0, late))
            replica.settle()
            self._hand_out()
            self.tally.written.add(max(0.0, self.clock.late(replica.now)))
        elif replica.asked_now:
            self._hand_out()
            await self._idle(min(self._next(), replica.plan.until.time))

    def _hand_out(self) -> None:
        for job in self.streams.flush():
            self._lengths.pop(job.id, None)
            self._contents.pop(job.id, None)
            if job.export and job.how in (End.STOPPED, End.LIMIT):
                self.memory.keep(job)
                self.on_keep(job)
        if self.tally.generation_tokens >= self.crash_at:
            self.crash_at = inf
            self.on_crash()

    async def _idle(self, until: float) -> None:
        """Nothing can run before that moment, unless something comes or goes."""
        replica, clock = self.replica, self.clock
        if self.memory.unblock():
            return
        while not self._changed and not self._gone:
            moment = min(until, self._next())
            now = moment if clock.virtual else clock.now()
            if moment <= now and moment < inf:
                replica.now = max(replica.now, moment)
                if clock.virtual:
                    await clock.until(replica.now, self._bell())
                break
            await self._bell().sleep((moment - now) / clock.speed if moment < inf else inf)
        else:
            if not clock.virtual:
                replica.now = max(replica.now, clock.now())
        self._changed = False
        replica.lease.ended = True

    def _bell(self) -> Alarm:
        assert self._alarm is not None
        return self._alarm

    def _next(self) -> float:
        """When the next thing happens that is already known."""
        arrival = self._inbox[0][0] if self._inbox else inf
        timer = self._timers[0][0] if self._timers else inf
        if (
            self.clock.virtual
            and timer > self.replica.now
            and not (self.replica.occupied or self.memory.busy)
        ):
            timer = inf  # nobody waits for it: a virtual clock would jump there before anything else comes
        return min(arrival, self.memory.next_time, timer)

    # -- comings and goings ----------------------------------------------------------------------

    def _queue(self, job: Job, when: float) -> None:
        self._order += 1
        heappush(self._inbox, (when, self._order, job))

    def _receive(self, now: float) -> None:
        """Who has come by now joins the queue; who has gone leaves; KV that has come is here."""
        while self._gone:
            self._leave(self._gone.popleft(), now)
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2]()
        if self.memory.busy:
            for job in self.memory.landed(now):
                self._queue(job, job.arrival)
        while self._inbox and self._inbox[0][0] <= now:
            job = heappop(self._inbox)[2]
            if job.how is None:
                self._enter(job)

    def _enter(self, job: Job) -> None:
        self._outside.discard(job)
        job.id = self._number
        self._number += 1
        entry = Entry(
            self.replica.ledger, job.id, job.arrival, job.prompt, job.limit, job.kind, job.guess,
            job.priority, job.slo,
        )  # fmt: skip
        if job.loaded:
            entry.todo, entry.cached = job.prompt - job.loaded, job.loaded
        job.entry = entry
        self._lengths[job.id] = job.length
        job.content = job.content or ((-1 - job.id, job.prompt),)
        self._contents[job.id] = job.content
        self.streams.jobs[job.id] = job
        self.replica.receive(entry)

    def _leave(self, job: Job, now: float) -> None:
        if job.how is not None:
            return
        entry = None if job.entry is None else self.replica.ledger.find(job.id)
        if entry is not None:
            self.replica.leave(entry, now, End.ABORTED)
        elif job.entry is None:
            self._outside.discard(job)
            self.memory.forget(job)
            job.how, job.finished = End.ABORTED, now
            self.tally.ended(job)
            job.sink.end(job)
