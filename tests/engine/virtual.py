"""vLLM's real scheduler in virtual time: made-up tokens, and steps that take what they cost."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from oracle import admitted
from schedulers import EngineShape, request, scheduler
from vllm.v1.outputs import ModelRunnerOutput

from headgate.core.policy import BatchPolicy
from headgate.core.view import View
from headgate.cost.model import Shape
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Arrivals
from headgate.workloads.workload import Workload
from worlds import Relay

GOES_ON, STOPS = 5, 7  # tokens
MOST_STEPS = 50_000


class Step(NamedTuple):
    """One step: when, who decoded, and (request, first position, tokens) of every piece of a prompt."""

    start: float
    end: float
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int, int], ...]


class Asked(Relay):
    """Passes everything on and remembers that it was asked."""

    def __init__(self, inner: BatchPolicy) -> None:
        super().__init__(inner)
        self.asked = False

    def plan(self, view: View) -> Any:
        self.asked = True
        return self.inner.plan(view)


class Virtual:
    """One engine, one policy, one workload, as the simulator has them; `run` gives every step."""

    def __init__(
        self, engine: Engine, policy: BatchPolicy, workload: Workload, caching: bool = False
    ) -> None:
        self.shape = shape = EngineShape(
            block=engine.block,
            blocks=engine.kv_tokens // engine.block,
            running=engine.running,
            budget=engine.batch_tokens,
            longest=engine.longest,
            caching=caching,
        )
        self.engine = engine
        self.now = 0.0
        self.policy = Asked(policy)
        self.scheduler = made = scheduler(shape, {"policy": "mixed", "watchdog": "1000000000s"})
        made._headgate.clock = made._headgate_books.wall = lambda: self.now
        terms = made._headgate_books._promises
        kinds = [workload.kinds[kind] for kind in workload.kind.tolist()]

        def promised(request):
            kind = kinds[int(request.request_id)]
            return terms(request)._replace(kind=kind.name, slo=kind.slo)

        made._headgate_books._promises = promised
        made._headgate.origin = 0.0
        made._headgate.take_over(self.policy)
        self.ledger = made._headgate.ledger
        self.arrivals = Arrivals(workload)
        self.lengths: list[int] = workload.output.tolist()
        self.steps: list[Step] = []
        self.half_done: set[str] = set()  # admitted, and have not brought a token since

    def run(self) -> list[Step]:
        """Serve everybody."""
        for _ in range(MOST_STEPS):
            while self.arrivals.next_time <= self.now:
                self._arrive()
            if self.scheduler.has_unfinished_requests():
                self._step()
            elif self.arrivals.pending:
                self.now = max(self.now, self.arrivals.next_time)
            else:
                return self.steps
        raise AssertionError(f"{MOST_STEPS} steps were not enough")

    def _arrive(self) -> None:
        entry, engine = self.arrivals.take(self.ledger), self.engine
        prompt = self._prompt(entry.id, entry.prompt)
        self.scheduler.add_request(
            request(str(entry.id), prompt, entry.limit, engine.block, stops=(STOPS,), arrival=entry.arrival)
        )

    def _prompt(self, id: int, tokens: int) -> list[int]:
        return [1] * tokens

    def _token(self, name: str, generated: int) -> int:
        """The next one of an output; the last is the one that stops it."""
        return STOPS if generated + 1 == self.lengths[int(name)] else GOES_ON

    def _step(self) -> None:
        self.policy.asked = False
        output = self.scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        if scheduled:
            self._run(output)
        self._tell(output)
        if scheduled or not self.policy.asked:
            return
        plan = self.scheduler._headgate.plan
        if not (plan.evict or output.preempted_req_ids):
            self.now = max(self.now, min(self.arrivals.next_time, plan.until.time))
            assert self.now < inf, f"nothing runs and nothing else will happen: {plan}"

    def _run(self, output: Any) -> None:
        """Time passes: as long as the step's shape costs."""
        requests, scheduled = self.scheduler.requests, output.num_scheduled_tokens
        decodes, chunks, context, behind = [], [], 0, 0
        self.half_done |= set(admitted(output))
        for name, tokens in scheduled.items():
            computed = requests[name].num_computed_tokens - tokens
            if name in self.half_done:
                chunks.append((int(name), computed + 1, tokens))
                behind += computed
            else:
                decodes.append(int(name))
                context += requests[name].num_tokens
            if not requests[name].is_prefill_chunk:
                self.half_done.discard(name)
        prefill = sum(tokens for _, _, tokens in chunks)
        start = self.now
        self.now = start + self.engine.cost.seconds(Shape(len(decodes), context, prefill, behind))
        self.steps.append(Step(start, self.now, tuple(sorted(decodes)), tuple(chunks)))

    def _tell(self, output: Any) -> None:
        """Made-up tokens."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            token = self._token(name, request.num_output_tokens)
            sampled.append([] if request.is_prefill_chunk else [token])
        result = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.arrivals.returned(0, self.now)  # of one loop: which does not matter
