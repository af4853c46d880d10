"""Random traffic on random engines under every policy: every read checked, nobody lost, no block leaked."""

from __future__ import annotations

from random import Random

import pytest
from audits import audit
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory import Wrong
from oracle import Oracle, serve_plain
from policies import WARM, Narrow, classed, engine_of, gated
from schedulers import EngineShape, reset_loses_drafts
from traffic import Comer, Traffic, draw_shape, draw_traffic

from headgate.live.engine.requests import WARMING
from headgate.methods.eb.exclusive import PrefillFirst
from headgate.methods.mixed.mixed import Mixed
from worlds import POLICIES, TESTING

MAKE = POLICIES | TESTING
NEVER_MIX = ("eb", "eb-online", "v0", "request-level")
MODES = [
    pytest.param(ahead, runner, id=f"{'ahead' if ahead else 'in-step'}-v{runner}")
    for ahead in (False, True)
    for runner in (1, 2)
]
SEEDS = st.integers(0, 2**32 - 1)
EVICTS = ("wait", "nested-wait")


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(seed=SEEDS)
def test_plain_vllm_passes_its_own_trial(ahead, runner, seed):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)
    serve_plain(shape, draw_traffic(random, shape))


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@pytest.mark.parametrize("name", MAKE)
@given(data=st.data(), seed=SEEDS)
def test_every_policy_serves_everybody_the_right_tokens(name, ahead, runner, data, seed):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)
    made = gated(shape, MAKE[name](data.draw, engine_of(shape)))
    oracle = Oracle(made, shape, draw_traffic(random, shape), audit).run()
    assert made._headgate.fallen is None
    counts = made._headgate.counts
    assert counts["mixed"] == sum(step.mixed for step in oracle.runner.steps)
    if name in NEVER_MIX:
        assert counts["mixed"] == 0


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(data=st.data(), seed=SEEDS)
def test_background_requests_that_keep_evicts_get_the_right_tokens(ahead, runner, data, seed):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)
    made = classed(gated(shape, MAKE["keep"](data.draw, engine_of(shape))))
    Oracle(made, shape, draw_traffic(random, shape), audit).run()
    assert made._headgate.fallen is None


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(data=st.data(), seed=SEEDS, name=st.sampled_from(sorted(MAKE)))
def test_policies_that_take_over_from_a_warm_up_in_the_middle(ahead, runner, data, seed, name):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)._replace(adapters=random.randint(0, 2))
    made = classed(gated(shape, MAKE[name](data.draw, engine_of(shape))), WARM)
    Oracle(made, shape, draw_traffic(random, shape, adapters=2 * shape.adapters), audit).run()
    assert made._headgate.fallen is None


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(data=st.data(), seed=SEEDS, name=st.sampled_from(sorted(MAKE)))
def test_adapters_never_outnumber_their_places(ahead, runner, data, seed, name):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)._replace(adapters=random.randint(1, 2))
    made = gated(shape, MAKE[name](data.draw, engine_of(shape)))
    traffic = draw_traffic(random, shape, adapters=4)
    Oracle(made, shape, traffic, audit).run()
    assert made._headgate.fallen is None


def test_worker_tells_mixed_steps_apart():
    """The count of mixed steps is the worker's own; plain vLLM mixes whenever a prompt comes to a decode."""
    shape = EngineShape(budget=64)
    comers = [Comer(f"r{step}", step, list(range(40)), 30, (), 0, 0, None, False, 0) for step in (0, 5, 10)]
    traffic = Traffic(comers, frozenset(), {}, {})
    plain = serve_plain(shape, traffic)
    assert [number for number, step in enumerate(plain.runner.steps) if step.mixed] == [5, 10]
    exclusive = Oracle(gated(shape, PrefillFirst(slots=16)), shape, traffic).run()
    assert not any(step.mixed for step in exclusive.runner.steps)
    assert exclusive.said == plain.said
    cold = Oracle(classed(gated(shape, PrefillFirst(slots=16)), (WARMING,)), shape, traffic).run()
    assert [number for number, step in enumerate(cold.runner.steps) if step.mixed] == [5, 10]


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(data=st.data(), seed=SEEDS, name=st.sampled_from(sorted(MAKE)))
def test_kv_that_comes_from_elsewhere(ahead, runner, data, seed, name):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)._replace(connector=True)
    traffic = draw_traffic(random, shape)
    serve_plain(shape, traffic)
    made = gated(shape, MAKE[name](data.draw, engine_of(shape)))
    Oracle(made, shape, traffic, audit).run()
    assert made._headgate.fallen is None


@pytest.mark.parametrize(("ahead", "runner"), MODES)
@given(data=st.data(), seed=SEEDS, name=st.sampled_from(sorted(MAKE)))
def test_drafts_that_are_right_and_wrong(ahead, runner, data, seed, name):
    random = Random(seed)
    shape = draw_drafting(random, ahead, runner)
    traffic = draw_traffic(random, shape)
    serve_plain(shape, traffic)
    policy = MAKE[name](data.draw, engine_of(shape))
    assume(getattr(policy, "budget", shape.budget) > shape.drafts)  # or not even one decode would fit
    made = gated(shape, policy)
    Oracle(made, shape, traffic, audit).run()
    assert made._headgate.fallen is None


@settings(max_examples=max(60, settings().max_examples))
@given(data=st.data(), seed=SEEDS, name=st.sampled_from(sorted(MAKE)))
def test_the_first_runner_is_asked_for_no_drafts_that_it_has_lost(data, seed, name):
    """It has those of the step before: a decode that sat one out, for whatever reason, comes without any."""
    random = Random(seed)
    shape = draw_drafting(random, ahead=True, runner=1)
    policy = MAKE[name](data.draw, engine_of(shape))
    assume(getattr(policy, "budget", shape.budget) > shape.drafts)
    made = gated(shape, policy)
    oracle = Oracle(made, shape, draw_traffic(random, shape, calm=True), audit).run()
    assert not oracle.runner.lost


@pytest.mark.parametrize(("ahead", "runner"), MODES)
def test_decodes_that_join_under_a_lease_outgrow_its_budget(ahead, runner):
    """One plan lets in 16 prompts of two tokens; as decodes with drafts they need twice its budget."""
    shape = EngineShape(ahead=ahead, runner=runner, drafts=3)
    comers = [Comer(f"r{n}", 0, [n, n], 40, (), 0, 0, None, False) for n in range(16)]
    made = gated(shape, Mixed(slots=16, budget=32))
    oracle = Oracle(made, shape, Traffic(comers, frozenset(), {}, {}), audit).run()
    assert made._headgate.fallen is None
    assert [len(step.decodes) for step in oracle.runner.steps[:8]] == [0] + [16] * 7
    assert not oracle.runner.lost


@pytest.mark.parametrize("ahead", [False, True])
def test_a_reset_with_drafts_in_flight_fails_in_plain_vllm_where_traffic_has_none(ahead):
    """What `draw_traffic` leaves out is vLLM's own fault, and nothing more is left out."""
    shape = EngineShape(ahead=ahead, runner=2, drafts=3, caching=True)
    comer = Comer("r0", 0, [1, 2], 40, (), 0, 0, None, False)
    traffic = Traffic([comer], frozenset(), {}, {5: True})
    if ahead and reset_loses_drafts():
        with pytest.raises(Wrong, match="r0: says"):
            serve_plain(shape, traffic)
    else:
        serve_plain(shape, traffic)


def draw_drafting(random, ahead, runner):
    """An engine that speculates, with room for a token and its drafts of everybody."""
    shape = draw_shape(random, ahead=ahead, runner=runner)
    shape = shape._replace(drafts=random.randint(1, 5), drafter=random.random() < 0.5)
    room = shape.running * (1 + shape.drafts + shape.drafter)
    return shape._replace(budget=max(shape.budget, room))


@pytest.mark.parametrize("name", MAKE)
@given(data=st.data(), seed=SEEDS)
def test_no_policy_no_plan_and_no_client_makes_vllm_raise(name, data, seed):
    """With drafts, vLLM pads a prompt of which one token is left; plans may be as narrow as they like."""
    random = Random(seed)
    shape = draw_drafting(random, ahead=random.random() < 0.5, runner=random.choice([1, 2]))
    if (
        name in EVICTS
    ):  # counts KV that others share as freed, and may evict without end; the watchdog ends that
        shape = shape._replace(blocks=shape.running * (shape.longest // shape.block + 2))
    traffic = draw_traffic(random, shape, tiny=True)
    policy = MAKE[name](data.draw, engine_of(shape))
    assume(getattr(policy, "budget", shape.budget) > shape.drafts)
    if random.random() < 0.7:
        policy = Narrow(policy, random.choice([1, 2, shape.drafts, 10]), random.choice([1, shape.drafts, 40]))
    made = gated(shape, policy)
    Oracle(made, shape, traffic, audit).run()
    assert made._headgate.fallen is None
