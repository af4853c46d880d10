"""vLLM's own flags for what a step holds: each is respected or ignored on purpose, as docs/vllm.md says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from random import Random

import pytest
from audits import audit
from oracle import Oracle
from policies import Failing, Narrow, gated
from schedulers import EngineShape, free_blocks, scheduler
from traffic import Comer, Traffic, draw_shape, draw_traffic
from vllm.config import SchedulerConfig

from headgate.methods.eb.exclusive import PrefillFirst
from headgate.methods.mixed.mixed import Mixed
from worlds import EveryOther

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
FLAGS = {field.name for field in fields(SchedulerConfig)}
CADENCE = (("prefill_schedule_interval", 5),)
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "ahead"])


def needs(flag: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(flag not in FLAGS, reason=f"this release has no {flag}")


def prompts(lengths: list[int], limit: int = 40) -> Traffic:
    """One request of each length, one after the other."""
    comers = [
        Comer(f"r{n}", n, [n + 1] * tokens, limit, (), 0, 0, None, False) for n, tokens in enumerate(lengths)
    ]
    return Traffic(comers, frozenset(), {}, {})


def test_every_flag_of_vllms_scheduler_is_in_the_table():
    """A release with another one fails here: read what it does, decide, and write it down."""
    table = PAGE.read_text().partition("## vLLM's own flags")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {flag for row in rows for flag in re.findall(r"`(\w+)`", row)}
    assert FLAGS - listed - {"max_model_len", "is_encoder_decoder"} == set()


@AHEAD
@pytest.mark.parametrize("seed", range(6))
def test_an_interval_between_prompts_is_ignored_under_a_plan(ahead, seed):
    """Step by step the same as without it."""
    steps = []
    for flags in ((), CADENCE):
        random = Random(seed)
        shape = draw_shape(random, ahead=ahead, runner=2)._replace(flags=flags)
        policy = [Mixed(shape.running, shape.budget), PrefillFirst(shape.running), EveryOther()][seed % 3]
        made = gated(shape, policy)
        steps.append(Oracle(made, shape, draw_traffic(random, shape), audit).run().runner.steps)
        assert made._headgate.fallen is None
    assert steps[0] == steps[1]


@AHEAD
@pytest.mark.parametrize("headgate", ["watches", "has fallen"])
def test_an_interval_between_prompts_holds_where_vllm_decides(ahead, headgate):
    shape = EngineShape(ahead=ahead, runner=2, flags=CADENCE)
    traffic = prompts([30, 30, 30, 30])
    bare = scheduler(shape)
    plain = Oracle(bare, shape, traffic).run().runner.steps
    freely = Oracle(scheduler(shape._replace(flags=())), shape, traffic).run().runner.steps
    assert (plain != freely) == hasattr(bare, "local_prefill_interval")
    if headgate == "watches":
        made = scheduler(shape, {"policy": "vllm"})
    else:
        made = gated(shape, Failing(EveryOther(), "raises", after=1))
    assert Oracle(made, shape, traffic, audit).run().runner.steps == plain


def test_an_interval_that_is_ignored_is_told(caplog):
    made = scheduler(EngineShape(flags=CADENCE), {"policy": "mixed"})
    told = [each.getMessage() for each in caplog.records if "prefill_schedule_interval" in each.getMessage()]
    works = hasattr(
        made, "local_prefill_interval"
    )  # before 0.33 it means something to data-parallel engines only
    assert told == ["headgate: prefill_schedule_interval=5 is ignored while a policy decides"] * works


@needs("max_num_active_seqs")
@AHEAD
@pytest.mark.parametrize("name", ["mixed", "eb", "every other"])
def test_no_more_run_than_may_be_active(ahead, name):
    shape = EngineShape(ahead=ahead, runner=2, running=9, flags=(("max_num_active_seqs", 3),))
    most = []
    policy = {"mixed": Mixed(9, 256), "eb": PrefillFirst(9), "every other": EveryOther()}[name]
    made = gated(shape, policy)

    def look(oracle: Oracle) -> None:
        audit(oracle)
        most.append(len(made.running))

    Oracle(made, shape, prompts([20] * 12), look).run()
    assert made._headgate.fallen is None and max(most) == 3
    assert made._headgate.ledger.limits.running == 3


@AHEAD
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("own", [0, 8, 64])
def test_a_plan_limits_prompts_under_any_threshold(ahead, adaptive, own):
    """vLLM raises an adaptive one to a fair share of its budget: never beyond the plan's piece."""
    flags = {"long_prefill_token_threshold": own, "long_prefill_token_threshold_adaptive": adaptive}
    flags = {name: value for name, value in flags.items() if name in FLAGS}
    shape = EngineShape(ahead=ahead, runner=2, longest=128, flags=tuple(flags.items()))
    made = gated(shape, Narrow(Mixed(16, 256), chunk=16, spare=40))
    ran = Oracle(made, shape, prompts([100, 3, 80, 100], limit=20), audit).run().runner.steps
    assert made._headgate.fallen is None
    assert max(sum(tokens for _, tokens in step.prompts) for step in ran) <= 16
    assert made.scheduler_config.long_prefill_token_threshold == own


@AHEAD
@pytest.mark.parametrize("name", ["mixed", "eb", "every other"])
def test_the_watermark_is_kept(ahead, name):
    """A prompt enters beside others only if so many blocks stay free; policies that plan for more wait."""
    shape = EngineShape(ahead=ahead, runner=2, blocks=16, longest=128, watermark=0.5)
    policy = {"mixed": Mixed(16, 256), "eb": PrefillFirst(16), "every other": EveryOther()}[name]
    made = gated(shape, policy)

    def look(oracle: Oracle) -> None:
        audit(oracle)
        if len(made.running) > 1 and any(step.prompts for step in oracle.runner.steps[-1:]):
            assert free_blocks(made) >= 6  # half, less the blocks that decodes have grown into

    Oracle(made, shape, prompts([40] * 6, limit=20), look).run()
    assert made._headgate.fallen is None


@AHEAD
@pytest.mark.parametrize(
    "flags", [(("max_num_scheduled_tokens", 24),), (("scheduler_reserve_full_isl", False),)]
)
def test_other_limits_are_vllms(ahead, flags):
    shape = EngineShape(ahead=ahead, runner=2, longest=128, blocks=20, budget=24, flags=flags)
    made = gated(shape, Mixed(16, 24))
    Oracle(made, shape, prompts([100, 60, 3, 90], limit=20), audit).run()
    assert made._headgate.fallen is None and made._headgate.ledger.limits.batch_tokens == 24
