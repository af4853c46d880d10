"""A policy that fails in the middle of everything: vLLM takes over, once, and nobody is lost."""

from __future__ import annotations

import logging
from random import Random

import pytest
from audits import audit
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle
from policies import HOOKS, NONSENSE, STARVES, Failing, engine_of, gated
from schedulers import EngineShape, scheduler
from traffic import Traffic, draw_shape, draw_traffic

from worlds import POLICIES, EveryOther

WAYS = [*NONSENSE, *(f"hook {name}" for name in HOOKS)]
SEEDS = st.integers(0, 2**32 - 1)
LIMIT = 50.0  # seconds of the watchdog: so many steps


class Heard(logging.Handler):
    """What headgate logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("vllm.headgate").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def stop(self) -> None:
        logging.getLogger("vllm.headgate").removeHandler(self)


@pytest.mark.parametrize("how", WAYS)
@given(
    data=st.data(),
    seed=SEEDS,
    name=st.sampled_from(sorted(POLICIES)),
    after=st.sampled_from([1, 2, 5, 20]),
    ahead=st.booleans(),
    runner=st.sampled_from([1, 2]),
)
def test_everybody_is_served_after_a_policy_failed(how, data, seed, name, after, ahead, runner):
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)
    holds = how in ("hook held", "hook resumed")
    inner = EveryOther() if holds else POLICIES[name](data.draw, engine_of(shape))
    policy, heard = Failing(inner, how, after), Heard()
    made = gated(shape, policy, watchdog=LIMIT if how in STARVES else 1e9)
    Oracle(made, shape, draw_traffic(random, shape), audit).run()
    heard.stop()
    fallen = made._headgate.fallen
    assert len(heard.lines) == (fallen is not None)
    if how in STARVES:
        assert policy.failed or fallen is None
    elif policy.failed:
        assert fallen is not None
        assert fallen in heard.lines[0]
    else:
        assert fallen is None


@pytest.mark.parametrize("how", STARVES)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_watchdog_ends_starvation(how, ahead):
    """Within two limits, however the policy starves them."""
    shape = EngineShape(ahead=ahead, runner=2)
    traffic = draw_traffic(Random(3), shape, calm=True)
    made = gated(shape, Failing(EveryOther(), how, after=3), watchdog=LIMIT)
    oracle = Oracle(made, shape, traffic, audit).run()
    assert "made no progress for 50 s" in made._headgate.fallen
    assert oracle.step < 2 * LIMIT + 300


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [{"policy": "vllm"}, {"policy": "mixed"}], ids=["watching", "fallen"])
@given(seed=SEEDS)
def test_without_a_policy_it_is_plain_vllm_to_the_step(options, ahead, seed):
    """Told only to watch, or fallen before the first step: every message to the worker is vLLM's own."""

    def messages(headgate: dict[str, str] | None) -> list[object]:
        random = Random(seed)
        shape = draw_shape(random, ahead=ahead, runner=2)
        traffic = draw_traffic(random, shape)
        made = scheduler(shape, headgate)
        if headgate is not None and headgate["policy"] != "vllm":
            made._headgate.take_over(Failing(EveryOther(), "raises", after=1))
        return Recorder(made, shape, traffic).run().seen

    assert messages(options) == messages(None)


class Recorder(Oracle):
    """Keeps what was scheduled in each step."""

    def __init__(self, made: object, shape: EngineShape, traffic: Traffic) -> None:
        super().__init__(made, shape, traffic)
        self.seen: list[object] = []

    def _within_limits(self, output):
        super()._within_limits(output)
        fresh = [new.req_id for new in output.scheduled_new_reqs]
        self.seen.append((output.num_scheduled_tokens, fresh, sorted(output.preempted_req_ids or ())))
