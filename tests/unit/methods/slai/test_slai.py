"""SLAI: who is critical, what a step holds, and which promises are kept."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, EACH_STEP, Plan, Until, check
from headgate.core.policy import Steps
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.cost.model import Shape
from headgate.methods.mixed.sarathi import Sarathi, ShortestFirst
from headgate.methods.slai import Slai
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.stats.gaps import Gaps
from headgate.workloads.workload import Kind, Workload
from worlds import POLICIES, PRICES, Line, batches, engines, run, workloads

PAPER = {"pace": "average", "shrink": False, "ageing": 0.0, "relaxed": 0.96}
FREE, PAYING = 0.5, 0.1
PAGES = 14_000


def paper(**words) -> Slai:
    return Slai(**{"slots": 128, "budget": 512, "cost": Line(), "offset": 5.0, **PAPER, **words})


def state(
    decodes: list[tuple[float, float]],
    waiting: int = 1,
    now: float = 0.0,
    used: int = 0,
    prompt: int = 10_000,
    block: int = 16,
) -> Ledger:
    """Decodes by (last token, promise), and prompts that wait; `used` pages are in use."""
    ledger = Ledger(Limits(512, 128, block), PAGES * block)
    ledger.kv_free = (PAGES - used) * block
    ledger.now = now
    for id in range(len(decodes) + waiting):
        last, promise = decodes[id] if id < len(decodes) else (0.0, None)
        slo = Slo(None, promise)
        entry = Entry(ledger, id, 0.0, prompt=10 if id < len(decodes) else prompt, limit=1000, slo=slo)
        ledger.arrive(entry)
        if id < len(decodes):
            ledger.admit(entry)
            entry.todo = 0
            ledger.join(entry, last, rolling=True)
    return ledger


def planned(policy: Slai, view: Ledger) -> Plan:
    policy.adopt(view)
    plan = policy.plan(view)
    assert check(plan, view) == []
    return plan


def seen(policy: Slai, mean: float) -> Slai:
    """The policy after steps of that mean."""
    policy.stepped(Steps(0.0, [mean], 1, 1))
    return policy


# -- last schedulable time and offset rule --------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "promise", "offset", "mean", "now", "critical"),
    [
        (12.340, FREE, 10.0, 0.0465, 12.390, True),
        (12.340, FREE, 5.0, 0.0465, 12.390, False),
        (12.340, PAYING, 5.0, 0.0465, 12.340, True),
        (3.000, FREE, 10.0, 0.0500, 3.000, True),
        (3.000, FREE, 5.0, 0.0900, 3.049, False),
    ],
)
def test_critical_known_answers(last, promise, offset, mean, now, critical):
    policy = seen(paper(offset=offset), mean)
    plan = planned(policy, state([(last, promise)], now=now))
    assert plan.decode == (ALL if critical else frozenset())
    assert plan.prefill == (1,)


@pytest.mark.parametrize(("used", "critical"), [(13_439, False), (13_440, True)])
def test_offset_doubles_at_96_percent_of_the_pages(used, critical):
    """δ·t̄ is 0.25 s, or 0.5 s when memory is crowded; a token of promise 0.5 s that came just now."""
    policy = seen(paper(), 0.05)
    view = state([(1.0, FREE)], now=1.0, used=used, prompt=1000)
    assert planned(policy, view).decode == (ALL if critical else frozenset())


@pytest.mark.parametrize(("share", "critical"), [(0.76, False), (0.75, True)])
def test_slots_crowd_too(share, critical):
    """Three of four slots are taken."""
    policy = seen(paper(slots=4, crowded=share, relaxed=share), 0.05)
    plan = planned(policy, state([(1.0, FREE)] * 3, now=1.0))
    assert plan.decode == (ALL if critical else frozenset())


def test_crowded_until_relaxed():
    policy = seen(paper(relaxed=0.94), 0.05)
    policy.adopt(state([(1.0, FREE)]))
    found = []
    for used in (13_300, 13_440, 13_300, 13_160, 13_159, 13_300):
        policy.plan(state([(1.0, FREE)], now=1.0, used=used, prompt=100))
        found.append(policy.gauges()["crowded"])
    assert found == [False, True, True, True, False, False]


def test_mean_of_all_steps_and_of_the_newest():
    cumulative, recent = paper(), paper(pace="recent")
    for policy in (cumulative, recent):
        policy.stepped(Steps(0.0, [1.0, 2.0, 3.0], 1, 1))
        policy.stepped(Steps(10.0, [20.0], 1, 1))
        planned(policy, state([(0.0, FREE)]))
    assert cumulative.gauges()["step"] == 13 / 4
    assert recent.gauges()["step"] == pytest.approx(1 + 0.1 * 9)


def test_promises_of_those_who_have_none():
    words = [(1.0, None)]
    assert planned(seen(paper(between_tokens=0.3), 0.1), state(words, now=1.0)).decode is ALL
    assert planned(seen(paper(between_tokens=0.6), 0.1), state(words, now=1.0)).decode == frozenset()


# -- what a step holds ----------------------------------------------------------------------------------


def test_critical_decodes_then_prompts_then_others():
    decodes = [(1.0, FREE), (1.0, PAYING), (0.7, FREE), (0.9, FREE)]
    policy = seen(paper(), 0.02)  # a margin of 0.1 s
    assert planned(policy, state(decodes, now=1.0)) == Plan(frozenset({1}), (4,), 512, 511)
    short = planned(seen(paper(), 0.02), state(decodes, now=1.0, prompt=509))
    assert short.decode == frozenset({1, 2, 3}), "511 - 509: room for two, the earliest due"
    assert planned(seen(paper(), 0.02), state(decodes, now=1.0, prompt=100)).decode is ALL


def test_the_earliest_due_when_there_are_too_many():
    decodes = [(0.0, FREE), (0.3, PAYING), (0.2, FREE), (0.2, PAYING)]
    late = planned(paper(decodes=2), state(decodes, now=9.0))
    assert late.decode == frozenset({3, 1})  # due at 0.3 and 0.4; 0.5 and 0.7 wait
    assert planned(paper(decodes=2), state(decodes, waiting=0, now=9.0)) == Plan(
        frozenset({3, 1}), budget=512
    )


def test_everybody_decodes_while_no_prompt_can_run():
    decodes = [(1.0, FREE)] * 4
    assert planned(paper(), state(decodes, waiting=0, now=1.0)) == Plan(ALL, until=Until(arrivals=1))
    full = planned(paper(slots=4), state(decodes, now=1.0))
    assert full == Plan(ALL, until=Until(finishes=1)), "an arrival brings no slot"
    crowded = planned(paper(), state(decodes, now=1.0, used=PAGES - 1))
    assert crowded == Plan(ALL, until=Until(finishes=1, arrivals=1)), "it may bring a shorter prompt"
    by_arrival = planned(paper(order="arrival"), state(decodes, now=1.0, used=PAGES - 1))
    assert by_arrival == Plan(ALL, until=Until(finishes=1))
    assert planned(paper(order="deadline"), state(decodes, now=1.0, used=PAGES - 1)).until == EACH_STEP


def test_a_step_is_cut_to_end_before_a_token_in_it_is_due():
    """Steps of 1 ms a prompt token: 500 of them for the free one, 100 and less for the paying one."""
    cost = Line(fixed=0.0, prefill=0.001, decode=0.0, context=0.0, behind=0.0)
    ours = {"slots": 128, "budget": 512, "cost": cost}
    alone = planned(Slai(**ours), state([(1.0, 0.6)], now=1.0))
    assert alone.decode is ALL
    assert alone.chunk == 511
    for last, chunk in ((1.0, 100), (0.98, 80), (0.0, 64)):
        plan = planned(Slai(**ours), state([(last, PAYING), (1.0, 5.0)], now=1.0))
        assert plan.decode == frozenset({0})
        assert 0.95 * chunk - 512 / 32 - 1 <= plan.chunk <= chunk
    assert planned(Slai(shrink=False, **ours), state([(1.0, PAYING)], now=1.0)).chunk == 511


def test_those_left_out_have_a_step_left():
    """A step may take 0.1 s for the paying one, so the other is critical 0.2 s before it is due."""
    cost = Line(fixed=0.0, prefill=0.001, decode=0.0, context=0.0, behind=0.0)
    for due, decode in ((1.19, ALL), (1.21, frozenset({0}))):
        view = state([(1.0, PAYING), (due - FREE, FREE)], now=1.0)
        assert planned(Slai(128, 512, cost), view).decode == decode


def test_predicted_steps_are_full_ones_with_everybody():
    policy = Slai(128, 512, PRICES, shrink=False)
    view = state([(1.0, FREE)] * 7, used=100)
    planned(policy, view)
    assert policy.gauges()["step"] == PRICES.seconds(Shape(7, 1600 + 7, 505))


# -- whole schedules ------------------------------------------------------------------------------------


@given(engine=engines(), workload=workloads(impatient=True), data=st.data())
def test_all_critical_is_sarathi(engine, workload, data):
    """2.8: with every decode critical and room for all of them SLAI builds Sarathi's batches."""
    slots = data.draw(st.integers(1, engine.running))
    budget = data.draw(st.integers(slots + 1, engine.batch_tokens + slots + 1))
    order, same = data.draw(st.sampled_from([("arrival", Sarathi), ("shortest", ShortestFirst)]))
    every = Slai(slots, budget, Line(), order=order, between_tokens=1e-9, **PAPER, offset=1.0)
    expected = run(engine, same(slots, budget), workload)
    found = run(engine, every, workload)
    assert found.steps == expected.steps
    assert found.events == expected.events


KINDS = (Kind("free", Slo(60.0, 25.0), 1), Kind("paying", Slo(8.0, 3.0)), Kind("none", Slo(), 2))


@st.composite
def mixes(draw: st.DrawFn) -> Workload:
    """Requests of three kinds, with promises, without, and with different priorities."""
    workload = draw(workloads(impatient=True))
    kind = draw(st.lists(st.integers(0, 2), min_size=len(workload), max_size=len(workload)))
    priority = np.array([KINDS[number].priority for number in kind])
    return replace(workload, kinds=KINDS, kind=np.array(kind), priority=priority)


@given(engine=engines(), workload=mixes(), data=st.data())
def test_classes_keep_the_laws_and_the_limits(engine, workload, data):
    policy = POLICIES["slai"](data.draw, engine)
    leased = run(engine, copy.deepcopy(policy), workload)
    asked = run(engine, copy.deepcopy(policy), workload, leases=False)
    assert leased.steps == asked.steps
    assert leased.events == asked.events
    assert sum(event[0] == "finished" for event in leased.events) == len(workload)
    for batch in batches(engine, copy.deepcopy(policy), workload):
        tokens = len(batch.decodes) + sum(length for _, _, length in batch.chunks)
        assert tokens <= policy.budget
        assert len(batch.decodes) <= policy.decodes
        assert len(batch.decodes) + len(batch.chunks) <= policy.slots


def late_tokens(policy: Slai, engine: Engine, workload: Workload) -> list[float]:
    """By how much each late token was late."""
    recorder = Recorder([kind.name for kind in workload.kinds])
    Simulator(engine, policy, workload, (recorder,)).run()
    tables = Run({}, **recorder.tables())
    promises = [workload.kinds[kind].slo.between_tokens for kind in workload.kind]
    rows = zip(Gaps(tables).lists(), promises, strict=True)
    return [gap - promise for gaps, promise in rows for gap in gaps if gap > promise + 1e-9]


def busy(paying: float, tight: float, loose: float) -> tuple[Engine, Workload]:
    """More prompts than the engine can take, of two kinds; a full step takes about 0.75 s."""
    rng = np.random.default_rng(4)
    cost = Line(fixed=0.1, prefill=0.01, decode=0.002, context=0.00004, behind=0.0)
    kinds = (Kind("free", Slo(None, loose), 1), Kind("paying", Slo(None, tight)))
    kind = (rng.random(300) < paying).astype(int)
    arrival = np.cumsum(rng.exponential(0.6, 300))
    workload = Workload.of(
        rng.integers(5, 150, 300), rng.integers(2, 60, 300), arrival=arrival, kinds=kinds, kind=kind
    )
    return Engine(cost, 10**5, 10**5, 64, 32, 16), workload


@pytest.mark.parametrize("paying", [0.1, 0.9])
def test_promises_of_two_steps_are_always_kept_by_prediction(paying):
    engine, workload = busy(paying, tight=0.5, loose=2.0)
    assert late_tokens(Slai(32, 64, engine.cost), engine, workload) == []


def test_a_fixed_budget_breaks_promises_that_a_cut_one_keeps():
    engine, workload = busy(0.5, tight=0.5, loose=2.0)
    fixed = late_tokens(Slai(32, 64, engine.cost, shrink=False), engine, workload)
    mean = late_tokens(Slai(32, 64, engine.cost, offset=5.0, **PAPER), engine, workload)
    assert len(fixed) > 100
    assert len(mean) > 100
    assert late_tokens(Slai(32, 64, engine.cost), engine, workload) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"slots": 0}, "slai: slots=0"),
        ({"decodes": 8}, "slai: decodes=8, budget=8; need 1 <= decodes < budget"),
        ({"decodes": 0}, "decodes=0"),
        ({"budget": 1}, "decodes=1, budget=1"),
        ({"between_tokens": 0.0}, "slai: between_tokens=0.0 s; a promise must be above 0"),
        ({"first_token": -1.0}, "slai: first_token=-1.0 s"),
        ({"pace": "median"}, "unknown pace of slai 'median'; choose from: average, predicted, recent"),
        ({"order": "longest"}, "unknown order of slai 'longest'; did you mean 'shortest'"),
        ({"offset": -1.0}, "slai: offset=-1.0, crowded_offset=10.0 steps; both must be 0 or more"),
        ({"crowded": 0.9, "relaxed": 0.95}, "slai: relaxed=0.95, crowded=0.9; need 0 < relaxed <= crowded"),
        ({"watermark": -0.1}, "slai: watermark=-0.1"),
        ({"ageing": float("inf")}, "slai: ageing=inf"),
    ],
)
def test_impossible_parameters(words, message):
    with pytest.raises(InputError, match=message):
        Slai(**{"slots": 4, "budget": 8, "cost": Line()} | words)
