"""A policy that fails in the middle of everything: vLLM takes over, once, and nobody is lost."""

from __future__ import annotations

import logging
from random import Random

import pytest
from audits import audit
from hypothesis import given
from hypothesis import strategies as st
from memory import Wrong
from oracle import Oracle
from policies import HOOKS, NONSENSE, STARVES, Failing, Narrow, engine_of, gated
from schedulers import EngineShape, scheduler
from traffic import Comer, Traffic, draw_shape, draw_traffic

from headgate.methods.mixed.mixed import Mixed
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


class Fault(Exception):  # noqa: N818
    """Stands for any error of vLLM's own."""


def fails(made, place: str, after: int) -> list[bool]:
    """From its `after`-th call on, while a policy decides, this part of vLLM's `schedule` fails; the list
    tells how often.
    """
    owner = made if hasattr(made, place) else made.kv_cache_manager
    inner, calls, failed = getattr(owner, place), [], []

    def part(*args, **words):
        done = inner(*args, **words)
        calls.append(True)
        if len(calls) >= after and made._headgate.plan is not None:
            failed.append(True)
            raise Fault(f"in {place}")
        return done

    setattr(owner, place, part)
    return failed


@pytest.mark.parametrize("place", ["new_step_starts", "allocate_slots", "_make_cached_request_data"])
@given(
    data=st.data(),
    seed=SEEDS,
    name=st.sampled_from(sorted(POLICIES)),
    after=st.sampled_from([1, 2, 5, 20, 60]),
    ahead=st.booleans(),
    runner=st.sampled_from([1, 2]),
)
def test_vllm_that_fails_under_a_plan_is_asked_again_without(place, data, seed, name, after, ahead, runner):
    """Whatever was half done: everybody is served the right tokens, and no block is lost."""
    random = Random(seed)
    shape = draw_shape(random, ahead=ahead, runner=runner)
    made = gated(shape, POLICIES[name](data.draw, engine_of(shape)))
    failed, heard = fails(made, place, after), Heard()
    Oracle(made, shape, draw_traffic(random, shape), audit).run()
    heard.stop()
    assert len(failed) == bool(made._headgate.fallen) <= 1
    if failed:
        assert f"vLLM's schedule failed under the plan: Fault: in {place}" in made._headgate.fallen
        assert sum("FALLEN BACK" in line for line in heard.lines) == 1


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("after", [5, 20, 60])
def test_a_step_in_flight_with_drafts_is_no_obstacle(ahead, runner, after):
    """Its outputs came from KV that is computed again: all of them are dropped, and none that follow."""
    shape = EngineShape(ahead=ahead, runner=runner, drafts=3, caching=True)
    made = gated(shape, Mixed(16, 256))
    failed = fails(made, "allocate_slots", after)
    Oracle(made, shape, draw_traffic(Random(3), shape, calm=True), audit).run()
    assert failed and made._headgate.fallen


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_that_vllm_pads_and_a_plan_cuts(ahead):
    """What ended engines before: a prompt of one token beside a stream, with drafts, in pieces of one."""
    shape = EngineShape(ahead=ahead, drafts=3, caching=True)
    comers = [
        Comer(f"r{n}", n * 4, [*range(1, 9)] if not n else [n], 40, (), 0, 0, None, False) for n in range(4)
    ]

    def oracle(least=None):
        made = gated(shape, Narrow(Mixed(16, 256), chunk=1, spare=40))
        knobs = made._headgate_hooks._knobs
        knobs._least = least or knobs._least
        return Oracle(made, shape, Traffic(comers, frozenset(), {}, {}), audit)

    assert oracle().run().scheduler._headgate.fallen is None
    careless = oracle(least=1)
    try:
        careless.run()
    except Wrong as wrong:  # vLLM 0.26 sends such a step to its worker
        assert "1 tokens scheduled, 3 of them drafts" in str(wrong)
    else:
        assert "AssertionError" in careless.scheduler._headgate.fallen


class Breaks(set):
    """VLLM takes a request out of it when its prompt is complete, and its tokens are counted by then."""

    def discard(self, request):
        raise Fault("its tokens are counted as computed")


@pytest.mark.parametrize("counted", [False, True], ids=["a connector was told", "tokens were counted"])
def test_an_error_that_cannot_be_undone_is_raised(counted):
    shape = EngineShape(connector=not counted)
    made = gated(shape, EveryOther())
    if counted:
        made._inflight_prefills = Breaks()
    else:
        fails(made, "_make_cached_request_data", after=1)
    with pytest.raises(Fault):
        Oracle(made, shape, draw_traffic(Random(3), shape, calm=True)).run()
    assert made._headgate.fallen is None and made.max_num_scheduled_tokens == shape.budget


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
