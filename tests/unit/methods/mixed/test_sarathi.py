"""Sarathi: mixed batching but for the order of new prompts and the KV they may not take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, EACH_STEP, Plan, Until, check
from headgate.core.view import Limits
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.mixed.sarathi import Sarathi, ShortestFirst
from worlds import admitted, batches, engines, run, workloads


def state(policy: Sarathi, decoding=0, halves=(), waiting=(), running=64, kv_free=10**6, total=10**6):
    """So many decodes, half-done prompts and waiting ones; the policy has heard of them."""
    ledger = Ledger(Limits(batch_tokens=10**6, running=running), total)
    ledger.kv_free = kv_free
    admitted(ledger, decoding, halves, waiting)
    policy.adopt(ledger)
    return ledger


def planned(policy: Sarathi, **words) -> Plan:
    view = state(policy, **words)
    plan = policy.plan(view)
    assert check(plan, view) == []
    return plan


@given(engine=engines(), workload=workloads(impatient=True), data=st.data())
def test_first_come_with_plenty_of_memory_is_mixed_batching(engine, workload, data):
    engine = engine._replace(kv_tokens=10**6)
    slots = data.draw(st.integers(1, engine.running + 2))
    budget = data.draw(st.integers(slots, engine.batch_tokens + slots))
    expected = run(engine, Mixed(slots, budget), workload)
    found = run(engine, Sarathi(slots, budget), workload)
    assert found.steps == expected.steps
    assert found.events == expected.events


def test_only_prompts_that_have_not_started_are_ordered():
    words = {"decoding": 2, "halves": [40], "waiting": [9, 3, 6]}
    assert planned(ShortestFirst(8, 60), **words) == Plan(ALL, (2, 4, 5, 3), 60)
    assert planned(Sarathi(8, 60), **words).prefill == (2, 3, 4, 5)
    assert planned(ShortestFirst(8, 45), **words).prefill == (2, 4)
    assert planned(ShortestFirst(8, 42), **words).prefill == (2,)


def test_the_watermark_is_kept_free_of_new_prompts():
    words = {"decoding": 2, "waiting": [50, 30], "total": 1000}
    for free, prompts in ((90, (2, 3)), (89, (2,)), (60, (2,)), (59, ())):
        assert planned(Sarathi(64, 500), kv_free=free, **words).prefill == prompts
    assert planned(Sarathi(64, 500, watermark=0.0), kv_free=80, **words).prefill == (2, 3)
    assert planned(Sarathi(64, 500, watermark=0.5), kv_free=549, **words).prefill == ()


def test_what_a_half_done_prompt_still_needs_is_not_free():
    words = {"decoding": 2, "halves": [40], "waiting": [50], "total": 1000}
    assert planned(Sarathi(64, 500), kv_free=100, **words).prefill == (2, 3)
    assert planned(Sarathi(64, 500), kv_free=99, **words).prefill == (2,)


def test_an_empty_engine_takes_anybody():
    assert planned(Sarathi(64, 500, watermark=0.9), waiting=[50, 30], total=60, kv_free=60).prefill == (0,)


@pytest.mark.parametrize(
    ("policy", "until"),
    [(Sarathi(64, 500), Until(finishes=1)), (ShortestFirst(64, 500), Until(finishes=1, arrivals=1))],
)
def test_a_shorter_prompt_may_fit_where_the_head_does_not(policy, until):
    assert planned(policy, decoding=2, waiting=[50], kv_free=40) == Plan(ALL, until=until)


def test_leases():
    assert planned(Sarathi(64, 500), decoding=3).until == Until(arrivals=1)
    assert planned(Sarathi(8, 20), decoding=3, halves=[90]).until == Until(arrivals=1)
    assert planned(Sarathi(8, 20), decoding=3, halves=[90], waiting=[5]).until == EACH_STEP
    assert planned(Sarathi(8, 20), decoding=3, waiting=[90]).until == EACH_STEP


@given(engine=engines(), workload=workloads(), data=st.data())
def test_limits_and_one_half_done_prompt_at_most(engine, workload, data):
    slots = data.draw(st.integers(1, engine.running))
    budget = data.draw(st.integers(max(2, slots), max(2, engine.batch_tokens)))
    half_done: set[int] = set()
    for batch in batches(engine, ShortestFirst(slots, budget), workload):
        assert len(batch.decodes) + sum(length for _, _, length in batch.chunks) <= budget
        assert len(batch.decodes) + len(batch.chunks) <= slots
        half_done -= set(batch.evicted)
        for id, first, length in batch.chunks:
            half_done.discard(id)
            if first + length - 1 < workload.prompt[id]:
                half_done.add(id)
        assert len(half_done) <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"slots": 0}, "sarathi: slots=0"),
        ({"budget": 3}, "sarathi: budget=3 is below slots=4"),
        ({"order": "deadline"}, "unknown order of sarathi 'deadline'; choose from: arrival, fair, priority"),
        ({"watermark": 1.0}, "sarathi: watermark=1.0; it is a share of the KV, from 0 to below 1"),
        ({"ageing": -2.0}, "sarathi: ageing=-2.0"),
    ],
)
def test_impossible_parameters(words, message):
    with pytest.raises(InputError, match=message):
        Sarathi(**{"slots": 4, "budget": 8} | words)
