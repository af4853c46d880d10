"""Published policies: what each decides; and VTC's bound in all that take its order."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.experiment.library import card_engine, simulate
from headgate.methods.keep.step import largest
from headgate.methods.mixed.sarathi import Ppas, PrefillInterval
from headgate.methods.slack import LEAST, NEAR, FairBatching, QoServe
from headgate.workloads.workload import Workload
from worlds import Line, admitted, batches, holding

COST = Line(fixed=1.0, prefill=0.01, decode=0.0, context=0.0, behind=0.0)


def ledger(tokens: int = 4096) -> Ledger:
    return Ledger(Limits(batch_tokens=tokens, running=64), 10**6)


def test_ppas_caps_prompts_only_while_several_wait_beside_decodes():
    policy = Ppas(slots=64, budget=4096, cap=100)
    assert policy.plan(admitted(ledger(), decoding=1, waiting=[500, 500])).chunk == 100
    assert policy.plan(admitted(ledger(), decoding=1, waiting=[500])).chunk > 4096
    assert policy.plan(admitted(ledger(), decoding=0, waiting=[500, 500])).chunk > 4096
    assert policy.plan(admitted(ledger(), decoding=1, halves=[300], waiting=[500])).chunk == 100


def test_steps_with_prompts_are_an_interval_apart():
    engine = card_engine("linear-h200-qwen3-8b", slots=64, budget=512)
    requests = Workload.of([600] * 12, [60] * 12, arrival=np.arange(12) * 0.02)
    ran = batches(engine, PrefillInterval(64, 512, interval=4), requests, asynchronous=False)
    steps = [bool(batch.chunks) for batch in ran for _ in batch.ends]
    decodes = [len(batch.decodes) for batch in ran for _ in batch.ends]
    at = np.flatnonzero(steps)
    apart = [(gap, decodes[a + 1 : b]) for a, b, gap in zip(at, at[1:], np.diff(at), strict=False)]
    assert all(gap >= 4 or not all(between) or not between for gap, between in apart)
    assert sum(gap == 4 for gap, _ in apart) > len(apart) / 2
    plain = batches(engine, PrefillInterval(64, 512, interval=1), requests, asynchronous=False)
    assert sum(bool(batch.chunks) for batch in plain[:12]) > 6


def waiting(promises: list[Slo], prompts: list[int]) -> Ledger:
    found = ledger(8192)
    for id, (slo, prompt) in enumerate(zip(promises, prompts, strict=True)):
        found.arrive(Entry(found, id, arrival=0.0, prompt=prompt, limit=100, slo=slo))
    return found


def told(policy, view):
    for request in view.waiting.values():
        policy.arrived(request, 0.0)
    return policy


def test_qoserve_goes_by_deadline_and_length_and_puts_late_ones_last():
    slos = [Slo(90.0), Slo(50.0), Slo(60.0), Slo(5.0)]
    view = waiting(slos, [100, 4000, 100, 1000])  # 1,000 tokens take 10 s of prompts: too late for 5 s
    policy = told(QoServe(64, 8192, COST, alpha=0.008), view)
    assert policy.plan(view).prefill == (2, 1, 0, 3)
    deadlines = told(QoServe(64, 8192, COST, alpha=0.0, relegate=False), view)
    assert deadlines.plan(view).prefill == (3, 1, 2, 0)


def test_qoserve_takes_what_the_tightest_slack_allows():
    view = admitted(ledger(), decoding=2, waiting=[3000])
    view.now = 3.0
    policy = QoServe(64, 4096, COST, ttft=5.0, tbt=2.0, trust=1.0, ahead=False)
    chunk = told(policy, view).plan(view).chunk  # a token is due at 5 s + 2 s: 3 of the 4 s are for prompts
    assert 300 - 32 <= chunk <= 300
    late = told(QoServe(64, 4096, COST, ttft=0.1, tbt=0.1, ahead=False), view)
    assert late.plan(view).chunk == LEAST


def test_fairbatching_lets_early_decodes_yield():
    view = admitted(ledger(), decoding=3, waiting=[3000])
    early = told(FairBatching(64, 4096, COST, ttft=100.0, tbt=2.0, ahead=False), view)
    plan = early.plan(view)
    assert plan.decode is ALL and plan.chunk == 3000  # they would be in time, and there is time for them, too
    dear = Line(fixed=1.0, prefill=0.03, decode=2.0, context=0.0, behind=0.0)  # 91 s, and 102 s of slack
    policy = told(FairBatching(64, 4096, dear, ttft=100.0, tbt=2.0, ahead=False), view)
    assert policy.plan(view).decode == frozenset()
    every = told(FairBatching(64, 4096, dear, ttft=100.0, tbt=2.0, ahead=False, hold=False), view)
    assert every.plan(view).decode is ALL


def test_largest_is_within_its_grain():
    assert largest(lambda tokens: tokens <= 1000, 0, 5000, NEAR) in range(1000 - 32, 1001)
    assert largest(lambda tokens: True, 0, 77) == 77
    assert largest(lambda tokens: False, 0, 5000) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ppas(8, 64, cap=0), "both must be at least 1"),
        (lambda: Ppas(8, 64, order="deadline"), "unknown order of ppas"),
        (lambda: PrefillInterval(8, 64, interval=0), "must be at least 1"),
        (lambda: FairBatching(8, 64, COST, tbt=0.0), "times must be above 0"),
        (lambda: QoServe(8, 64, COST, alpha=1.0), "from 0 to below 1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(make, said):
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize(
    "policy",
    [f"{name}:order=vtc" for name in ("sarathi", "slai", "ppas", "prefill-interval", "fairbatching")],
)
def test_backlogged_tenants_are_served_alike(policy):
    """VTC's bound: 2 max(longest prompt, twice the KV). One tenant sends four times as many requests."""
    slots, prompt, output = 8, 400, 40
    engine = card_engine("linear-h200-qwen3-8b", slots=slots, kv_tokens=8192)
    tenant = np.array([0, 1, 1, 1, 1] * 60)
    requests = Workload.of(
        [prompt] * 300, [output] * 300, arrival=np.zeros(300), tenant=tenant, tenants=("few", "many")
    )
    run = simulate(engine, policy, requests, asynchronous=False)
    admitted_at, whose = run.requests["admitted"], tenant[run.requests["id"].astype(int)]
    until = np.sort(admitted_at[whose == 0])[-1]  # both have requests waiting up to here
    served = [np.sum((whose == each) & (admitted_at <= until)) * (prompt + 2 * output) for each in (0, 1)]
    assert abs(served[0] - served[1]) <= 2 * max(prompt, 2 * 8192)
    assert abs(served[0] - served[1]) <= 3 * (prompt + 2 * output)  # and far less: a few requests
    by_arrival = simulate(engine, policy.partition(":")[0] + ":order=arrival", requests, asynchronous=False)
    first = np.argsort(by_arrival.requests["admitted"], kind="stable")[: len(admitted_at) // 3]
    assert np.mean(tenant[by_arrival.requests["id"].astype(int)[first]] == 0) < 0.3


def test_many_waiting_requests_cost_a_plan_little():
    """What is late is moved once: a plan does not go through the queue."""
    view = holding(decoding=4, waiting=3000)
    policy = told(QoServe(64, 8192, COST, ttft=0.5), view)
    view.now = 100.0
    first = policy.plan(view)
    assert policy.plan(view) == first and len(policy.order._late._keys) == 3000
