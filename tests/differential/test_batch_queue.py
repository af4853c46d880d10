"""The asynchronous engine against a plain model of vLLM's loop: a queue of two batches, step after step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import ALL, Plan
from headgate.core.policy import BatchPolicy
from headgate.core.view import View
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape
from headgate.experiment.library import simulate
from headgate.record.tables import Run
from headgate.sim.engine.bursts import Bursts, bursts_of
from headgate.sim.engine.engine import Engine, Speculation
from headgate.stats.gaps import Gaps
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
    computed: int = 0  # prompt tokens scheduled so far
    got: int = 0  # output tokens, those on their way included
    flying: int = 0  # steps that are on their way, each with at least one token of it
    decoded: int = 0  # decode steps it was in
    seen: list[float] = field(default_factory=list)
    deliveries: list[float] = field(default_factory=list)


class Core:
    """What vLLM 0.26's engine core does with its batch queue, for memory without end.

    It fills a queue of two first and comes back at once while that is not full; else it waits for the
    oldest batch and books it. Input is looked at between two calls. With drafts a decode takes `width` tokens
    of the budget and gets what its `bursts` have for the step; when the step is composed nobody knows how
    much the step before brings, but that it is one token at least.
    """

    def __init__(
        self,
        requests: list[Asked],
        slots: int,
        budget: int,
        cost: WorkCost,
        bursts: Bursts | None = None,
    ) -> None:
        self.coming = deque(sorted(requests, key=lambda each: (each.arrival, each.id)))
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []
        self.queue: deque[tuple[float, list[tuple[Asked, int]]]] = deque()
        self.slots, self.budget = slots, budget
        self.host, self.gpu, self.width, self.bursts = cost.host, cost.unhosted(), cost.width, bursts
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
        for each, tokens in sampled:
            each.flying -= 1
            if len(each.seen) < each.output:
                each.deliveries.append(self.now)
            for _ in range(tokens):
                if len(each.seen) == each.output:
                    break  # its sequence had ended, and nobody gets this token
                each.seen.append(self.now)
                if len(each.seen) == each.output:
                    self.running.remove(each)

    def launch(self) -> tuple[float, list[tuple[Asked, int]]]:
        """Compose a batch, launch it, and say when the GPU will have done it."""
        chunks = self.schedule()
        if not chunks:
            return self.now, []
        prompts = [(each, n) for each, n in chunks if each.computed < each.prompt]
        context = sum(each.prompt + each.got for each, _ in chunks if each.computed >= each.prompt)
        pieces = tuple(Chunk(each.computed, n, each.computed + n == each.prompt) for each, n in prompts)
        behind, tokens = sum(each.computed for each, _ in prompts), sum(n for _, n in prompts)
        shape = Shape(len(chunks) - len(prompts), context, tokens, behind, pieces)
        begun, self.now = self.now, self.now + self.host.seconds(shape, self.width)
        done = self.gpu_free = max(max(self.gpu_free, begun) + self.gpu.seconds(shape), self.now)
        return done, [(each, tokens) for each, n in chunks if (tokens := self.brings(each, n))]

    def brings(self, each: Asked, n: int) -> int:
        """Output tokens of it that this step brings."""
        if each.computed < each.prompt:
            each.computed += n
            tokens = int(each.computed == each.prompt)
        else:
            drawn = None if self.bursts is None else self.bursts.draw(each.id, each.decoded + 1)
            tokens = 1 if drawn is None else int(drawn[each.decoded])
            each.decoded += 1
        each.flying += tokens > 0
        each.got = min(each.got + tokens, each.output)
        return tokens

    def schedule(self) -> list[tuple[Asked, int]]:
        """Who runs, for how many tokens: those with a slot, then the queue."""
        room, chunks = self.budget, []
        for each in self.running:
            if each.flying and len(each.seen) + each.flying >= each.limit:
                continue  # all its tokens are on their way
            n = min(room, each.prompt - each.computed if each.computed < each.prompt else self.width)
            if n > 0:
                chunks.append((each, n))
                room -= n
        while self.waiting and len(self.running) < self.slots and room > 0:
            each = self.waiting.popleft()
            self.running.append(each)
            chunks.append((each, min(room, each.prompt)))
            room -= min(room, each.prompt)
        return chunks


Rows = list[tuple[float, int, int, int]]
ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.2, 1.1, 9.0]), st.integers(1, 30), st.sampled_from([1, 2, 3, 9, 24]),
        st.sampled_from([0, 0, 1, 50]),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def both(rows: Rows, engine: Engine) -> tuple[list[Asked], Run]:
    """The same requests through vLLM's loop and through the simulator."""
    arrival = list(accumulate(row[0] for row in rows))
    prompt, output = [row[1] for row in rows], [row[2] for row in rows]
    limit = [row[2] + row[3] for row in rows]  # the sequence ends before it, or with it
    asked = [Asked(n, *row) for n, row in enumerate(zip(arrival, prompt, output, limit, strict=True))]
    workload = Workload.of(prompt, output, arrival=arrival, limit=limit)
    bursts = bursts_of(engine, workload, lambda values: values)
    Core(asked, engine.running, engine.batch_tokens, engine.cost, bursts).serve()
    return asked, simulate(engine, Plain(), workload, asynchronous=True)


@pytest.mark.parametrize("host", HOSTS, ids=["no host", "host", "slow host"])
@given(rows=ROWS, slots=st.integers(1, 5), budget=st.integers(12, 40))
def test_every_token_is_seen_when_vllms_loop_sees_it(host, rows, slots, budget):
    engine = Engine(WorkCost(GPU, host), 16000, 800, budget, slots, 16).checked()
    asked, run = both(rows, engine)
    assert run.requests["first_token"].tolist() == pytest.approx([each.seen[0] for each in asked])
    assert run.requests["finished"].tolist() == pytest.approx([each.seen[-1] for each in asked])


@pytest.mark.parametrize("host", HOSTS, ids=["no host", "host", "slow host"])
@given(
    rows=ROWS,
    slots=st.integers(1, 5),
    room=st.integers(12, 40),
    drafts=st.sampled_from([1, 3, 5]),
    accept=st.sampled_from([Acceptance(0.0), Acceptance(0.7), Acceptance(1.0), Acceptance(0.6, 2.0)]),
)
def test_every_burst_is_seen_when_vllms_loop_sees_it(host, rows, slots, room, drafts, accept):
    terms = DraftTerms(drafts, draft=0.05, draft_per_decode=0.003, speculating=0.02)
    cost, budget = WorkCost(GPU, host, terms), room + slots * (1 + drafts)
    speculation = Speculation(drafts, accept, drafts)
    engine = Engine(cost, 16000, 800, budget, slots, 16, speculation=speculation).checked()
    asked, run = both(rows, engine)
    assert run.requests["output"].tolist() == [len(each.seen) for each in asked]
    assert run.requests["first_token"].tolist() == pytest.approx([each.seen[0] for each in asked])
    for gaps, each in zip(Gaps(run).lists(), asked, strict=True):
        assert gaps == pytest.approx([late - soon for soon, late in pairwise(each.deliveries)])
