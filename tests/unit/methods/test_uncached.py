"""With a prefix cache prompts cost time by what is computed and memory by what is held, in every method."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import EACH_STEP
from headgate.core.policy import End
from headgate.core.view import Limits
from headgate.cost.laws.linear import LinearCost
from headgate.cost.laws.terms import DecodeTerms, MixedTerms, PrefillTerms
from headgate.estimators.hazard import Survival
from headgate.methods.eb.adaptive import AdaptiveExclusive
from headgate.methods.eb.costs import Lengths, phase_costs
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate, whole_steps
from headgate.methods.eb.thresholds import SlotBounds, Threshold, stationary_plan
from headgate.methods.keep.policy import Keep
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.slai import Slai
from headgate.methods.wait.inventory import Line
from headgate.methods.wait.traffic import SeenType
from headgate.methods.wait.wait import Wait
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Contents, Workload
from headgate_papers.eb.theory import exclusive_throughput

FLAT = LinearCost(  # no price of context: then only tokens that are computed cost time
    DecodeTerms(0.01, 1e-4), PrefillTerms(0.02, 1e-5), MixedTerms(0.01, per_prefill=1e-5, per_decode=1e-4)
)
FOUND = Lengths(1000, 100, 200, 80, (300, 50))
SHORT = Lengths(300, 100, 50, 80)
WHOLE = Lengths(1000, 100, 200, 80)


def test_eb_pays_for_what_is_computed():
    assert mixed_rate(FLAT, FOUND, 64, 512) == mixed_rate(FLAT, SHORT, 64, 512)
    assert exclusive_rate(FLAT, FOUND, 64, 0.3, 2048) == exclusive_rate(FLAT, SHORT, 64, 0.3, 2048)
    assert exclusive_rate(FLAT, FOUND, 64, 0.3, 2048) > 1.05 * exclusive_rate(FLAT, WHOLE, 64, 0.3, 2048)
    costs = phase_costs(FLAT, FOUND, 64)
    assert exclusive_throughput(costs, FOUND, 64, 20) == exclusive_throughput(costs, SHORT, 64, 20)
    plan = Threshold(0.3, 19, 64)
    assert whole_steps(plan, FOUND, 2.0, 2048) == whole_steps(plan, SHORT, 2.0, 2048)
    assert whole_steps(plan, FOUND, 2.0, 2048) != whole_steps(plan, WHOLE, 2.0, 2048)


def test_eb_has_slots_for_what_is_held():
    survival = Survival(np.array([0.99**age for age in range(400)]), 0.01)
    slots = SlotBounds(60_000, 512, block=16)
    assert stationary_plan(phase_costs(FLAT, FOUND, 64), FOUND, survival, slots) == stationary_plan(
        phase_costs(FLAT, WHOLE, 64), WHOLE, survival, slots
    )
    assert FOUND.context == WHOLE.context


def test_a_prompt_behind_cached_tokens_pays_for_reading_them():
    reading = LinearCost(FLAT.decode, PrefillTerms(0.02, 1e-5, per_behind=1e-6), FLAT.mixed)
    assert exclusive_rate(reading, FOUND, 64, 0.3, 2048) < exclusive_rate(reading, SHORT, 64, 0.3, 2048)


def test_eb_online_learns_both_lengths():
    policy = AdaptiveExclusive(64, FLAT, warm=1, review=20)
    ledger = Ledger(Limits(2048, 64), 200_000)
    policy.plan(ledger)
    for id in range(20):
        entry = Entry(ledger, id, 0.0, 1000, 500)
        entry.cached, entry._tokens = 700 if id % 2 else 600, 50 + id
        policy.finished(entry, 1.0, End.STOPPED)
    assert policy.lengths.prompt == 1000
    assert policy.lengths.uncached == (350, 50)


def test_wait_counts_memory_whole_and_time_by_what_is_computed():
    survival = Survival(np.array([1.0, 0.5, 0.25]), 0.5)
    whole, found = SeenType(2.0, 1000.0, survival), SeenType(2.0, 1000.0, survival, cached=700.0)
    line = Line(0.01, 1e-7, 2e-5, 1e-4)
    for ours, theirs in (
        (found.part(), whole.part()),
        (found.segments((2, 4))[0], whole.segments((2, 4))[0]),
    ):
        assert (ours.work, ours.peak, ours.decodes) == (theirs.work, theirs.peak, theirs.decodes)
        assert line.price(ours) == pytest.approx(line.price(theirs) - 700 * 2e-5)


def test_wait_keeps_the_type_a_request_had_when_it_came():
    policy = Wait(8, FLAT, thresholds="256=2+more=1", split="prompt:256")
    ledger = Ledger(Limits(2048, 8), 10_000)
    entry = Entry(ledger, 0, 0.0, 1000, 100)
    entry.cached = 800
    ledger.arrive(entry)
    policy.arrived(entry, 0.0)
    entry.cached = 0  # evicted from the cache before its turn came
    assert policy._on[entry.id].name == "256"
    policy.finished(entry, 1.0, End.ABORTED)
    assert not policy._on


class Watched(Mixed):
    """Notes what the view says of memory."""

    most_shared = most_read = 0

    def plan(self, view):
        self.most_shared = max(self.most_shared, view.kv_shared)
        self.most_read = max(self.most_read, view.kv_total - view.kv_free + view.kv_shared)
        return super().plan(view)._replace(until=EACH_STEP)


def test_blocks_that_several_hold_are_read_by_each():
    engine = Engine(FLAT, 16 * 1000, 4096, 2048, 8)
    pieces = [[(1, 160), (2 + id, 40)] for id in range(3)]
    workload = Workload.of([200] * 3, [20] * 3, contents=Contents.of(pieces))
    policy = Watched(8, 2048)
    simulator = Simulator(engine, policy, workload)
    simulator.run()
    assert policy.most_shared == 2 * 160
    assert policy.most_read == 3 * 16 * 14  # 218 tokens each, in blocks
    assert simulator.replica.cache.shared == 0


PROMISED = {
    "slai": lambda cost: Slai(8, 1024, cost, between_tokens=0.05),
    "keep": lambda cost: Keep(8, 1024, cost, tbt=0.05),
}


@pytest.mark.parametrize("make", PROMISED.values(), ids=PROMISED)
def test_promises_count_what_decodes_really_read(make):
    """A step beside decodes whose context is shared gets fewer prompt tokens than one beside short ones."""
    reading = LinearCost(
        DecodeTerms(0.01, 1e-4, per_context=1e-6),
        PrefillTerms(0.01, 2e-5),
        MixedTerms(0.01, per_prefill=2e-5, per_decode=1e-4, per_context=1e-6),
    )
    chunks = []
    for shared in (0, 16_000):
        policy, ledger = make(reading), Ledger(Limits(1024, 8, 16), 100_000)
        for id in range(4):
            entry = Entry(ledger, id, 0.0, 4_000, 500)
            ledger.arrive(entry)
            policy.arrived(entry, 0.0)
            ledger.admit(entry)
            policy.admitted(entry, 0.0)
            entry.todo = 0
            ledger.join(entry, 0.0, True)
            policy.prefilled(entry, 0.0)
        late = Entry(ledger, 9, 0.0, 3_000, 500)
        ledger.arrive(late)
        policy.arrived(late, 0.0)
        ledger.kv_free, ledger.kv_shared = 84_000, shared  # the same blocks in use
        chunks.append(policy.plan(ledger).chunk)
    assert chunks[1] < chunks[0]
