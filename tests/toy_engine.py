"""An engine in the manner of vLLM, small enough to be obviously right, with a policy inside through Live.

It keeps its own truth (queues, blocks, tokens), composes a step from the plan and what it can do, and may
compose the next one before the tokens of this one are known (`ahead`). It may refuse prompts at random,
and clients may hang up at random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headgate.core.ledger import Entry
from headgate.core.plan import ALL, NONE, Plan
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.core.view import Limits
from headgate.cost.model import Chunk as Piece
from headgate.cost.model import Shape
from headgate.live.engine.events import PromptPiece, StepInFlight
from headgate.live.engine.live import Live
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload


@dataclass(eq=False)
class Job:
    """A request as the engine knows it."""

    entry: Entry
    output: int
    known: int  # prompt and output tokens
    computed: int = 0
    in_flight: int = 0
    is_prompt: bool = True


class ToyEngine:
    """Serves a workload step by step; `ahead` composes one step early, `fickle` refuses at random."""

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy | None,
        workload: Workload,
        observers: tuple[Observer, ...] = (),
        ahead: bool = False,
        fickle: Random | None = None,
        watchdog: float = 1e9,
        hangs_up: Random | None = None,
        kind: Callable[[int], str] = lambda row: "",
    ) -> None:
        self.engine, self.workload, self.ahead, self.fickle = engine, workload, ahead, fickle
        self.hangs_up, self.kind = hangs_up, kind
        self.gone: set[int] = set()
        self.time = 0.0
        limits = Limits(engine.batch_tokens, engine.running, engine.block)
        self.blocks = engine.kv_tokens // engine.block
        whole = self.blocks * engine.block
        self.live = Live(
            policy, limits, whole, observers, lambda: self.time, watchdog, self.evict, self.reject
        )
        self.jobs: dict[int, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.row = 0
        self.served: dict[int, int] = {}

    # -- truth ------------------------------------------------------------------------------------

    def of(self, tokens: int) -> int:
        return -(-tokens // self.engine.block)

    @property
    def free(self) -> int:
        return self.blocks - sum(self.of(job.computed) for job in self.running)

    def receive(self) -> None:
        workload = self.workload
        while self.row < len(workload) and workload.arrival[self.row] <= self.time:
            row, self.row = self.row, self.row + 1
            prompt = int(workload.prompt[row])
            if prompt >= self.engine.longest:  # the front end refuses it
                continue
            arrival, limit, guess = (
                column[row].item() for column in (workload.arrival, workload.limit, workload.guess)
            )
            guess = None if guess < 0 else guess
            entry = Entry(self.live.ledger, row, arrival, prompt, limit, self.kind(row), guess)
            whole = min(int(workload.output[row]), entry.limit, self.engine.longest - prompt)
            job = self.jobs[row] = Job(entry, whole, prompt)
            self.waiting.append(job)
            self.live.arrive(entry)

    def evict(self, entry: Entry) -> None:
        job = self.jobs[entry.id]
        self.running.remove(job)
        job.known += job.in_flight  # its token in flight is delivered all the same
        job.in_flight = job.computed = 0
        job.is_prompt = True
        self.waiting.appendleft(job)
        self.live.evicted(entry)

    # -- the loop -----------------------------------------------------------------------------------

    def run(self, most: int = 5_000) -> None:
        """Serve everybody, in a bounded number of steps."""
        air: deque[tuple[StepInFlight, list[tuple[Job, int]], float]] = deque()
        free_at = 0.0  # when the processor is done with all that was composed
        for _ in range(most):
            self.receive()
            if not (self.waiting or self.running or air):
                if self.row == len(self.workload):
                    return
                self.time = float(self.workload.arrival[self.row])
                continue
            step = self.compose() if self.waiting or self.running else None
            if step is not None:
                flight, batch, seconds = step
                free_at = max(free_at, self.time) + seconds
                air.append((flight, batch, free_at))
            if self.hangs_up and self.jobs and self.hangs_up.random() < 0.2:
                self.hang_up(self.hangs_up.choice([*self.jobs.values()]))
            if air and (step is None or not self.ahead or len(air) == 2):
                flight, batch, end = air.popleft()
                self.time = end
                self.deliver(flight, batch)
            elif step is None:
                self.wait()
        raise AssertionError("it never ends")

    def wait(self) -> None:
        """Nothing can run: to the next arrival, or to the end of the lease."""
        plan, later = self.live.plan, []
        if self.row < len(self.workload):
            later.append(float(self.workload.arrival[self.row]))
        if plan is not None and self.time < plan.until.time < 1e18:
            later.append(plan.until.time)
        self.time = min(later, default=self.time + 1.0)

    def compose(self) -> tuple[StepInFlight, list[tuple[Job, int]], float] | None:
        live, ledger = self.live, self.live.ledger
        plan = live.begin(self.free * self.engine.block, self.free < len(self.running))
        if plan is None:
            plan = Plan(ALL, (*ledger.prefilling, *ledger.waiting))
        decodes, preempted = self.decodes(plan)
        budget = int(min(plan.budget, self.engine.batch_tokens)) - len(decodes)
        growth = sum(self.of(job.computed + 1) - self.of(job.computed) for job in decodes)
        prompts = [] if preempted else self.prompts(plan, int(min(budget, plan.chunk)), growth)
        chunks, context, batch = [], sum(job.known + job.in_flight for job in decodes), []
        for job in decodes:
            job.computed += 1
            job.in_flight += 1
            batch.append((job, 1))
        for job, tokens in prompts:
            left = job.known - job.computed
            chunks.append(PromptPiece(job.entry, tokens, job.computed - tokens, left))
            if not left:
                job.in_flight, job.is_prompt = 1, False
            batch.append((job, int(left == 0)))
        ids = [job.entry.id for job in decodes]
        flight = live.ran(tuple(chunks), len(decodes), ids)
        if flight is None:
            return None
        prefill, behind = sum(c.tokens for c in chunks), sum(c.behind for c in chunks)
        parts = tuple(Piece(c.behind, c.tokens, not c.left) for c in chunks)
        return flight, batch, self.engine.cost.seconds(Shape(len(decodes), context, prefill, behind, parts))

    def decodes(self, plan: Plan) -> tuple[list[Job], bool]:
        chosen, preempted = [], False
        if plan.decode is NONE:
            return chosen, preempted
        wanted = [job for job in self.running if not job.is_prompt]
        wanted = [
            job for job in wanted if job.computed - job.entry.prompt + 1 < job.output
        ]  # sure to be over
        if plan.decode is not ALL:
            wanted = [job for job in wanted if job.entry.id in plan.decode]
        spare = self.free
        for job in wanted:
            if job not in self.running:
                continue
            need = self.of(job.computed + 1) - self.of(job.computed)
            while need > spare and job in self.running:
                victim = self.running[-1]
                if victim in chosen:
                    chosen.remove(victim)
                    spare += self.of(victim.computed + 1) - self.of(victim.computed)
                spare += self.of(victim.computed)
                self.evict(victim.entry)
                preempted = True
            if job in self.running:
                spare -= need
                chosen.append(job)
        return chosen, preempted

    def prompts(self, plan: Plan, room: int, growth: int) -> list[tuple[Job, int]]:
        found = []
        growth = sum(
            self.of(job.computed + 1) - self.of(job.computed) for job in self.running if not job.is_prompt
        )
        spare = self.free - (growth if plan.decode is not NONE else 0)
        for id in plan.prefill:
            job = self.jobs.get(id)
            if room <= 0:
                break
            if job is None or not job.is_prompt:  # it left, or is done, within the lease
                continue
            if job not in self.running:
                full = len(self.running) >= self.engine.running or self.of(job.known) > spare
                if full or (self.fickle and self.fickle.random() < 0.3):
                    break
                self.waiting.remove(job)
                self.running.append(job)
                self.live.admitted(job.entry, 0)
            tokens = min(room, job.known - job.computed)
            need = self.of(job.computed + tokens) - self.of(job.computed)
            if need > spare:
                if not found:
                    self.evict(self.running[-1].entry)
                break
            spare -= need
            room -= tokens
            job.computed += tokens
            found.append((job, tokens))
        return found

    def deliver(self, flight: StepInFlight, batch: list[tuple[Job, int]]) -> None:
        live = self.live
        live.done(flight, (self.blocks - self.free) * self.engine.block)
        for job, tokens in batch:
            if job.entry.id not in self.jobs or not tokens:
                continue
            if job.in_flight:
                job.in_flight -= 1
                job.known += 1
            if job.known - job.entry.prompt >= job.output:
                self.finish(job)

    def finish(self, job: Job) -> None:
        self.served[job.entry.id] = job.known - job.entry.prompt
        self.leave(job, End.STOPPED)

    def hang_up(self, job: Job) -> None:
        self.gone.add(job.entry.id)
        self.leave(job, End.ABORTED)

    def reject(self, entry: Entry) -> None:
        self.gone.add(entry.id)
        self.leave(self.jobs[entry.id], End.REFUSED)

    def leave(self, job: Job, how: End) -> None:
        del self.jobs[job.entry.id]
        (self.running if job in self.running else self.waiting).remove(job)
        self.live.ledger.recount(job.entry, job.known - job.entry.prompt)
        self.live.left(job.entry, how)
