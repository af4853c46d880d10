"""An engine without a GPU: the simulator's own, stepped against a clock. Read `EmulatedEngine.run` first."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Protocol

import numpy as np

from headgate.core.errors import RunError, one_line
from headgate.core.ledger import Entry
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.request import NO_SLO, Request
from headgate.kv.prefix import Pieces
from headgate.live.emulate.clock import Alarm, Clock
from headgate.live.emulate.text import Text
from headgate.live.engine.tally import ClassTally
from headgate.sim.engine.asynchronous import Ahead
from headgate.sim.engine.bursts import Bursts, drawn_rates
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.fleet.kv_handover import Transfer

LOG = logging.getLogger("headgate.emulate")
MOST_SEED = 2**63 - 1


class EmulatedEngine:
    """Jobs come by `submit` and go by `abort`; both are felt at the next step. The loop is the simulator's,
    but one step at a time, and it waits for its end. With a virtual clock and jobs given beforehand the
    schedule is the simulator's to the last bit.
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
        self.tally, self.by_class = EngineTally(engine.longest), ClassTally()
        self.streams = Streams(self.tally, engine.width)
        self._lengths: dict[int, int] = {}  # true output lengths of the jobs inside
        self._contents: dict[int, Pieces] = {}  # what they share with others
        self._accepts: dict[int, float] = {}  # how often drafts of theirs are accepted
        self._seeds: dict[int, int] = {}
        bursts: Bursts | None = None
        if engine.speculation:
            bursts = Bursts(engine, self._accepts, self._seeds, asynchronous)  # type: ignore[arg-type]
        kind = Ahead if asynchronous else VirtualEngine
        self.replica: VirtualEngine = kind(
            engine,
            policy,
            self._lengths,  # type: ignore[arg-type]
            (self.streams, self.by_class, *observers),
            contents=self._contents,  # type: ignore[arg-type]
            bursts=bursts,
        )
        self.memory = KvMemory(self.replica)
        self.dead: str | None = None
        self.crash_at = inf  # output tokens
        self.on_crash: Callable[[], None] = lambda: None
        self._inbox: list[tuple[float, int, EmulatedJob]] = []  # a heap by arrival
        self._order = self._number = 0
        self._gone: deque[EmulatedJob] = deque()
        self._changed = False  # memory has come free, or a request waits for some
        self._timers: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self.on_keep: Callable[[EmulatedJob], None] = lambda job: None
        self._alarm: Alarm | None = None
        self.begun = asyncio.Event()  # cleared, nothing runs
        self.begun.set()
        self._outside: set[EmulatedJob] = set()  # submitted, not yet in the replica's queue
        self.renew: Callable[[float], BatchPolicy | None] = lambda now: None  # asked between two steps

    @property
    def now(self) -> float:
        return self.replica.now if self.clock.virtual else self.clock.now()

    @property
    def running(self) -> int:
        return len(self.replica.ledger.decoding) + len(self.replica.ledger.prefilling)

    @property
    def waiting(self) -> int:
        return len(self.replica.ledger.waiting) + len(self._outside)

    @property
    def kv_usage(self) -> float:
        blocks = self.replica.blocks
        return 1 - blocks.free / blocks.total

    def submit(self, job: EmulatedJob, arrival: float | None = None) -> None:
        if self.dead is not None:
            job.fail(self.dead)
            return
        job.arrival = self.now if arrival is None else max(arrival, 0.0)
        self._outside.add(job)
        if job.loaded:
            self.memory.wanted.append(job)
            self._changed = True
        else:
            self._queue(job, job.arrival)
        self.ring()

    def abort(self, job: EmulatedJob) -> None:
        """Its client has gone; slot and KV come free at the end of the step under way."""
        if job.how is None:
            self._gone.append(job)
            self.ring()

    def release(self, id: int) -> bool:
        released = self.memory.release(id)
        self._changed = self._changed or released
        self.ring()
        return released

    def at(self, when: float, do: Callable[[], object]) -> None:
        self._order += 1
        heappush(self._timers, (when, self._order, do))
        self.ring()

    def ring(self) -> None:
        if self._alarm is not None:
            self._alarm.ring()

    def look(self) -> None:
        self._changed = True
        self.ring()

    async def run(self) -> None:
        """Serve until cancelled. An engine whose policy fails is dead, as vLLM's is."""
        self._alarm = alarm = Alarm()
        try:
            while True:
                await self.begun.wait()
                await self._turn(alarm)
        except asyncio.CancelledError:
            raise
        except (Exception, SystemExit) as error:
            name = type(self.replica.policy).__name__
            self.die(str(error) if isinstance(error, RunError) else f"policy {name} broke: {one_line(error)}")
        finally:
            self._alarm = None
            alarm.close()

    def die(self, why: str) -> None:
        LOG.error("the emulated engine is dead: %s", why)
        self.dead = why
        outside, self._outside = self._outside, set()
        self._inbox.clear()
        for job in outside:
            job.fail(why)
        self.streams.fail(why)

    async def _turn(self, alarm: Alarm) -> None:
        replica = self.replica
        if (policy := self.renew(replica.now)) is not None:
            replica.take_over(policy)
        self._receive(replica.now)
        if replica.lease.ended:
            if not replica.occupied:
                self._hand_out()
                await self._idle(self._next(), alarm)
                return
            replica.ask()
        if replica.advance(replica.now):
            late = await self.clock.until(replica.now, alarm)
            self.tally.late.add(max(0.0, late))
            replica.settle()
            self._hand_out()
            self.tally.written.add(max(0.0, self.clock.late(replica.now)))
        elif replica.asked_now:
            self._hand_out()
            await self._idle(min(self._next(), replica.plan.until.time), alarm)

    def _hand_out(self) -> None:
        for job in self.streams.flush():
            for known in (self._lengths, self._contents, self._accepts, self._seeds):
                known.pop(job.id, None)
            if job.export and job.how in (End.STOPPED, End.LIMIT):
                self.memory.keep(job)
                self.on_keep(job)
        if self.tally.generation_tokens >= self.crash_at:
            self.crash_at = inf
            self.on_crash()

    async def _idle(self, until: float, alarm: Alarm) -> None:
        replica, clock = self.replica, self.clock
        if self.memory.unblock():
            return
        while not self._changed and not self._gone:
            moment = min(until, self._next())
            now = moment if clock.virtual else clock.now()
            if moment <= now and moment < inf:
                replica.now = max(replica.now, moment)
                if clock.virtual:
                    await clock.until(replica.now, alarm)
                break
            await alarm.sleep((moment - now) / clock.speed if moment < inf else inf)
        else:
            if not clock.virtual:
                replica.now = max(replica.now, clock.now())
        self._changed = False
        replica.lease.ended = True

    def _next(self) -> float:
        arrival = self._inbox[0][0] if self._inbox else inf
        timer = self._timers[0][0] if self._timers else inf
        idle = not (self.replica.occupied or self.memory.busy)
        if self.clock.virtual and timer > self.replica.now and idle:
            timer = inf  # no request waits for it: a virtual clock would jump there before any comes
        return min(arrival, self.memory.next_time, timer)

    def _queue(self, job: EmulatedJob, when: float) -> None:
        self._order += 1
        heappush(self._inbox, (when, self._order, job))

    def _receive(self, now: float) -> None:
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

    def _enter(self, job: EmulatedJob) -> None:
        self._outside.discard(job)
        job.id = self._number
        self._number += 1
        entry = Entry(
            self.replica.ledger, job.id, job.arrival, job.prompt, job.limit, job.kind, job.guess,
            job.priority, job.slo, job.tenant,
        )  # fmt: skip
        if job.loaded:
            entry.todo, entry.cached = job.prompt - job.loaded, job.loaded
        job.entry = entry
        self._lengths[job.id] = job.length
        job.content = job.content or ((-1 - job.id, job.prompt),)
        self._contents[job.id] = job.content
        if speculation := self.limits.speculation:  # the same prompt has the same on every engine
            seed = self._seeds[job.id] = (job.mark << 8 | job.choice) & MOST_SEED
            chance = np.random.default_rng((seed, 1))  # not the stream that its bursts are drawn from
            self._accepts[job.id] = float(drawn_rates(speculation.of(job.kind), chance, 1)[0])
        self.streams.jobs[job.id] = job
        self.replica.receive(entry)

    def _leave(self, job: EmulatedJob, now: float) -> None:
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


class Sink(Protocol):
    """What gets the tokens of a job. Called by the engine at the moment the tokens are there."""

    streams: bool  # False: only the end matters

    def tokens(self, job: EmulatedJob) -> None:
        """It has more tokens than before, and will have more."""

    def end(self, job: EmulatedJob) -> None:
        """It has all the tokens it will get; `job.how` says why."""


class EmulatedJob:
    """`length` is the true output, which no policy sees; `limit` is the client's max_tokens. `loaded` prompt
    tokens come with KV from another engine; with `export`, a name, the KV stays when the job has ended.
    `cached` prompt tokens were found in the prefix cache when it was admitted, as its `content` allows.
    """

    __slots__ = (
        "admitted", "arrival", "cached", "choice", "content", "entry", "error", "events", "evictions",
        "export", "finished", "first", "guess", "how", "id", "kind", "length", "limit", "loaded", "made",
        "mark", "newest", "priority", "prompt", "sent", "sink", "slo", "steps", "stop_reason", "stops",
        "sums", "tenant", "text",
    )  # fmt: skip

    def __init__(self, prompt: int, length: int, limit: int, text: Text, sink: Sink, choice: int = 0) -> None:
        self.prompt, self.length, self.limit = prompt, length, limit
        self.text, self.sink, self.choice = text, sink, choice
        self.mark = 0  # fingerprint of the prompt
        self.kind, self.slo, self.guess, self.priority, self.tenant = "", NO_SLO, None, 0, ""
        self.loaded = self.cached = 0
        self.content: Pieces = ()  # nothing: it shares with no other
        self.export = ""
        self.stops = False  # it ends with EOS or a stop string, not by its limit
        self.stop_reason: str | int | None = None
        self.id = -1  # arrival number at its engine
        self.entry: Entry | None = None
        self.arrival = self.admitted = self.first = self.newest = self.finished = -1.0  # emulated seconds
        self.made = self.sent = self.evictions = 0
        self.events: list[bytes] = []  # of its next tokens, ready to be written, the next one last
        self.sums: list[int] | None = None  # tokens after each step since its prompt, where that differs
        self.steps = 0  # of these, with tokens handed out
        self.how: End | None = None
        self.error: str | None = None  # the engine failed it

    guess: int | None

    def fail(self, error: str | None) -> None:
        self.error, self.how = error, End.ABORTED
        self.sink.end(self)

    @property
    def reason(self) -> str:
        if self.error is not None:
            return "error"
        if self.how is End.STOPPED and self.stops:
            return "stop"
        return "length" if self.how in (End.STOPPED, End.LIMIT) else "abort"


class Streams(Observer):
    """Decodes that share the engine's tick are only a set; jobs that do not stream are counted only."""

    def __init__(self, tally: EngineTally, width: int = 1) -> None:
        self._drafts = width - 1
        self.jobs: dict[int, EmulatedJob] = {}  # all inside the engine
        self._tally = tally
        self._rolling: dict[int, EmulatedJob] = {}  # get a token with every tick
        self._due: list[EmulatedJob] = []  # streaming jobs with tokens from the step that has just ended
        self._ended: list[EmulatedJob] = []
        self._shared = -1.0  # when the last tick was
        self._fresh: list[EmulatedJob] = []  # rolling ones whose newest token did not come with that tick

    def admitted(self, request: Request, now: float) -> None:
        job = self.jobs[request.id]
        if job.admitted < 0:
            job.admitted = now
            self._tally.admitted(job, request.cached)

    def stepped(self, steps: Steps) -> None:
        now = steps.ends[-1]
        self._tally.stepped(steps)
        if not steps.decodes or not self._rolling:
            return
        if self._drafts:
            self._tally.drafts += len(self._rolling)
            self._tally.draft_tokens += self._drafts * len(self._rolling)
        else:
            self._tally.generation_tokens += len(self._rolling)
        gaps, fresh = self._tally.inter_token_latency, self._fresh
        self._fresh = []
        for job in fresh:
            gaps.add(now - job.newest)
        if len(self._rolling) > len(fresh):
            gaps.add(now - self._shared, len(self._rolling) - len(fresh))
        self._shared = now
        self._due = [*self._due, *self._rolling.values()] if self._due else list(self._rolling.values())

    def prefilled(self, request: Request, now: float) -> None:
        job = self.jobs[request.id]
        if self._drafts:
            deliveries = None if job.entry is None else job.entry.deliveries
            job.sums, job.steps = None if deliveries is None else deliveries.sums, 0
        else:
            self._tally.generation_tokens += 1
        if job.first < 0:
            job.first = now
            self._tally.time_to_first_token.add(now - job.arrival)
        else:
            self._tally.inter_token_latency.add(now - job.newest)
        job.newest = now
        self._rolling[job.id] = job
        self._fresh.append(job)
        self._due.append(job)

    def held(self, request: Request, now: float) -> None:
        self._stop(request.id)

    def resumed(self, request: Request, now: float) -> None:
        job = self.jobs[request.id]
        self._rolling[job.id] = job
        self._fresh.append(job)

    def evicted(self, request: Request, now: float) -> None:
        self.jobs[request.id].evictions += 1
        self._tally.preemptions += 1
        self._stop(request.id)

    def finished(self, request: Request, now: float, how: End) -> None:
        job = self.jobs.pop(request.id)
        self._stop(job.id)
        job.how, job.finished = how, now
        if self._drafts and request.generated > job.made:
            self._count(request.generated - job.made)
        job.made = max(job.made, request.generated)
        self._ended.append(job)

    def _count(self, burst: int) -> None:
        self._tally.generation_tokens += burst
        self._tally.accepted_tokens += burst - 1

    def flush(self) -> list[EmulatedJob]:
        due, ended = self._due, self._ended
        self._due, self._ended = [], []
        for job in due:
            if job.how is None:
                burst = 1
                if (sums := job.sums) is not None:
                    step, job.steps = job.steps, job.steps + 1
                    burst = sums[step] - sums[step - 1] if 0 < step < len(sums) else 1
                job.made += burst
                if self._drafts:
                    self._count(burst)
                if job.sink.streams:
                    job.sink.tokens(job)
        for job in ended:
            self._tally.ended(job)
            job.sink.end(job)
        return ended

    def fail(self, error: str) -> None:
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.fail(error)
        self._rolling.clear()

    def _stop(self, id: int) -> None:
        job = self._rolling.pop(id, None)
        if job is None:
            return
        if job in self._fresh:
            self._fresh.remove(job)
        elif self._shared > job.newest:
            job.newest = self._shared


class KvMemory:
    """A prompt done for another engine keeps its blocks until they have been read or their lease ends. A
    request that comes with its KV takes blocks before the copy begins, and joins the queue when it is
    complete: with one prompt token left to compute, as in vLLM.
    """

    def __init__(self, replica: VirtualEngine) -> None:
        self._replica = replica
        self._kept: dict[int, int] = {}  # job number to blocks
        self.wanted: deque[EmulatedJob] = deque()  # their KV has no blocks here yet
        self._copies: list[tuple[float, int, EmulatedJob]] = []  # a heap by the end of the copy
        self._order = 0
        self.copy = Transfer(0.002, 147456 / 50e9)

    @property
    def busy(self) -> bool:
        return bool(self.wanted or self._copies)

    @property
    def next_time(self) -> float:
        return self._copies[0][0] if self._copies else inf

    # -- for other engines

    def keep(self, job: EmulatedJob) -> None:
        assert job.entry is not None
        need = self._kept[job.id] = self._replica.blocks.of(job.prompt)
        self._replica.keep(job.entry, job.content, job.prompt + 1, need)

    def release(self, id: int) -> bool:
        need = self._kept.pop(id, None)
        if need is not None:
            self._replica.release(id, need)
        return need is not None

    # -- from other engines

    def landed(self, now: float) -> list[EmulatedJob]:
        blocks, ledger = self._replica.blocks, self._replica.ledger
        while self.wanted:
            job = self.wanted[0]
            need = blocks.of(job.loaded)
            if need > blocks.total:
                job.loaded = 0  # it will be refused
            elif need > blocks.free - ledger.rolling:
                break
            blocks.take(need if job.loaded else 0)
            self.wanted.popleft()
            self._order += 1
            heappush(self._copies, (max(now, job.arrival) + self.copy.seconds(job.loaded), self._order, job))
        done = []
        while self._copies and self._copies[0][0] <= now:
            done.append(heappop(self._copies)[2])
        return done

    def forget(self, job: EmulatedJob) -> None:
        if job in self.wanted:
            self.wanted.remove(job)
            return
        copies = [each for each in self._copies if each[2] is not job]
        if len(copies) < len(self._copies):
            self._copies = sorted(copies)
            self._replica.blocks.give(self._replica.blocks.of(job.loaded))
            self._replica.lease.ended = True

    def unblock(self) -> bool:
        """Nothing runs because KV that waits for a slot fills the memory: the newest is computed again."""
        ledger, blocks = self._replica.ledger, self._replica.blocks
        head = next(iter(ledger.waiting.values()), None)
        if head is None or ledger.decoding or ledger.prefilling or blocks.of(head.room) <= blocks.free:
            return False
        for entry in reversed(ledger.waiting.values()):
            if held := entry.held_kv:
                blocks.give(blocks.of(held))
                entry.wasted += held
                entry.todo, entry.cached = entry.prompt + entry.generated, 0
                self._replica.lease.ended = True
                return True
        return False


# -- counters and histograms, in vLLM's categories

SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
         40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
LATE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def rows(self) -> list[tuple[str, float]]:
        names = (*map(str, self.bounds), "+Inf")
        return [(name, float(total)) for name, total in zip(names, accumulate(self.counts), strict=True)]

    def quantile(self, share: float) -> float:
        totals = list(accumulate(self.counts))
        place = bisect_left(totals, max(1, share * totals[-1]))
        return (*self.bounds, inf)[place] if totals[-1] else 0.0


def token_bounds(most: int) -> tuple[float, ...]:
    steps = (float(base * 10**power) for power in range(12) for base in (1, 2, 5))
    return tuple(bound for bound in steps if bound <= most)


class EngineTally:
    def __init__(self, model_len: int) -> None:
        tokens = token_bounds(model_len)
        self.time_to_first_token = Histogram(FIRST)
        self.inter_token_latency = Histogram(BETWEEN)
        self.time_per_output_token = Histogram(BETWEEN)
        self.e2e, self.queue, self.inference = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.prefill, self.decode = Histogram(SECONDS), Histogram(SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.prompt_length, self.output_length = Histogram(tokens), Histogram(tokens)
        self.max_tokens, self.computed = Histogram(tokens), Histogram(tokens)
        self.output_most = Histogram(tokens)
        self.choices = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.preemptions_each = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.late, self.written = Histogram(LATE), Histogram(LATE)
        self.step_seconds = 0.0
        self.prompt_tokens = self.loaded_tokens = self.generation_tokens = self.preemptions = self.steps = 0
        self.cache_queries = self.cache_hits = self.cached_tokens = 0
        self.drafts = self.draft_tokens = self.accepted_tokens = 0  # of decode steps that speculate
        self.ended_by: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.rejected: Counter[str] = Counter(max_num_queued_reqs=0, max_num_queued_tokens=0)
        self.nixl: Counter[str] = Counter()

    def stepped(self, steps: Steps) -> None:
        self.steps += len(steps.ends)
        self.step_seconds += steps.ends[-1] - steps.start
        self.step_tokens.add(float(steps.decodes + steps.prefill))

    def admitted(self, job: EmulatedJob, found: int) -> None:
        if not job.loaded:
            job.cached = found
            self.cache_queries += job.prompt
            self.cache_hits += found

    def ended(self, job: EmulatedJob) -> None:
        reason = job.reason
        self.ended_by[reason] += 1
        if job.first < 0 or reason in ("abort", "error"):
            return
        self.prompt_tokens += job.prompt
        self.loaded_tokens += job.loaded
        self.cached_tokens += job.cached
        self.prompt_length.add(job.prompt)
        self.computed.add(job.prompt - job.loaded - job.cached)
        self.output_length.add(job.made)
        self.max_tokens.add(job.limit)
        self.output_most.add(job.limit)
        self.choices.add(1)
        self.preemptions_each.add(job.evictions)
        decode = job.finished - job.first
        self.e2e.add(job.finished - job.arrival)
        self.queue.add(job.admitted - job.arrival)
        self.prefill.add(job.first - job.admitted)
        self.decode.add(decode)
        self.inference.add(job.finished - job.admitted)
        if job.made > 1:
            self.time_per_output_token.add(decode / (job.made - 1))
