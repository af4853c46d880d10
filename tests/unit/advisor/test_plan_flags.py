"""Advice for plain vLLM: it keeps its targets, by the model and in simulation."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from headgate.advisor.flags import check_flags, plan_flags, safe_mixed_slots
from headgate.advisor.situation import Held, situation
from headgate.core.errors import InputError
from headgate.cost.model import Shape
from headgate.experiment.settings import experiment


def test_flags_keep_their_targets() -> None:
    plan = plan_flags(experiment({"trace": "azure-conv", "tpot": 0.05, "ttft": 0.5}))
    about, slots, budget = plan.situation, plan.slots.value, plan.budget.value
    assert slots <= safe_mixed_slots(about)
    assert plan.per_token <= 0.05
    assert budget % 256 == 0 and budget >= slots
    context = round(slots * about.lengths.context)
    assert about.cost.seconds(Shape(slots, context, budget - slots)) <= 0.05
    assert about.cost.seconds(Shape(slots, context, budget + 256 - slots)) > 0.05
    drain = plan.rate * about.lengths.prompt
    assert (plan.queue.value + about.lengths.prompt) / drain + plan.per_token <= 0.5
    assert plan.waiting == round(plan.queue.value / about.lengths.prompt)


def test_flags_without_targets_come_from_memory() -> None:
    plan = plan_flags(experiment({"trace": "azure-conv"}))
    assert plan.slots.value == safe_mixed_slots(plan.situation) < 1024
    assert plan.budget.value == 8192
    assert plan.queue is None and plan.waiting is None
    assert "No --tpot" in plan.slots.why


def test_flags_stay_below_what_was_given() -> None:
    plan = plan_flags(experiment({"prompt": 64.0, "output": 64.0, "slots": 100, "budget": 300, "tpot": 1.0}))
    assert (plan.slots.value, plan.budget.value) == (100, 256)
    assert "100 is the most" in plan.slots.why


def test_safe_mixed_slots_by_hand() -> None:
    """Mean 640 + half a block, no spread: 64,800 tokens hold exactly 100."""
    about = situation(experiment({"kv_tokens": 64_800}))
    assert safe_mixed_slots(replace(about, held=Held(640.0, 0.0))) == 100
    assert safe_mixed_slots(replace(about, held=Held(640.0, 300.0))) < 100


def test_the_queue_limit_meets_its_target_in_simulation() -> None:
    words = experiment({"prompt": 256.0, "output": 64.0, "tpot": 0.03, "ttft": 1.0})
    plan = plan_flags(words)
    runs, load = check_flags(words, plan, lambda label, total: nullcontext(lambda done: None))
    assert [run.label for run in runs] == ["advised", "advised, 503", "headgate's", "vLLM's"]
    assert "as many as the flags let in" in load
    advised = runs[0].metrics
    assert advised.ttft.mean.value == pytest.approx(1.0, rel=0.1)
    assert advised.tpot.mean.value <= 0.03
    assert advised.request_rate.value == pytest.approx(plan.rate, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tpot": 0.001}, "one request alone needs"),
        ({"ttft": 0.01}, "at full load a mean prompt alone takes"),
        ({"card": "h100"}, "unknown card"),
    ],
)
def test_targets_out_of_reach_are_refused(words: dict, said: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_flags(experiment(words))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
