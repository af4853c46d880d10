"""Words to plans: known answers by hand, consistency with the simulator, every refusal."""

from dataclasses import replace
from math import exp, log1p
from types import SimpleNamespace

import numpy as np
import pytest

from headgate.advisor.fluid_plan import _mixed_line
from headgate.advisor.situation import Held, OfferedLoad, Situation, held, situation
from headgate.advisor.threshold import ALIKE, _longest, plan_threshold, refill_gap
from headgate.core.errors import InputError
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.estimators.hazard import Survival
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import experiment
from headgate.methods.eb.costs import Lengths
from headgate.stats.metrics import summarise

TOY = LinearCost(
    DecodeTerms(0.010, 5e-5), PrefillTerms(0.005, 3e-5), MixedTerms(constant=0.011, by_share=(4.2e-5, 0, 0))
)


def toy(**changes) -> Situation:
    """A toy set: geometric outputs of 256 iterations, 256 slots, no memory."""
    about = Situation(
        source="toy",
        workload="toy",
        cost=TOY,
        lengths=Lengths(512, 256),
        survival=Survival(np.ones(1), 1 / 256),
        held=Held(640.0, 100.0),
        slots=256,
        budget=1_000_000,
        kv_tokens=10**9,
        block=16,
    )
    return replace(about, **changes)


# -- known answers -----------------------------------------------------------------------------------


def test_toy_set_has_the_papers_base_share() -> None:
    plan = plan_threshold(toy())
    assert plan.thresholds.base.share == pytest.approx(0.059981463, abs=6e-10)
    assert plan.thresholds.base.refill == 15


def test_toy_set_by_whole_steps() -> None:
    """Priced by hand: without knee, context and budget a cycle is that of the paper at our threshold."""
    plan = plan_threshold(toy())
    refill = plan.thresholds.stationary.refill
    assert plan.thresholds.chosen == plan.thresholds.stationary
    assert refill == 16  # whole iterations and rounding: 0.0606 of 256
    refilled = refill + 0.5  # half of those that leave in the step with which the phase ends
    phase = log1p(refilled / (256 - refilled + 0.5)) * 255.5  # a request leaves at the end of a step
    decodes = round(refilled * 256 / phase)
    pause = 0.005 + 3e-5 * refilled * 512
    cycle = phase * (0.010 + 5e-5 * decodes) + pause
    assert plan.exclusive.rate == pytest.approx(refilled / cycle, rel=1e-9)
    assert plan.exclusive.tokens == pytest.approx(plan.exclusive.rate * 769)  # 512 + 256 + the first
    assert plan.exclusive.per_token == pytest.approx(cycle / phase, rel=2e-3)  # of whole refills, there
    assert plan.exclusive.longest_gap == pytest.approx(0.005 + 3e-5 * refill * 512 + 0.010 + 5e-5 * 256)
    entering = 256 / 257  # prompts in a step, a Poisson number: some steps have none
    some = 1 - exp(-entering)
    step = some * (0.011 + 4.2e-5 * (255 + entering * 512 / some)) + (1 - some) * (0.010 + 5e-5 * 255)
    assert plan.mixed.rate == pytest.approx(entering / step, rel=5e-4)  # whole tokens
    assert plan.mixed.per_token == pytest.approx(1 / plan.mixed.rate)
    assert plan.gain == pytest.approx(plan.exclusive.rate / plan.mixed.rate - 1)
    assert plan.winner == "exclusive"


def test_first_tokens_by_littles_law() -> None:
    plan = plan_threshold(toy(load=OfferedLoad(clients=512)))
    for mode in (plan.mixed, plan.exclusive):
        assert mode.running == 256
        inside = mode.rate * (mode.first_token + 256 * mode.per_token)
        assert inside == pytest.approx(512, rel=0.005)  # mixed counts the prompt's own step besides
    assert plan_threshold(toy()).mixed.first_token is None


def test_a_rate_is_as_many_requests_as_mixed_batching_needs() -> None:
    plan = plan_threshold(toy(load=OfferedLoad(rate=10.0)))
    assert plan.mixed.running == plan.concurrent < 256
    assert (
        plan.mixed.rate >= 10 > plan_threshold(toy(load=OfferedLoad(clients=plan.concurrent - 1))).mixed.rate
    )
    assert plan_threshold(toy(load=OfferedLoad(rate=1000.0))).concurrent == 256


def test_one_request_at_a_time_is_served_alike() -> None:
    plan = plan_threshold(toy(load=OfferedLoad(clients=1)))
    alone = 0.005 + 3e-5 * 512 + 256 * (0.010 + 5e-5)
    assert plan.exclusive.rate == pytest.approx(1 / alone)
    assert plan.exclusive.per_token == pytest.approx(alone / 256)
    assert plan.winner == "either"


def test_the_crossing_is_where_the_predictions_cross() -> None:
    plan = plan_threshold(toy())
    first, last = plan.crossing.wins
    assert last == plan.crossing.searched == 256
    share = plan.thresholds.chosen
    below = plan_threshold(toy(load=OfferedLoad(clients=first - 1)))
    above = plan_threshold(toy(load=OfferedLoad(clients=first)))
    assert share == above.thresholds.chosen
    assert below.gain <= 0 < above.gain
    assert plan.crossing.clearly[0] > first


def test_longest_stretch() -> None:
    assert _longest(np.array([False, False])) is None
    assert _longest(np.array([True, False, True, True])) == (3, 4)
    assert _longest(np.array([True])) == (1, 1)


def test_bound_on_gaps() -> None:
    free = plan_threshold(toy())
    loose = plan_threshold(toy(), max_gap=1.0).gap
    assert (loose.refill, loose.change) == (16, 0.0)
    tight = plan_threshold(toy(), max_gap=0.1).gap
    assert tight.refill == 4  # 22.8 ms of a step, 5 ms, and 15.36 ms for each prompt
    assert tight.gap == pytest.approx(0.0228 + 0.005 + 4 * 0.01536)
    assert refill_gap(free.situation, 256, 5) > 0.1
    assert tight.change == pytest.approx(tight.rate / free.exclusive.rate - 1)
    assert -0.1 < tight.change < 0
    assert plan_threshold(toy(), max_gap=0.02).gap.refill == 0


def test_memory_bounds_the_slots() -> None:
    plan = plan_threshold(toy(kv_tokens=60_000))
    assert plan.memory.safe < 256
    assert plan.thresholds.chosen.slots == plan.memory.safe == plan.exclusive.running
    assert plan.mixed.running == plan.memory.mixed == 60_000 // (512 + 128 + 8)


def test_a_single_slot() -> None:
    plan = plan_threshold(toy(slots=1))
    assert plan.thresholds.chosen == (1.0, 1, 1)
    assert plan.crossing.searched == 1
    assert not plan.notes


def test_equal_outputs_fall_back_to_the_base_share() -> None:
    words = experiment({"workload": "fixed", "prompt": 512.0, "output": 257.0})
    plan = plan_threshold(replace(situation(words), cost=TOY, kv_tokens=10**9))
    assert plan.situation.lengths == Lengths(512, 256)
    assert plan.thresholds.chosen == plan.thresholds.base
    assert plan.thresholds.base.share == pytest.approx(0.059981463, abs=6e-10)
    assert plan.notes == (ALIKE,)


# -- from words --------------------------------------------------------------------------------------


def test_words_give_the_lengths_of_the_law() -> None:
    about = situation(experiment({"prompt": 512.0, "output": 256.0, "slots": 512, "clients": 1024}))
    assert about.lengths.prompt == pytest.approx(512, rel=0.005)
    assert about.lengths.output == pytest.approx(255, rel=0.005)  # the prompt brings the first token
    assert about.load == OfferedLoad(clients=1024)
    assert (about.slots, about.budget, about.kv_tokens) == (512, 8192, 812_144)
    assert about.workload == "uniform lengths"


@pytest.mark.parametrize(
    ("words", "load"),
    [
        ({}, OfferedLoad()),
        ({"rate": 7.0}, OfferedLoad(rate=7.0)),
        ({"arrivals": "all-at-once"}, OfferedLoad()),
        ({"trace": "azure-conv"}, OfferedLoad(rate=5.2)),
        ({"trace": "azure-conv", "scale_rate": 2.0}, OfferedLoad(rate=10.4)),
        ({"trace": "azure-conv", "clients": 9}, OfferedLoad(clients=9)),
    ],
)
def test_words_give_the_load(words: dict, load: OfferedLoad) -> None:
    found = situation(experiment(words)).load
    assert found.clients == load.clients
    assert found.rate == (load.rate and pytest.approx(load.rate, rel=0.01))


def test_requests_that_never_fit_are_left_out_and_said() -> None:
    about = situation(experiment({"trace": "azure-conv", "model_len": 4000}))
    assert about.lost.number == 252 and about.lost.said.startswith("Cannot be served: 252 of 3,118")
    assert about.lengths.prompt < 1153


def test_held_counts_each_request_as_long_as_it_runs() -> None:
    mean, spread = held(np.array([10.0, 100.0]), np.array([3.0, 1.0]))
    values = np.array([11, 12, 13, 101])
    assert mean == pytest.approx(values.mean())
    assert spread == pytest.approx(values.std())


# -- against the simulator -----------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "output"), [(512.0, 256.0), (128.0, 1024.0)])
def test_predicted_rates_against_simulated_ones(prompt: float, output: float) -> None:
    """Measured errors at 512 clients: 512/256 mixed -2.5 %, EB -1.6 %; 128/1024 mixed -1.3 %, EB +0.2 %."""
    words = {"prompt": prompt, "output": output, "slots": 512, "clients": 512, "requests": 4000}
    prepared = Prepared(experiment(words))
    plan = plan_threshold(situation(experiment(words)))
    refill = plan.thresholds.chosen.refill
    mixed = summarise(carry_out(prepared, "mixed", {}))
    exclusive = summarise(carry_out(prepared, "eb", {"refill": refill}))
    for predicted, simulated in ((plan.mixed, mixed), (plan.exclusive, exclusive)):
        assert predicted.rate == pytest.approx(simulated.request_rate.value, rel=0.03)
        assert predicted.tokens == pytest.approx(simulated.total_rate.value, rel=0.03)
        assert predicted.per_token == pytest.approx(simulated.tpot.mean.value, rel=0.03)
    assert plan.gain == pytest.approx(
        exclusive.request_rate.value / mixed.request_rate.value - 1, abs=0.02
    )  # what we call the model's error
    assert plan.exclusive.longest_gap == pytest.approx(exclusive.longest_gap, rel=0.2)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"workload": "fixed", "output": 1.0}, "outputs of 1.00 tokens on average; need at least 2"),
        ({"kv_tokens": 200}, "no request fits"),
        ({"slots": 300, "budget": 200}, "below 300 running requests"),
    ],
)
def test_bad_words_are_refused(words: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_threshold(situation(experiment(words)))
    assert said in str(caught.value)


def test_rounding_makes_no_step_cost_negative() -> None:
    """Of a card whose steps cost by the token only: the line through two of them begins at zero."""
    whole, chunk = 0.499, 8161
    assert whole - whole / chunk * chunk < 0
    cost = SimpleNamespace(seconds=lambda shape: whole if shape.prefill == chunk else 0.0)
    fixed, slope = _mixed_line(cost, SimpleNamespace(flows=(), context=20.0), 31, chunk)
    assert fixed == 0.0 and slope == whole / chunk
