"""Early refusal: who is turned away, what it gains, and that every driver does it alike."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import Plan, check
from headgate.core.policy import End, Steps
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.library import card_engine, simulate
from headgate.methods.keep.policy import Keep
from headgate.record.tables import ENDS
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.lengths import LogNormal, Uniform
from headgate.workloads.synthetic import Share, generate
from headgate.workloads.workload import Kind
from tests.toy_engine import ToyEngine
from worlds import PRICES, Log, engines, run, workloads

CARD = "cal-h200-qwen3-8b"
PROMISE = Slo(0.5, 0.1)
PROMPTS = (10, 300, 2100)


def served(rate: float, refuse: str):
    engine = card_engine(CARD, slots=1024, budget=16_384)
    classes = [Share(1.0, Kind("chat", PROMISE), LogNormal(1000.0, 1.0), Uniform(120.0))]
    workload = generate(
        2000, seed=1, arrivals=arrival_process("poisson", rate, None), classes=classes, name="chat"
    )
    found = simulate(engine, Keep(1024, 16_384, engine.cost, refuse=refuse), workload, asynchronous=True)
    waits = found.requests["first_token"] - found.requests["arrival"]
    refused = found.requests["how"] == ENDS.index(End.REFUSED)
    return np.mean(waits <= 0.5), np.mean(refused), waits[~refused]


def test_at_moderate_load_hardly_anybody_is_refused():
    in_time, refused, _ = served(15.0, "predicted")
    assert refused < 0.01
    assert in_time > 0.98


def test_in_overload_those_who_stay_are_in_time():
    kept, none, _ = served(45.0, "never")
    in_time, refused, waits = served(45.0, "predicted")
    assert none == 0
    assert 0.05 < refused < 0.5
    assert np.mean(waits <= 0.5) > 0.97
    assert in_time > kept - 0.03


@pytest.mark.parametrize(("tokens_of_prompts", "turned_away"), [(300, ()), (0, (2,))])
def test_the_step_in_flight_has_to_end_first(tokens_of_prompts, turned_away):
    """A prompt takes 42 of the 46 ms it has left. A step with 300 prompt tokens, 6 ms or more, is in flight
    where the engine composed it before a step of decodes alone was seen to end.
    """
    costs = LinearCost(DecodeTerms(0.005, 0.0), PrefillTerms(0.0, 20e-6), MixedTerms(0.005, 20e-6, 0.0))
    ledger = Ledger(Limits(16_384, 8), kv_total=10**6)
    policy = Keep(8, 16_384, costs, ttft=0.050, tbt=1.0, patience=0.0, refuse="predicted")
    decoding, first, second = (Entry(ledger, id, 0.0, tokens, limit=50) for id, tokens in enumerate(PROMPTS))
    ledger.arrive(decoding)
    ledger.admit(decoding)
    ledger.join(decoding, 0.0, rolling=True)
    policy.adopt(ledger)
    ledger.arrive(first)
    policy.arrived(first, 0.0)
    plan = policy.plan(ledger)
    assert plan.prefill == (1,)
    policy.planned(plan, 0.0, {})
    ledger.admit(first)
    policy.admitted(first, 0.0)
    ledger.join(first, 0.0, rolling=True)
    policy.prefilled(first, 0.0)
    policy.stepped(Steps(0.0, [0.004], 1, 11, prefill=tokens_of_prompts))
    ledger.now = 0.004
    ledger.arrive(second)
    policy.arrived(second, 0.0)
    assert policy.plan(ledger).reject == turned_away


@settings(max_examples=40)
@given(engine=engines(), workload=workloads(impatient=True), ttft=st.sampled_from([0.5, 3.0, 20.0]))
def test_every_request_is_served_or_turned_away_with_and_without_leases(engine, workload, ttft):
    policy = Keep(engine.running, engine.batch_tokens, PRICES, ttft=ttft, tbt=4.0, refuse="predicted")
    leased = run(engine, copy.deepcopy(policy), workload)
    asked = run(engine, copy.deepcopy(policy), workload, leases=False)
    ahead = run(engine, copy.deepcopy(policy), workload, asynchronous=True)
    for log in (leased, asked, ahead):
        assert sum(event[0] == "finished" for event in log.events) == len(workload)
    assert (leased.steps, leased.events) == (asked.steps, asked.events)


@settings(max_examples=40)
@given(engine=engines(), workload=workloads(), ttft=st.sampled_from([0.5, 3.0, 20.0]), ahead=st.booleans())
def test_a_live_engine_turns_requests_away_too(engine, workload, ttft, ahead):
    policy = Keep(engine.running, engine.batch_tokens, PRICES, ttft=ttft, tbt=4.0, refuse="predicted")
    toy = ToyEngine(engine, policy, workload, (log := Log(),), ahead=ahead)
    toy.run()
    assert toy.live.fallen is None
    fits = {id for id, prompt in enumerate(workload.prompt.tolist()) if prompt < engine.longest}
    assert toy.served.keys() | toy.gone == fits
    refused = {event[1] for event in log.events if event[0] == "finished" and event[3] is End.REFUSED}
    assert refused == toy.gone


def test_only_requests_that_have_not_begun_may_be_rejected():
    ledger = Ledger(Limits(64, 4), kv_total=1000)
    for id in range(3):
        ledger.arrive(Entry(ledger, id, 0.0, 10, limit=5))
    ledger.admit(ledger.waiting[0])
    assert check(Plan(prefill=(0, 1), reject=(2,)), ledger) == []
    assert "have begun" in check(Plan(prefill=(0,), reject=(0,)), ledger)[0]
    assert "have begun" in check(Plan(reject=(7,)), ledger)[0]
    assert "that it rejects" in check(Plan(prefill=(0, 1), reject=(1,)), ledger)[0]
    assert "twice" in check(Plan(reject=(1, 1)), ledger)[0]


def test_an_unknown_rule_is_refused():
    with pytest.raises(InputError, match="refuse of keep"):
        Keep(4, 64, PRICES, refuse="always")
