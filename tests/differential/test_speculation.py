"""Speculative decoding against a loop that touches every request in every step and every token of it."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plain import PlainEngine, PlainRequest
from headgate.core.policy import Observer, Steps
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.laws.terms import DraftTerms, HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.experiment.library import simulate, simulate_fleet
from headgate.methods.mixed.mixed import Mixed
from headgate.record.recorder import Recorder
from headgate.sim.engine.bursts import FORGET, bursts_of
from headgate.sim.engine.engine import Engine, Speculation
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from worlds import POLICIES, TESTING, Log, engines, sharing, workloads

MAKE = POLICIES | TESTING
GPU = WorkTerms(constant=0.4, per_token=0.01, per_decode=0.02, per_context=0.001, tile=4, least_tokens=8)
HOST = HostTerms(constant=0.2, per_request=0.05, prompts=0.5, ungraphed=2.0, graph=24)
DRAFTS = DraftTerms(3, draft=0.05, draft_per_decode=0.003, speculating=0.02)


class PlainSpeculation(PlainEngine):
    """Blocks and tokens of every request are counted one by one; only the draws are the engine's own."""

    def __init__(self, engine, policy, workload, observers=()):
        super().__init__(engine, policy, workload, observers)
        self.limits = self.limits._replace(decode_width=engine.width)
        self.bursts = bursts_of(engine, workload, lambda values: values)
        self.held: dict[int, int] = {}  # blocks of each request
        self.steps_of: dict[int, int] = {}  # decode steps that each has taken

    @property
    def kv_free(self) -> int:
        return self.kv_total - sum(self.held.get(each.id, 0) for each in self.running) * self.engine.block

    def _needs(self, request: PlainRequest) -> int:
        kept = request.kv + self.engine.width + self.engine.speculation.ahead
        return max(self.held[request.id], self._blocks(min(kept, self.longest)))

    def _growth(self, decodes):
        return sum(self._needs(request) - self.held[request.id] for request in decodes)

    def _evict(self, request):
        super()._evict(request)
        self.held.pop(request.id, None)

    def _chunks(self, plan, decodes):
        budget = self.engine.batch_tokens
        self.engine = self.engine._replace(batch_tokens=budget - len(decodes) * (self.engine.width - 1))
        more = len(decodes) * (self.limits.decode_width - 1)
        chunks = super()._chunks(plan._replace(budget=plan.budget - more), decodes)
        self.engine = self.engine._replace(batch_tokens=budget)
        return chunks

    def _step(self, plan) -> bool:
        decodes = self._decodes(plan)
        evicted = False
        while decodes and self._growth(decodes) * self.engine.block > self.kv_free:
            if not self.asked_now and not evicted:
                return False
            self._evict(self._newest())
            evicted = True
            decodes = [request for request in decodes if request.id in self.decoding]
        chunks = [] if evicted else self._chunks(plan, decodes)
        if not decodes and not chunks:
            return False
        start = self.now
        context = sum(request.prompt + request.generated for request in decodes)
        prefill, behind = sum(tokens for _, tokens in chunks), sum(request.kv for request, _ in chunks)
        self.now = start + self._seconds(decodes, chunks)
        for request in decodes:
            self.held[request.id] = self._needs(request)
            self._deliver(request)
        for request, tokens in chunks:
            request.kv += tokens
            request.todo -= tokens
            self.held[request.id] = self._blocks(request.kv)
        kv = self.kv_total - self.kv_free
        for observer in self.observers:
            observer.stepped(Steps(start, [self.now], len(decodes), context, prefill, behind, kv))
        self._complete(chunks)
        self._finish()
        return True

    def _deliver(self, request: PlainRequest) -> None:
        """Token by token, until its burst or its output ends."""
        taken = self.steps_of.get(request.id, 0)
        self.steps_of[request.id] = taken + 1
        whole = min(request.true_output, request.limit, self.longest - request.prompt)
        for _ in range(self.bursts.draw(request.id, taken + 1)[taken]):
            if request.generated < whole:
                request.kv += 1
                request.generated += 1
                request.last_token = self.now


class SpecLog(Log):
    """Contexts within a run of steps are not told, so only that of its first step is written down."""

    def stepped(self, steps):
        for index, end in enumerate(steps.ends):
            context = None if index else steps.context
            self.steps.append((float(end), steps.decodes, context, steps.prefill, steps.behind))
        self.kv.append(steps.kv)


@st.composite
def speculating(draw) -> Engine:
    """A small engine, often short of KV, and one of the laws of acceptance."""
    engine = draw(engines())
    drafts = draw(st.sampled_from([1, 2, 3, 5]))
    accept = draw(st.sampled_from([Acceptance(0.0), Acceptance(0.7), Acceptance(1.0), Acceptance(0.6, 2.0)]))
    terms = DraftTerms(drafts, 0.05, 0.003, 0.02)
    return engine._replace(
        cost=WorkCost(GPU, drafting=terms),
        batch_tokens=max(engine.batch_tokens, engine.running * (1 + drafts) + 1),
        speculation=Speculation(drafts, accept, draw(st.sampled_from([0, drafts]))),
    )


@pytest.mark.parametrize("name", list(MAKE))
@settings(max_examples=20)
@given(data=st.data(), engine=speculating(), workload=workloads())
def test_same_schedule_as_token_by_token(name, data, engine, workload):
    policy = _roomy(MAKE[name](data.draw, engine), engine)
    fast = SpecLog()
    simulator = Simulator(engine, copy.deepcopy(policy), workload, (fast,))
    simulator.run()
    plain = SpecLog()
    PlainSpeculation(engine, copy.deepcopy(policy), workload, (plain,)).run()
    assert [step[:2] for step in fast.steps] == [step[:2] for step in plain.steps]
    for one, other in zip(fast.steps, plain.steps, strict=True):
        assert one[2] in (None, other[2])
    assert fast.events == plain.events
    assert fast.kv[-1:] == plain.kv[-1:]
    assert max(fast.kv, default=0) == max(plain.kv, default=0)
    _nothing_is_left(simulator)


@pytest.mark.parametrize("name", list(MAKE))
@settings(max_examples=20)
@given(
    data=st.data(),
    engine=speculating(),
    workload=workloads(impatient=True, promised=True),
    asynchronous=st.booleans(),
    hosted=st.booleans(),
)
def test_leases_change_nothing(name, data, engine, workload, asynchronous, hosted):
    if hosted:
        engine = engine._replace(cost=WorkCost(GPU, HOST, engine.cost.drafting))
    policy = _roomy(MAKE[name](data.draw, engine), engine)
    logs = []
    for leases in (True, False):
        log, recorder = SpecLog(), Recorder([kind.name for kind in workload.kinds])
        own = copy.deepcopy(policy)
        simulator = Simulator(
            engine, own, workload, (log, recorder), leases=leases, asynchronous=asynchronous
        )
        simulator.run()
        _nothing_is_left(simulator)
        logs.append(log)
        assert sum(event[0] == "finished" for event in log.events) == len(workload)
        assert max(log.kv, default=0) <= engine.kv_tokens
        _no_burst_is_too_wide(recorder, engine)
    assert [step[:2] for step in logs[0].steps] == [step[:2] for step in logs[1].steps]
    assert logs[0].events == logs[1].events


@settings(max_examples=25)
@given(engine=speculating(), workload=sharing(), asynchronous=st.booleans())
def test_prefix_cache(engine, workload, asynchronous):
    logs = []
    for leases in (True, False):
        log = SpecLog()
        policy = _mixed(engine)
        simulator = Simulator(engine, policy, workload, (log,), leases=leases, asynchronous=asynchronous)
        simulator.run()
        _nothing_is_left(simulator)
        logs.append(log)
    assert logs[0].events == logs[1].events


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_run_forgets_its_ticks(asynchronous):
    """What is kept for each tick does not grow with the run, and what is dropped is not missed."""
    engine = Engine(WorkCost(GPU, drafting=DRAFTS), 1600, 800, 64, 3, 16)
    engine = engine._replace(speculation=Speculation(3, Acceptance(0.3), 3))
    rows = np.arange(400)
    requests = Workload.of(20 + rows * 7 % 90, 20 + rows * 13 % 250, arrival=rows * 30.0)
    fast = SpecLog()
    simulator = Simulator(engine, _mixed(engine), requests, (fast,), asynchronous=asynchronous)
    simulator.run()
    ledger = simulator.replica.ledger
    assert ledger.tick > 3 * FORGET
    assert len(ledger.growth) == len(simulator.replica.blocks.growers) <= FORGET + 300
    _nothing_is_left(simulator)
    if not asynchronous:
        plain = SpecLog()
        PlainSpeculation(engine, _mixed(engine), requests, (plain,)).run()
        assert [step[:2] for step in fast.steps] == [step[:2] for step in plain.steps]
        assert fast.events == plain.events


def _roomy(policy, engine):
    """With a budget that holds the drafts of all decodes, as an engine's must."""
    for part in ("plain", "mixed"):  # keep has eb+ in it, and that has mixed
        if hasattr(policy, part):
            _roomy(getattr(policy, part), engine)
    if hasattr(policy, "budget"):
        policy.budget = max(policy.budget, engine.running * engine.width + 1)
    return policy


def _mixed(engine):
    return Mixed(slots=engine.running, budget=engine.batch_tokens)


def _nothing_is_left(simulator) -> None:
    replica = simulator.replica
    assert replica.blocks.free == replica.blocks.total
    assert replica.blocks.past == replica.ledger.past
    assert not any(replica.blocks.growers[replica.ledger.tick - replica.blocks.past :])
    assert not any(replica.ledger.growth[replica.ledger.tick - replica.ledger.past :])
    assert replica.ledger.context == 0


def _no_burst_is_too_wide(recorder, engine) -> None:
    """Deliveries of a request: no more than its tokens, and no fewer than they need."""
    tables = recorder.tables()
    requests, stays = tables["requests"], tables["stays"]
    ticks = np.bincount(stays["request"], stays["ticks"], minlength=int(requests["id"].max()) + 1)
    steps = ticks[requests["id"]]
    done = requests["how"] == 0
    prompts = 1 + requests["evictions"]
    assert (steps[done] <= requests["output"][done]).all()
    assert (steps[done] * engine.width + prompts[done] >= requests["output"][done]).all()


def test_without_accepted_drafts_steps_are_tokens():
    """Nothing accepted and drafts that cost nothing: the schedule of an engine that does not speculate."""
    engine = Engine(WorkCost(WorkTerms(0.5, 0.0, 0.02, 0.001)), 100_000, 4096, 512, 16)
    drafting = DraftTerms(3, method="ngram")
    wide = engine._replace(
        cost=engine.cost.speculating(drafting),
        speculation=Speculation(3, Acceptance(0.0)),
        batch_tokens=512 * 4,
    )
    requests = Workload.of([100, 40, 300] * 20, [20, 50, 7] * 20, arrival=np.arange(60) * 1.5)
    for asynchronous in (False, True):
        plain = simulate(engine, "mixed", requests, asynchronous=asynchronous)
        same = simulate(wide, "mixed", requests, asynchronous=asynchronous)
        for column in ("first_token", "finished", "output"):
            assert plain.requests[column].tolist() == same.requests[column].tolist()


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "split:prefill=1"])
def test_fleets_serve_all(router):
    cost = WorkCost(GPU, drafting=DRAFTS)
    engine = Engine(cost, 6000, 4096, 512, 16, speculation=Speculation(3, Acceptance(0.6, 4.0), 3))
    rows = np.arange(120)
    requests = Workload.of(50 + rows * 7 % 300, 1 + rows * 13 % 150, arrival=rows * 1.1)
    run = simulate_fleet(engine, "mixed", router, requests, engines=3)
    assert run.requests["output"].tolist() == requests.output.tolist()
    again = simulate_fleet(engine, "mixed", router, requests, engines=3)
    assert again.requests["finished"].tolist() == run.requests["finished"].tolist()


def test_one_engine_of_a_fleet_is_the_simulator():
    cost = WorkCost(GPU, drafting=DRAFTS)
    engine = Engine(cost, 3000, 4096, 512, 8, speculation=Speculation(3, Acceptance(0.6, 4.0), 3))
    rows = np.arange(80)
    requests = Workload.of(50 + rows * 7 % 300, 1 + rows * 13 % 150, arrival=rows * 1.1)
    alone = simulate(engine, "mixed", requests, asynchronous=False)
    fleet = simulate_fleet(engine, "mixed", "round-robin", requests, engines=1, asynchronous=False)
    for column in ("first_token", "finished", "output", "evictions"):
        assert alone.requests[column].tolist() == fleet.requests[column].tolist()


class Tokens(Observer):
    """When the tokens of a request came."""

    def __init__(self):
        self.seen = []

    def prefilled(self, request, now):
        self.request = request
        self.seen.append((now, request.generated))

    def stepped(self, steps):
        if steps.decodes:
            self.seen.append((steps.ends[-1], self.request.generated))


def test_known_deliveries(monkeypatch):
    """Prompt 100 and bursts 4, 1, 3 on the H200 card: known answers of the design."""
    import headgate
    from headgate.sim.engine.bursts import Bursts

    monkeypatch.setattr(Bursts, "draw", lambda self, id, steps: ([4, 1, 3] + [1] * steps)[:steps])
    engine = headgate.card_engine("cal-h200-qwen3-8b")
    drafting = DraftTerms(3, 0.35e-3, 2e-6)
    engine = engine._replace(
        cost=engine.cost.unhosted().speculating(drafting), speculation=Speculation(3, Acceptance(0.7), 3)
    )
    seen, log = Tokens(), SpecLog()
    simulate(
        engine, "mixed", Workload.of([100], [9]), asynchronous=False, observers=(seen, log), leases=False
    )
    times, tokens = zip(*seen.seen, strict=True)
    assert [round(1000 * time, 6) for time in times] == [5.377932, 11.816600, 18.255407, 24.694249]
    assert [after - before for before, after in pairwise((0, *tokens))] == [1, 4, 1, 3]
    assert max(log.kv) == 7 * 16
