"""`headgate plan speculation`: on or off, which k, and vLLM's schedule."""

import json

import pytest

from headgate.advisor.drafts import plan_drafts
from headgate.advisor.flags import plan_flags
from headgate.advisor.situation import situation
from headgate.advisor.threshold import plan_threshold
from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.model import Shape
from headgate.experiment.build import make_engine, speculation_notes
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import experiment, refuse_conflicts
from headgate.report.plans.flags import answer, drafts_page
from headgate.stats.measured import Measured

LENGTHS = {"prompt": 512, "output": 512}
CLASSES = [
    LENGTHS | {"name": "code", "share": 1.0, "accept": 0.9},
    LENGTHS | {"name": "chat", "share": 1.0, "accept": 0.2, "accept_spread": 5.0},
]


def test_drafts_pay_at_a_light_load():
    plan = plan_drafts(experiment({"speculate": "3:accept=0.7", "rate": 4.0, "requests": 80}))
    assert [run.drafts for run in plan.runs] == [0, 1, 2, 3]
    assert plan.best.drafts == 3
    assert plan.gain(plan.best) > 1.8
    assert plan.runs[3].tpot < plan.runs[0].tpot
    assert plan.at_most
    assert "at most" in answer(plan)
    document = json.loads(json.dumps(plan.as_dict()))
    ranges = document["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 256
    assert "dense model" in str(drafts_page(plan, []))


def test_drafts_that_are_rejected_do_not_pay():
    plan = plan_drafts(experiment({"speculate": "2:accept=0.02,draft=2ms", "clients": 32, "requests": 80}))
    assert plan.best.drafts == 0
    assert answer(plan).startswith("Leave speculation off")
    assert plan.as_dict()["speculative_config"] is None
    assert "No batch size gains" in str(drafts_page(plan, []))


def test_classes_have_their_own_acceptance():
    words = experiment({"speculate": "3", "rate": 5.0, "requests": 60, "classes": CLASSES})
    refuse_conflicts(words)
    prepared = Prepared(words)
    assert prepared.engine.speculation.of("code").mean == 0.9
    assert prepared.engine.speculation.of("chat").spread == 5.0
    run = carry_out(prepared, "mixed", {})
    assert run.meta["speculation"]["classes"]["chat"] == {"accept": 0.2, "accept_spread": 5.0}
    metrics = Measured(run).metrics
    assert metrics.as_dict()["bursts"] is True
    code, chat = metrics.kinds
    assert code.tpot.mean.value < 0.6 * chat.tpot.mean.value
    assert metrics.itl.mean.value > metrics.tpot.mean.value  # deliveries hold several tokens
    assert "at most" in " ".join(speculation_notes(prepared.engine, prepared.card, words))


@pytest.mark.parametrize(
    "words, fault",
    [
        ({}, "needs --speculate"),
        ({"speculate": "0"}, "leaves nothing to plan"),
        ({"speculate": "2:accept=0.5", "engines": 2}, "about one engine"),
    ],
)
def test_what_it_refuses(words, fault):
    with pytest.raises(InputError, match=fault):
        plan_drafts(experiment(words))


def test_acceptance_needs_drafts():
    with pytest.raises(InputError, match="accept is about drafts"):
        refuse_conflicts(experiment({"rate": 5.0, "classes": CLASSES}))
    without = [LENGTHS | {"name": "a", "share": 1.0}, CLASSES[0]]
    words = experiment({"speculate": "3", "rate": 5.0, "classes": without})
    with pytest.raises(InputError, match="needs the share of drafts"):
        make_engine(words, load_card(words.card))


def test_thresholds_count_tokens_and_gaps_are_steps():
    """Free drafts, all accepted: an engine that is twice as fast by token and whose steps last as long."""
    words = {"prompt": 500, "output": 200, "slots": 64}
    plain = situation(experiment(words))
    fast = situation(experiment({**words, "speculate": "1:accept=1,draft=0,draft_per_decode=0"}))
    assert fast.lengths == plain.lengths and fast.held == plain.held
    shape = Shape(8, 8 * 600)
    assert fast.cost.seconds(shape) == pytest.approx(plain.cost.seconds(shape) / 2)
    assert fast.step_seconds(shape) == pytest.approx(plain.step_seconds(shape))
    slow, quick = (plan_threshold(about) for about in (plain, fast))
    assert quick.exclusive.per_token < 0.7 * slow.exclusive.per_token
    assert quick.exclusive.tokens > 1.3 * slow.exclusive.tokens
    assert quick.exclusive.longest_gap > quick.exclusive.per_token * 2


def test_plan_flags_refuses_drafts():
    with pytest.raises(InputError, match="plan flags counts in tokens"):
        plan_flags(experiment({"speculate": "3:accept=0.7"}))
