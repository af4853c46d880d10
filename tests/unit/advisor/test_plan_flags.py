"""Advice for plain vLLM: it keeps its targets, by the model and in simulation."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from headgate.advisor.flags import check_flags, plan_flags, safe_mixed_slots, sglang_words
from headgate.advisor.situation import Held, card_situation, situation
from headgate.advisor.threshold import plan_threshold
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
    assert [run.label for run in runs] == ["advised", "headgate's", "vLLM's"]
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


# -- SGLang's flags


def quiet(label: str, total: int) -> nullcontext:
    return nullcontext(lambda done: None)


def flag_values(words: dict, gap: float | None = None) -> dict:
    plan = plan_flags(experiment({"engine": "sglang", **words}), gap)
    return {flag.name: flag.value for flag in plan.flags}


def test_sglang_gets_the_threshold_of_eb_as_a_flag() -> None:
    """What `plan threshold` says for exclusive batches; every flag says why."""
    words = experiment({"engine": "sglang", "prompt": 512.0, "output": 256.0})
    plan = plan_flags(words)
    about, _ = card_situation(words)
    chosen = plan_threshold(about).thresholds.chosen
    values = {flag.name: flag.value for flag in plan.flags}
    assert values["--max-running-requests"] == chosen.slots
    assert values["--min-free-slots-delay"] == chosen.refill == plan.parameters["min_free_slots_delay"]
    assert values["--chunked-prefill-size"] == 8192
    assert values["--cuda-graph-max-bs-decode"] == chosen.slots > 256
    assert all(flag.why.endswith(".") for flag in plan.flags)
    assert not {"--prefill-decode-interval", "--enable-mixed-chunk", "--max-queued-requests"} & set(values)


def test_sglang_lets_in_as_many_as_memory_holds() -> None:
    """Requests without max_tokens count 4,096: the factor leaves room for all slots at the first ratio."""
    words = experiment({"engine": "sglang", "prompt": 512.0, "output": 256.0})
    about, slots = plan_flags(words).situation, plan_flags(words).slots.value
    share = flag_values({"prompt": 512.0, "output": 256.0})["--schedule-conservativeness"]
    each = about.held.mean + about.block / 2
    assert share < 1
    assert share == 0.05 or slots * (each + 0.7 * share * 4096) <= about.kv_tokens
    assert "--schedule-conservativeness" not in flag_values({"prompt": 512.0, "output": 256.0, "slots": 64})


def test_sglang_keeps_a_promised_gap_in_simulation() -> None:
    words = experiment(
        {"engine": "sglang", "prompt": 512.0, "output": 128.0, "requests": 2000, "asynchronous": False}
    )
    plan = plan_flags(words, gap=0.06)
    values = {flag.name: flag.value for flag in plan.flags}
    assert values["--prefill-decode-interval"] == 1
    about, slots, chunk = plan.situation, plan.slots.value, plan.budget.value
    context = round(slots * about.lengths.context)
    both = about.cost.seconds(Shape(slots, context)) + about.cost.seconds(Shape(0, 0, chunk))
    assert chunk % 256 == 0 and both <= 0.06
    runs, _ = check_flags(words, plan, quiet)
    assert [run.label for run in runs] == ["advised", "SGLang's"]
    assert runs[0].metrics.longest_gap <= 0.062 < runs[1].metrics.longest_gap
    assert runs[0].metrics.request_rate.value == pytest.approx(plan.rate, rel=0.1)


def test_sglang_mixes_where_mixing_wins() -> None:
    words = {"card": "pub-a100-llama-7b", "prompt": 200.0, "output": 100.0}
    values = flag_values(words)
    planned = plan_threshold(situation(experiment(words)))
    assert (planned.winner == "mixed") == ("--enable-mixed-chunk" in values)
    assert values.get("--enable-mixed-chunk", True) is True


def test_sglang_targets_bound_slots_and_queue() -> None:
    plan = plan_flags(
        experiment({"engine": "sglang", "prompt": 512.0, "output": 256.0, "tpot": 0.025, "ttft": 2.0})
    )
    about = replace(plan.situation, slots=plan.slots.value)
    assert plan_threshold(about).exclusive.per_token <= 0.025
    assert plan_threshold(replace(about, slots=plan.slots.value + 8)).exclusive.per_token > 0.025
    assert plan.queue.name == "--max-queued-requests" and plan.queue.value == plan.waiting
    with pytest.raises(InputError, match="one request alone needs"):
        plan_flags(experiment({"engine": "sglang", "tpot": 0.001}))
    with pytest.raises(InputError, match="leaves no 256 prompt tokens"):
        plan_flags(experiment({"engine": "sglang"}), gap=0.005)


LIMITS = "--max-running-requests 64 --chunked-prefill-size 2048"


@pytest.mark.parametrize(
    ("policy", "parameters", "said"),
    [
        ("v0", {}, LIMITS),
        (
            "eb",
            {"refill": 7},
            "--max-running-requests 64 --chunked-prefill-size 2048 --min-free-slots-delay 7",
        ),
        ("mixed", {}, f"{LIMITS} --enable-mixed-chunk"),
        (
            "sglang",
            {"slots": 32, "budget": 512, "mixed_chunk": True, "order": "lpm", "prefill_decode_interval": 2},
            "--max-running-requests 32 --chunked-prefill-size 512 --prefill-decode-interval 2 "
            "--schedule-policy lpm --enable-mixed-chunk",
        ),
        ("eb", {"refill": 7, "max_gap": 0.1}, ""),
        ("keep", {}, ""),
    ],
)
def test_flags_that_make_sglang_a_policy(policy: str, parameters: dict, said: str) -> None:
    assert " ".join(sglang_words(policy, parameters, 64, 2048)) == said
