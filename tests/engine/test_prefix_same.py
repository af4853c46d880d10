"""Prefix caching: the simulator's hits, preemptions and steps against vLLM's own scheduler and KV manager."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import admitted
from schedulers import scheduler
from virtual import Virtual

from headgate.core.plan import ALL, Plan
from headgate.core.policy import BatchPolicy
from headgate.core.view import View
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.traces import read_trace
from headgate.workloads.workload import Contents, Workload
from worlds import POLICIES, Line, Log

DATA = Path(__file__).parents[1] / "data"
PRICES = Line(fixed=1.0, prefill=1 / 64, decode=1 / 16, context=1 / 1024, behind=1 / 2048)
FIRST_TOKEN = 10  # those below mean something to the tests


class Everybody(BatchPolicy):
    """All decodes, and everybody there is a slot for; memory is the engine's business."""

    def plan(self, view: View) -> Plan:
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        return Plan(ALL, (*view.prefilling, *[*view.waiting][: max(0, slots)]))


class Shared(Virtual):
    """Prompts and outputs have the tokens their contents say."""

    def __init__(self, engine: Engine, workload: Workload, policy: BatchPolicy) -> None:
        super().__init__(engine, policy, workload, caching=True)
        self.pieces = workload.pieces()
        self.names: dict[tuple[int, int], int] = {}
        self.hits: list[tuple[int, int]] = []
        self.prompts = workload.prompt.tolist()

    def _prompt(self, id, tokens):
        return [self._at(id, place) for place in range(tokens)]

    def _token(self, name, generated):
        return self._at(int(name), self.prompts[int(name)] + generated)

    def _at(self, id, place):
        *before, (key, _) = self.pieces[id]
        for earlier, tokens in before:
            if place < tokens:
                key = earlier
                break
            place -= tokens
        return self.names.setdefault((key, place), FIRST_TOKEN + len(self.names))

    def _run(self, output):
        new = set(admitted(output))
        super()._run(output)
        self.hits += [(id, first - 1) for id, first, _ in self.steps[-1].chunks if str(id) in new]


class Hits(Log):
    def __init__(self) -> None:
        super().__init__()
        self.hits: list[tuple[int, int]] = []
        self.preempted = 0

    def admitted(self, request, now):
        self.hits.append((request.id, request.prompt + request.generated - request.todo))

    def evicted(self, request, now):
        self.preempted += 1


def compare(engine: Engine, workload: Workload, policy: BatchPolicy | None = None) -> Hits:
    policy = policy or Everybody()
    theirs = Shared(engine, workload, copy.deepcopy(policy))
    steps = theirs.run()
    log = Hits()
    simulator = Simulator(engine, policy, workload, (log,))
    simulator.run()
    assert log.hits == theirs.hits
    ours = [(end, decodes, prefill, behind) for end, decodes, _, prefill, behind in log.steps]
    assert ours == [
        (
            step.end,
            len(step.decodes),
            sum(tokens for _, _, tokens in step.chunks),
            sum(first - 1 for _, first, _ in step.chunks),
        )
        for step in steps
    ]
    return log


def world(seed: int) -> tuple[Engine, Workload]:
    """Few system prompts and sessions, little memory; most requests share something."""
    random = Random(seed)
    block, count = random.choice([4, 8, 16]), random.randint(5, 40)
    rows, outputs, times, now = [], [], [], 0.0
    for _ in range(count):
        row = [(random.randrange(3), random.choice([3, 8, 16, 21]))] if random.random() < 0.7 else []
        if random.random() < 0.3:
            row.append((random.randrange(10, 13), random.choice([1, 5, 16])))
        row.append((random.randrange(20, 24) if random.random() < 0.7 else -1, random.randint(1, 40)))
        rows.append(row)
        outputs.append(random.choice([1, 2, 5, 20, 40]))
        now += random.choice([0.0, 0.0, 1.5, 12.0])
        times.append(now)
    prompts = [sum(tokens for _, tokens in row) for row in rows]
    running = random.randint(1, 6)
    engine = Engine(
        PRICES,
        block * (-(-130 // block) + random.randint(0, 20)),
        125,
        random.randint(running, 80),
        running,
        block,
    )
    limits = {"limit": outputs, "arrival": times}
    return engine, Workload.of(prompts, outputs, contents=Contents.of(rows), **limits)


@given(seed=st.integers(0, 2**32))
def test_same_hits_and_steps_in_random_worlds(seed):
    compare(*world(seed))


@pytest.mark.parametrize("name", POLICIES)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_same_hits_and_steps_under_policies(name, seed, data):
    """What a policy sees of the cache before it admits a request is the same, so it decides the same."""
    engine, workload = world(seed)
    compare(engine, workload, POLICIES[name](data.draw, engine))


def siblings(seed: int) -> tuple[Engine, Workload]:
    """Groups that come together, each with a prompt that nobody has computed; often longer than a step."""
    random = Random(seed)
    block = random.choice([4, 8, 16])
    rows, outputs, times, now = [], [], [], 0.0
    for group in range(random.randint(1, 6)):
        system = (0, random.choice([3, 8, 21])) if random.random() < 0.5 else (10 + group, 5)
        common = (20 + group, random.choice([16, 30, 61]))
        own = random.choice([0, 1, 9, 20])
        for _ in range(random.randint(1, 12)):
            rows.append([system, common, (-1, own)] if own else [system, common])
            outputs.append(random.choice([1, 2, 5, 20]))
            times.append(now)
        now += random.choice([0.0, 1.5, 4.0, 40.0])
    prompts = [sum(tokens for _, tokens in row) for row in rows]
    running = random.randint(1, 16)
    memory = block * (-(-130 // block) + random.choice([0, 5, 40, 400]))
    engine = Engine(PRICES, memory, 125, random.randint(running, 120), running, block)
    limits = {"limit": outputs, "arrival": times}
    return engine, Workload.of(prompts, outputs, contents=Contents.of(rows), **limits)


# Their plans evict. Where the blocks are a sibling's, too, that brings too little memory: then the simulator
# asks the policy again, and vLLM preempts another request.
EVICTS = ("wait", "nested-wait")


# keep weighs all that waits, and the plug-in learns later than the simulator what those behind the head will
# find: with siblings it may run prompts apart where the simulator runs them beside decodes. eb-online with a
# gap to keep fills a step by the same weights, and may be a token apart.
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"keep", "eb-online"}))
@given(seed=st.integers(0, 2**32), data=st.data())
def test_same_hits_and_steps_of_siblings(name, seed, data):
    engine, workload = siblings(seed)
    if name in EVICTS:
        engine = engine._replace(kv_tokens=engine.running * 256)
    compare(engine, workload, POLICIES[name](data.draw, engine))


def plain(engine: Engine, workload: Workload) -> list[tuple[int, int]]:
    """Decodes and prompt tokens of each step of vLLM's own scheduler."""
    theirs = Shared(engine, workload, Everybody())
    theirs.scheduler = scheduler(theirs.shape)
    return [(len(step.decodes), sum(tokens for _, _, tokens in step.chunks)) for step in theirs.run()]


ROLLOUTS = 64
LOOSE_PROMISES = {"ttft": 2000.0, "tbt": 200.0}
GROUPED = {  # by what they are told beyond slots and budget
    "mixed": {},
    "sarathi": {},
    "sarathi-spf": {},
    "slai": {"cost": PRICES, "between_tokens": 200.0},
    "keep": {"cost": PRICES},
    "keep with promises": {"cost": PRICES, **LOOSE_PROMISES},
    "keep that refuses": {"cost": PRICES, **LOOSE_PROMISES, "ttft": 300.0, "refuse": "predicted"},
    "eb+": {"cost": PRICES},
}


@pytest.mark.parametrize("budget", [2048, 8192])
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_takes_the_steps_it_takes_in_vllm(name, budget):
    """2,048 shared and 64 own tokens each, all there before any of it is computed: 4 steps, or 1."""
    rows = [[(0, 2048), (-1, 64)]] * ROLLOUTS
    outputs = [8] * ROLLOUTS
    workload = Workload.of([2112] * ROLLOUTS, outputs, limit=outputs, contents=Contents.of(rows))
    engine = Engine(PRICES, 160_000, 4096, budget, ROLLOUTS)
    policy = BATCH[name.split()[0]](slots=ROLLOUTS, budget=budget, **GROUPED[name])
    log = compare(engine, workload, policy)
    with_prompts = sum(prompts > 0 for _, prompts in plain(engine, workload))
    assert with_prompts == {2048: 4, 8192: 1}[budget]
    assert sum(prefill > 0 for _, _, _, prefill, _ in log.steps) <= with_prompts
    assert len(log.hits) == ROLLOUTS  # none is refused


@given(seed=st.integers(0, 2**32))
def test_mixed_takes_the_steps_of_vllm(seed):
    """Whatever of a group is there, being computed or still to be: with the engine's own budget and slots."""
    engine, workload = siblings(seed)
    engine = engine._replace(kv_tokens=engine.running * 256)  # no request is evicted
    log = compare(engine, workload, BATCH["mixed"](slots=engine.running, budget=engine.batch_tokens))
    assert [(decodes, prefill) for _, decodes, _, prefill, _ in log.steps] == plain(engine, workload)


def test_the_worlds_hit_and_preempt():
    logs = [compare(*world(seed)) for seed in range(20)]
    assert sum(hit > 0 for log in logs for _, hit in log.hits) > 50
    assert sum(log.preempted for log in logs) > 10


@pytest.mark.parametrize("kv", [40_000, 120_000])
def test_same_hits_on_rows_of_mooncake(kv):
    trace, _ = read_trace(next(DATA.rglob("mooncake_conversation_head.jsonl")))
    trace = trace.cap(prompt=16_000, output=40)
    columns = {"arrival": (trace.arrival * 4).round() / 4, "limit": trace.output}
    again = Workload.of(trace.prompt, trace.output, contents=trace.contents, **columns)
    engine = Engine(PRICES, kv, 20_000, 2048, 4)
    log = compare(engine, again)
    assert any(hit for _, hit in log.hits)
