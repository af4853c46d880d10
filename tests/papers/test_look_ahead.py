"""Look-ahead: nobody enters who would make somebody run out of memory later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, Plan, Until
from headgate.core.view import Limits
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from headgate_papers.wait.lookahead import LookAhead
from worlds import Line, admitted, engines, run, workloads


def world(kv: int, waiting=(), decoding=0, running=64, block=1) -> Ledger:
    """So many decodes of prompt 10 with one token each, and prompts of so many tokens that wait."""
    ledger = Ledger(Limits(batch_tokens=1000, running=running, block=block), kv)
    ledger.kv_free = kv - 10 * decoding
    return admitted(ledger, decoding, waiting=waiting)


def test_a_prompt_enters_if_all_will_fit_to_their_ends():
    """Two prompts of 5 with 10 output tokens need 2 x (5 + 9) in their last step, which is common."""
    policy = LookAhead(slots=8, budget=100, output=10)
    assert policy.plan(world(28, waiting=[5, 5])).prefill == (0, 1)
    assert policy.plan(world(27, waiting=[5, 5])).prefill == (0,)


def test_who_ends_sooner_leaves_room_for_those_who_stay():
    """A decode with one token left is gone when the newcomer has grown."""
    ledger = world(30, waiting=[5], decoding=1)
    ledger.decoding[0].guess, ledger.waiting[1].guess = 2, 26
    assert LookAhead(8, 100).plan(ledger).prefill == (1,)  # 5 + 25 at its end, alone
    ledger.decoding[0].guess = 12
    assert LookAhead(8, 100).plan(ledger).prefill == ()  # after 11 steps 21 + 15


def test_a_blocked_plan_says_when_to_look_again():
    """After 11 steps both would hold 36 of 30 tokens: in 6 steps it may enter, or when somebody leaves."""
    ledger = world(30, waiting=[5], decoding=1)
    ledger.decoding[0].guess, ledger.waiting[1].guess = 12, 26
    assert LookAhead(8, 100).plan(ledger) == Plan(ALL, until=Until(steps=6, finishes=1))


def test_blocks_and_the_watermark_are_kept():
    policy = LookAhead(slots=8, budget=100, output=10)
    assert policy.plan(world(28 + 2 * 15, waiting=[5, 5], block=16)).prefill == (0, 1)
    assert policy.plan(world(28 + 2 * 15 - 1, waiting=[5, 5], block=16)).prefill == (0,)
    half = LookAhead(8, 100, watermark=0.5, output=10)
    assert half.plan(world(56, waiting=[5, 5])).prefill == (0, 1)
    assert half.plan(world(55, waiting=[5, 5])).prefill == (0,)


def test_an_empty_engine_takes_anybody():
    policy = LookAhead(slots=8, budget=100, output=1000)
    assert policy.plan(world(20, waiting=[5, 5])).prefill == (0,)


def test_unpredicted_outputs_are_expected_to_be_like_those_seen():
    work = Workload.of([5] * 40, [8] * 40, arrival=np.arange(40) * 50.0)
    policy = LookAhead(slots=4, budget=100, output=500)
    run(Engine(Line(), 1000, 1000, 100, 4, 1), policy, work)
    assert policy.gauges() == {"output": 8}


@pytest.mark.parametrize(
    ("kv", "budget", "prompts", "outputs"),
    [(19, 10, [4, 9], [5, 4]), (14, 10, [1, 7, 5], [9, 3, 1]), (21, 9, [9, 6, 1, 3], [3, 2, 6, 1])],
)
def test_a_prompt_that_is_cut_stays_until_its_last_chunk_has_room(kv, budget, prompts, outputs):
    """Those before it take room in this step as prompts and in the next as decodes."""
    work = Workload.of(prompts, outputs, arrival=np.zeros(len(prompts)), guess=outputs)
    log = run(Engine(Line(), kv, 1000, budget, 4, 1), LookAhead(4, budget), work)
    assert not [event for event in log.events if event[0] == "evicted"]


@pytest.mark.parametrize(
    ("kv", "tokens", "prompts", "outputs"),
    [(34, 4, [18, 14], [11, 14]), (32, 5, [10, 11, 14], [2, 14, 13])],
)
def test_a_budget_above_the_engines_own_changes_nothing(kv, tokens, prompts, outputs):
    """Prompts are cut where the engine's tokens end, not where ours would."""
    work = Workload.of(prompts, outputs, arrival=np.zeros(len(prompts)), guess=outputs)
    engine = Engine(Line(), kv, 1000, tokens, 4, 1)
    ours, more = (run(engine, LookAhead(4, budget), work) for budget in (tokens, tokens + 6))
    assert (ours.steps, ours.events) == (more.steps, more.events)
    assert not [event for event in ours.events if event[0] == "evicted"]


@given(engine=engines(), workload=workloads(), data=st.data())
def test_nobody_is_evicted_when_predictions_hold(engine, workload, data):
    """Whatever the prompts, slots and blocks; a guess may be too long, never too short."""
    more = data.draw(st.sampled_from([0, 0, 3]), label="too long by")
    workload = Workload.of(
        workload.prompt,
        workload.output,
        arrival=workload.arrival,
        clients=workload.clients,
        limit=workload.limit,
        guess=workload.output + more,
    )
    above = data.draw(st.sampled_from([0, 5]), label="budget above the engine's")
    log = run(engine, LookAhead(engine.running, engine.batch_tokens + above), workload)
    assert not [event for event in log.events if event[0] == "evicted"]


def test_with_memory_for_everybody_it_is_mixed_batching():
    rng = np.random.default_rng(0)
    work = Workload.of(
        rng.integers(1, 60, 200), rng.integers(1, 30, 200), arrival=np.sort(rng.random(200)) * 100
    )
    engine = Engine(Line(), 10**6, 1000, 64, 16, 16)
    ours, plain = (run(engine, policy(16, 64), work) for policy in (LookAhead, Mixed))
    assert (ours.steps, ours.events) == (plain.steps, plain.events)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"output": 0.0}, "expect at least 1"),
        ({"output": float("nan")}, "expect at least 1"),
        ({"watermark": 1.0}, "from 0 to below 1"),
        ({"budget": 3}, "below slots"),
    ],
)
def test_settings_that_cannot_be(words, says):
    with pytest.raises(InputError, match=f"look-ahead: .*{says}"):
        LookAhead(**{"slots": 8, "budget": 64} | words)
