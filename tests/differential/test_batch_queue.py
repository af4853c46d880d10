"""The asynchronous engine against a plain model of vLLM's loop: a queue of two batches, step after step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import ALL, Plan
from headgate.core.policy import BatchPolicy
from headgate.core.view import View
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape
from headgate.experiment.library import simulate
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload

GPU = WorkTerms(constant=0.5, per_token=0.01, per_decode=0.03, per_context=0.001)
HOSTS = (
    HostTerms(0.0),
    HostTerms(0.1, 0.05, prompts=0.7, ungraphed=2.5, graph=12),
    HostTerms(3.0, 0.2, prompts=1.0),  # the host is what one waits for
)


class Plain(BatchPolicy):
    """Everybody there is a slot for; the engine's own budget cuts. `Mixed` leaves out those it does not need,
    and counts those whose last token is on its way among the decodes of the next step."""

    def plan(self, view: View) -> Plan:
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        return Plan(ALL, (*view.prefilling, *[*view.waiting][: max(0, slots)]))


@dataclass
class Asked:
    """A request as vLLM's scheduler keeps it."""

    id: int
    arrival: float
    prompt: int
    output: int
    limit: int
    computed: int = 0  # tokens scheduled so far
    placeholders: int = 0  # output tokens that were scheduled and not seen
    seen: list[float] = field(default_factory=list)


class Core:
    """What vLLM 0.26's engine core does with its batch queue, for memory without end.

    It fills a queue of two first and comes back at once while that is not full; else it waits for the
    oldest batch and books it. Input is looked at between two calls.
    """

    def __init__(self, requests: list[Asked], slots: int, budget: int, host: HostTerms) -> None:
        self.coming = deque(sorted(requests, key=lambda each: (each.arrival, each.id)))
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.queue: deque[tuple[float, list[Asked]]] = deque()
        self.slots, self.budget, self.host, self.gpu = slots, budget, host, WorkCost(GPU)
        self.now = self.gpu_free = 0.0

    def serve(self) -> None:
        """Until nobody is left."""
        while self.coming or self.waiting or self.running or self.queue:
            if not (self.waiting or self.running or self.queue):
                self.now = max(self.now, self.coming[0].arrival)
            while self.coming and self.coming[0].arrival <= self.now:
                self.waiting.append(self.coming.popleft())
            self.step()

    def step(self) -> None:
        """One call of it."""
        if self.waiting or self.running:
            self.queue.append(self.launch())
            if len(self.queue) < 2:
                return
        done, sampled = self.queue.popleft()
        self.now = max(self.now, done)
        for each in sampled:
            each.placeholders -= 1
            if len(each.seen) == each.output:
                continue  # its sequence had ended, and nobody gets this token
            each.seen.append(self.now)
            if len(each.seen) == each.output:
                self.running.remove(each)

    def launch(self) -> tuple[float, list[Asked]]:
        """Compose a batch, launch it, and say when the GPU will have done it."""
        chunks = self.schedule()
        if not chunks:
            return self.now, []
        prompts = [(each, n) for each, n in chunks if each.computed < each.prompt]
        context = sum(each.computed + 1 for each, _ in chunks if each.computed >= each.prompt)
        pieces = tuple(Chunk(each.computed, n, each.computed + n == each.prompt) for each, n in prompts)
        behind, tokens = sum(each.computed for each, _ in prompts), sum(n for _, n in prompts)
        shape = Shape(len(chunks) - len(prompts), context, tokens, behind, pieces)
        begun, self.now = self.now, self.now + self.host.seconds(shape)
        done = self.gpu_free = max(max(self.gpu_free, begun) + self.gpu.seconds(shape), self.now)
        for each, n in chunks:
            each.computed += n
            each.placeholders += each.computed >= each.prompt
        return done, [each for each, _ in chunks if each.computed >= each.prompt]

    def schedule(self) -> list[tuple[Asked, int]]:
        """Who runs, for how many tokens: those with a slot, then the queue."""
        room, chunks = self.budget, []
        for each in self.running:
            if each.placeholders and len(each.seen) + each.placeholders >= each.limit:
                continue  # all its tokens are on their way
            n = min(room, each.prompt - each.computed if each.computed < each.prompt else 1)
            if n > 0:
                chunks.append((each, n))
                room -= n
        while self.waiting and len(self.running) < self.slots and room > 0:
            each = self.waiting.popleft()
            self.running.append(each)
            chunks.append((each, min(room, each.prompt)))
            room -= min(room, each.prompt)
        return chunks


@pytest.mark.parametrize("host", HOSTS, ids=["no host", "host", "slow host"])
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.2, 1.1, 9.0]), st.integers(1, 30), st.sampled_from([1, 2, 3, 9]),
            st.sampled_from([0, 0, 1, 50]),
        ),
        min_size=1, max_size=12,
    ),
    slots=st.integers(1, 5),
    budget=st.integers(12, 40),
)  # fmt: skip
def test_every_token_is_seen_when_vllms_loop_sees_it(host, rows, slots, budget):
    arrival = list(accumulate(row[0] for row in rows))
    prompt, output = [row[1] for row in rows], [row[2] for row in rows]
    limit = [row[2] + row[3] for row in rows]  # the sequence ends before it, or with it
    asked = [Asked(n, *row) for n, row in enumerate(zip(arrival, prompt, output, limit, strict=True))]
    Core(asked, slots, budget, host).serve()
    engine = Engine(WorkCost(GPU, host), 16000, 800, budget, slots, 16).checked()
    workload = Workload.of(prompt, output, arrival=arrival, limit=limit)
    run = simulate(engine, Plain(), workload, asynchronous=True)
    assert run.requests["first_token"].tolist() == pytest.approx([each.seen[0] for each in asked])
    assert run.requests["finished"].tolist() == pytest.approx([each.seen[-1] for each in asked])
