"""WAIT without any pause: thresholds pace who enters, nobody with KV stands; and what the census knows."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE
from headgate.core.policy import End
from headgate.core.view import Limits
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.wait.traffic import Census
from headgate.methods.wait.wait import NestedWait, Wait
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Kind, Workload
from headgate_papers.kv_linear import kv_linear
from headgate_papers.wait.runs import kind
from worlds import admitted, batches, run

COST = kv_linear(0.01, 1e-6)
WAYS = {
    "whole": (Wait, {"thresholds": "3"}),
    "fractions": (Wait, {"thresholds": "0=0.4+1=1.5"}),
    "learned": (Wait, {"review": 20, "warm": 10}),
    "segments": (NestedWait, {"thresholds": "2/0.3/0.1", "ends": "3/10/60"}),
    "segments by kind": (NestedWait, {"thresholds": "0=2/1+1=0.5/0.2", "ends": "4/60", "split": "kind"}),
    "learned segments": (NestedWait, {"review": 20, "warm": 10}),
}


def engine(kv=10**6, batch_tokens=64, running=64, block=1):
    return Engine(COST, kv, 10**5, batch_tokens, running, block)


def traffic(count=150, rate=6.0, seed=0):
    """Two kinds; prompts of up to four steps' tokens, so that many batches take several steps."""
    draws = np.random.default_rng(seed)
    return Workload.of(
        draws.integers(1, 250, count),
        draws.geometric(1 / 25, count),
        arrival=np.cumsum(draws.exponential(1 / rate, count)),
        kind=draws.integers(0, 2, count),
        kinds=[Kind("0"), Kind("1")],
    )


def standing(plan, view):
    """How many decodes a plan leaves out."""
    named = len(view.decoding) if plan.decode is ALL else 0 if plan.decode is NONE else len(plan.decode)
    return len(view.decoding) - named


@pytest.mark.parametrize("way", WAYS)
def test_without_pause_every_decode_is_in_every_step(way):
    make, words = WAYS[way]
    policy = make(64, COST, max_pause=0.0, **words)
    asked, left_out = policy.plan, []

    def watched(view):
        plan = asked(view)
        left_out.append(standing(plan, view))
        return plan

    policy.plan = watched
    run(engine(), policy, traffic())
    assert len(left_out) > 500 and not any(left_out)


@pytest.mark.parametrize("way", WAYS)
def test_with_little_memory_only_memory_makes_anybody_stand(way):
    """The guard leaves decodes out only where their tokens, beside half-done prompts, do not fit."""
    make, words = WAYS[way]
    policy = make(64, COST, max_pause=0.0, **words)
    asked, faults = policy.plan, []

    def watched(view):
        plan = asked(view)
        need = len(view.decoding) + sum(request.todo for request in view.prefilling.values())
        if standing(plan, view) and not plan.evict and view.kv_free >= need:
            faults.append((view.now, plan))
        return plan

    policy.plan = watched
    log = run(engine(kv=700), policy, traffic(rate=20.0))
    assert sum(event[0] == "finished" for event in log.events) == 150
    assert not faults


def test_without_pause_nobody_waits_for_a_cohort():
    policy = Wait(64, COST, "3", max_pause=0.0, max_wait=9.0)
    ledger = admitted(Ledger(Limits(100, 100), 1000), waiting=[5])
    policy.adopt(ledger)
    assert policy.plan(ledger).prefill == (0,)


@pytest.mark.parametrize("size", [0.3, 0.75, 2.0])
def test_without_pause_memory_is_bounded_as_with_it(size):
    """x per step enter and each stays l' + 1 steps, however long the steps are."""
    draws = np.random.default_rng(3)
    arrival = np.sort(draws.random(1500))  # far more than can be served
    workload = Workload.of([20] * 1500, [41] * 1500, arrival=arrival)
    log = run(
        engine(batch_tokens=10**4, running=10**4), Wait(10**4, COST, f"{size}", max_pause=0.0), workload
    )
    assert max(log.kv) <= size * kind(1, 20, 40).work + 60
    free = run(engine(batch_tokens=10**4, running=10**4), Mixed(10**4, 10**4), workload)
    assert max(free.kv) > 3 * max(log.kv)


def test_patience_is_kept_while_a_batch_takes_many_steps():
    """Type 1 decodes; then a prompt of type 0 runs for 40 steps of 12 ms. Nobody stands longer than 50 ms."""
    workload = Workload.of(
        [10, 2500],
        [80, 3],
        arrival=[0.0, 0.05],
        kind=[1, 0],
        kinds=[Kind("0"), Kind("1")],
    )
    policy = Wait(64, COST, "0=1+1=2", max_pause=0.05, max_wait=0.0)
    ends = [b.ends[-1] for b in batches(engine(), policy, workload) if 0 in [id for id, _ in b.decodes]]
    assert len(ends) == 79
    assert max(np.diff(ends)) < 0.05 + 2 * 0.013


def test_a_type_that_never_decodes_is_known_as_such():
    census = Census(100)
    for number in range(60):
        census.came("score", 50, number / 10)
        census.came("chat", 20, number / 10)
        census.went("score", 0, End.STOPPED)
        census.went("chat", 30, End.STOPPED)
    census.went("chat", -1, End.ABORTED)
    assert census.ended == 120
    seen = census.seen({"chat": [3, 9], "score": []}, 6.0)
    assert (seen["score"].decoding, seen["score"].part().decodes) == (0.0, 0.0)
    assert seen["score"].part().work == 50
    assert seen["chat"].decoding == 1.0 and seen["chat"].part().decodes == pytest.approx(30, rel=0.05)
    assert seen["chat"].rate == pytest.approx(50 / 5.0, rel=0.05)


def test_a_type_seen_too_little_takes_the_lengths_of_all():
    census = Census(100)
    for number in range(40):
        census.came("chat", 20, number / 10)
        census.went("chat", 30, End.STOPPED)
    census.came("new", 70, 4.0)
    seen = census.seen({}, 4.0)
    assert seen["new"].part().decodes == pytest.approx(30) and seen["new"].prompt == 70
    assert Census(10).seen({}, 1.0) == {}


def test_leases_change_nothing_without_pause():
    logs = []
    for leases in (True, False):
        policy = NestedWait(64, COST, "2/0.3", "5/60", max_pause=0.0)
        simulator = Simulator(engine(kv=900), policy, traffic(rate=15.0), (), leases=leases)
        simulator.run()
        logs.append(simulator.replica.now)
    assert logs[0] == logs[1]
