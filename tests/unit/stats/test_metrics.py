from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.stats.flow import choose, judge, peak, waiting
from headgate.stats.measured import Measured
from headgate.stats.metrics import summarise
from small_runs import make_run, naive_run, open_run, request

KINDS = [
    {"name": "chat", "first_token": 1.5, "between_tokens": 1.0},
    {"name": "batch", "first_token": None, "between_tokens": None},
]


def tiny():
    """Two requests that share a step, one that gave up and one still waiting; all times whole seconds."""
    requests = [
        request(0, 0, 0, 1, 4, 10, 4),
        request(1, 1, 2, 3, 4, 20, 2, "limit", kind=1, evictions=1, wasted=6),
        request(2, 2, math.nan, math.nan, 5, 5, 0, "abandoned"),
        request(3, 7, math.nan, math.nan, math.nan, 5, 0, ""),
    ]
    steps = [
        {"start": 0, "count": 1, "first": 1, "seconds": 1, "prefill": 10, "kv": 10},
        {"start": 1, "count": 1, "first": 1, "seconds": 1, "decodes": 1, "kv": 11},
        {"start": 2, "count": 1, "first": 1, "seconds": 1, "decodes": 1, "prefill": 20, "kv": 32},
        {"start": 3, "count": 1, "first": 1, "seconds": 1, "decodes": 2, "kv": 34},
    ]
    stays = [
        {"request": 0, "opened": 1, "gap": math.nan, "first_tick": 0, "ticks": 3},
        {"request": 1, "opened": 3, "gap": math.nan, "first_tick": 2, "ticks": 1},
    ]
    return make_run(requests, steps, stays, kinds=KINDS, kv_tokens=68)


def test_every_figure_of_a_tiny_run_by_hand():
    found = summarise(tiny(), window="all")
    counts = found.counts
    assert (counts.total, counts.completed, counts.abandoned, counts.unfinished) == (4, 2, 1, 1)
    assert (counts.aborted, counts.refused, counts.measured) == (0, 0, 4)
    assert (found.ttft.count, found.ttft.mean.value, found.ttft.p99) == (2, 1.5, pytest.approx(1.99))
    assert found.tpot.mean.value == 1 and found.tpot.std == 0
    assert (found.itl.count, found.itl.mean.value) == (4, 1)
    assert (found.e2e.mean.value, found.e2e.median) == (3.5, 3.5)
    assert (found.seconds, found.duration) == (4, 7)
    assert found.request_rate.value == 2 / 4
    assert found.output_rate.value == 6 / 4
    assert found.total_rate.value == 36 / 4
    assert found.longest_gap == 1
    engine = found.engine
    assert engine.utilisation == 1 and engine.replicas == 1
    assert (engine.kv_mean, engine.kv_peak, engine.kv_tokens) == ((10 + 11 + 32 + 34) / 4, 34, 68)
    assert engine.steps == {"mixed": 0.25, "decode": 0.5, "prefill": 0.25} == engine.time
    assert (engine.preemptions, engine.wasted, engine.wasted_share) == (1, 6, 6 / 34)


def test_goodput_by_hand():
    """Chat: request 0 met, 2 gave up, 3 cannot be judged yet. Batch: 1 was promised nothing."""
    found = summarise(tiny(), window="all")
    assert found.goodput.share.value == 0.5
    assert found.goodput.rate.value == 1 / 4
    chat, batch = found.kinds
    assert (chat.name, chat.measured, chat.completed, chat.goodput.share.value) == ("chat", 3, 1, 0.5)
    assert chat.goodput.rate.value == 1 / 4
    assert (batch.name, batch.ttft.mean.value, batch.goodput) == ("batch", 2, None)
    assert (chat.first_token, chat.longest_gap, chat.e2e.mean.value) == (1.5, 1, 4)


def test_who_waits_beyond_the_promise_has_missed_it():
    run = tiny()
    run.requests["arrival"][3] = 3  # the run ends at 5, later than 3 + 1.5
    assert summarise(run, window="all").goodput.share.value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("promise", "met"), [({"between_tokens": 0.9}, 0), ({"first_token": 0.9}, 0), ({}, 1)]
)
def test_each_promise_counts(promise, met):
    run = tiny()
    run.meta["kinds"] = [KINDS[0] | promise, KINDS[1]]
    assert summarise(run, window="all").kinds[0].goodput.rate.value == met / 4


def paused():
    """One request whose gaps are 1, 1 and 4 s, and one that is still there after a gap of 3 s."""
    requests = [request(0, 0, 0, 1, 7, 10, 4), request(1, 0, 0, 1, math.nan, 10, 2, "")]
    steps = [
        {"start": 0, "count": 1, "first": 1, "seconds": 1, "prefill": 20},
        {"start": 1, "count": 2, "first": 1, "seconds": 2, "decodes": 1},
        {"start": 3, "count": 1, "first": 1, "seconds": 1, "decodes": 1},
        {"start": 4, "count": 1, "first": 3, "seconds": 3, "decodes": 1},
    ]
    stays = [
        {"request": 0, "opened": 1, "gap": math.nan, "first_tick": 0, "ticks": 2},
        {"request": 1, "opened": 1, "gap": math.nan, "first_tick": 2, "ticks": 1},
        {"request": 0, "opened": 3, "gap": math.nan, "first_tick": 3, "ticks": 1},
    ]
    return make_run(requests, steps, stays)


@pytest.mark.parametrize(
    ("limit", "kind", "share"),
    [(4.0, "gap", 1.0), (3.5, "gap", 0.0), (2.5, "gap", 0.0), (2.0, "mean", 1.0), (1.9, "mean", 0.0)],
)
def test_a_promise_of_every_gap_is_broken_by_one(limit, kind, share):
    run = paused()
    run.meta["kinds"] = [{"name": "", "first_token": None, "between_tokens": limit, "between_kind": kind}]
    found = summarise(run, window="all")
    assert (found.longest_gap, found.tpot.mean.value) == (4, 2)
    assert found.goodput.share.value == share and found.kinds[0].between_kind == kind
    judged = Measured(run, "all").promises.judged.tolist()
    assert judged == [True, limit < 3 and kind == "gap"]  # what is still there has broken it, or may not


def test_no_promises_no_goodput():
    run = tiny()
    del run.meta["kinds"]
    run.requests["kind"][:] = 0
    assert summarise(run, window="all").goodput is None


def test_kv_grows_within_a_row_and_idle_time_is_not_busy():
    """Ten requests run three steps of 1 s to 60 KV; before, 50, 40; then the engine idles for 3 s."""
    steps = [{"start": 0, "count": 3, "first": 1, "seconds": 3, "decodes": 10, "kv": 60}]
    found = summarise(make_run([request(0, 0, 0, 1, 6, 1, 1)], steps), window="all").engine
    assert found.kv_mean == 50 and found.kv_peak == 60
    assert found.utilisation == 0.5


def test_use_is_shared_by_replicas_and_cut_at_the_window():
    """Two replicas, one of them busy for 2 of 4 s, the other for 1; then 6 s that are not measured."""
    row = {"count": 2, "decodes": 1}
    steps = [
        row | {"start": 0, "first": 1, "seconds": 2},
        row | {"start": 3, "first": 3, "seconds": 7, "replica": 1, "prefill": 5},
    ]
    found = summarise(make_run([request(0, 0, 0, 1, 4, 1, 1)], steps), window="all").engine
    assert (found.replicas, found.utilisation) == (2, 3 / 8)
    assert found.time == {"mixed": 1 / 3, "decode": 2 / 3, "prefill": 0}
    assert found.steps == pytest.approx({"mixed": 1 / 8, "decode": 7 / 8, "prefill": 0})


def test_the_middle_window_by_hand():
    """100 requests, one each second, each done 2 s later: the middle is 10 .. 89, rates over (11, 91]."""
    requests = [request(number, number, number, number + 1, number + 2, 7, 3) for number in range(100)]
    window = choose(make_run(requests))
    assert np.flatnonzero(window.keep).tolist() == list(range(10, 90))
    assert (window.low, window.high) == (11, 91)
    assert window.counted.tolist() == list(range(10, 90))
    assert window.edges.tolist() == list(range(11, 92, 4))
    found = summarise(make_run(requests))
    assert found.request_rate.value == 1 and found.request_rate.low == pytest.approx(1)
    assert found.total_rate.value == 10
    assert found.ttft.count == 80
    assert "10 %" in found.rule and "90 %" in found.rule


def test_the_first_round_of_a_closed_loop_is_left_out_of_latencies_and_rates_by_hand():
    """30 clients start at 0, each finish brings the next: latencies from 30, rates from the 30th finish."""
    requests = [request(n, max(n - 29, 0), n, n + 0.5, n + 1, 7, 3) for n in range(100)]
    window = choose(make_run(requests, clients=30))
    assert np.flatnonzero(window.keep).tolist() == list(range(30, 90))
    assert (window.low, window.high) == (30, 90)  # the tail is still a tenth
    assert window.counted.tolist() == list(range(30, 90))
    assert "30 that came at once" in window.rule
    few = choose(make_run(requests[:59], clients=30))  # half of them: what is left would be too little
    assert np.flatnonzero(few.keep).tolist() == list(range(5, 54)) and few.low == 5


def test_few_requests_are_all_taken_and_the_rule_says_so():
    found = summarise(open_run(19))
    assert found.ttft.count == 19 and "fewer than 20" in found.rule
    assert found.ttft.mean.low is None and found.request_rate.low is None
    assert summarise(open_run(20)).ttft.count == 16


def test_requests_that_all_finish_at_once_have_a_rate():
    requests = [request(number, 0, 0, 1, 10, 5, 3) for number in range(30)]
    found = summarise(make_run(requests))
    assert found.request_rate.value == 3 and "same moment" in found.rule


def test_an_unknown_window_is_refused():
    with pytest.raises(InputError, match="unknown window 'midle'; did you mean 'middle'"):
        summarise(open_run(5), window="midle")


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Independent waits: 95 % intervals of the mean of 1 must hold it in most of 60 runs, but not in all."""
    held = 0
    for seed in range(60):
        waits = np.random.default_rng(seed).exponential(1.0, 500)
        requests = [request(n, n, n, n + wait, n + wait + 1, 1, 2) for n, wait in enumerate(waits.tolist())]
        mean = summarise(make_run(requests), window="all").ttft.mean
        assert mean.value == pytest.approx(waits.mean())
        held += mean.low < 1.0 < mean.high
    assert 50 <= held < 60


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_time_between_tokens_is_that_of_the_written_out_tokens(seed):
    run, tokens = naive_run(seed, rows=30)
    found = summarise(run, window="all")
    every = np.concatenate([np.empty(0), *(np.diff(times) for times in tokens.values())])
    assert found.itl.count == len(every)
    if len(every):
        assert found.itl.p99 == pytest.approx(np.quantile(every, 0.99), abs=1e-12)
        assert found.longest_gap == pytest.approx(every.max(), abs=1e-12)


def test_as_dict_is_strict_json():
    for run in (make_run(), make_run([request(0, 0, 0, math.nan, math.nan, 1, 0, "")]), tiny(), open_run(60)):
        text = json.dumps(summarise(run).as_dict(), allow_nan=False)
        assert "stationary" in json.loads(text)


def test_the_peak_by_hand():
    run = make_run([request(0, 0, 0, 1, 2, 1, 1), request(1, 1, 1, 2, 4, 1, 1)])
    assert peak(run) == 2  # 1, 2, 1, 1 in the system during 4 s


def test_a_slot_taken_at_once_is_no_peak():
    run = make_run([request(0, 0, 0, 1, 2, 1, 1), request(1, 2, 2, 3, 4, 1, 1)])
    assert peak(run) == 1


def test_queue_by_hand():
    times = np.linspace(*tiny().span(), 8)
    lengths = waiting(tiny(), times)
    assert times.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert lengths.tolist() == [0, 1, 1, 1, 1, 0, 0, 1]


def test_an_overloaded_open_run_still_grows():
    steady, reason = judge(open_run(2000, rate=8.0, service=0.2))[:2]
    assert not steady
    # arrivals 8, served 5: the system gains 3 requests per second
    assert reason.startswith("number in the system still growing: +3 requests/s (standard error 0.")


def test_a_calm_open_run_is_stationary():
    assert judge(open_run(2000, rate=2.0, service=0.2))[:2] == (
        True, "neither the queue nor the number in the system grows or shrinks over the window",
    )  # fmt: skip


def test_all_at_once_is_never_stationary():
    run = make_run([request(n, 0, n, n, n + 1, 1, 1) for n in range(50)])
    assert judge(run)[:2] == (False, "all requests were there at the start: the run only drains")


def test_a_closed_loop_cannot_grow_but_must_go_round():
    run = make_run([request(n, n, n, n, n + 1, 1, 1) for n in range(50)], clients=10)
    assert judge(run)[:2] == (True, "closed loop of 10 clients: the queue cannot grow")
    run.meta["clients"] = 20
    assert judge(run)[:2] == (False, "closed loop, but only 2.5 requests per client finished")


def test_too_few_to_tell():
    run = make_run([request(0, 0, 0, 1, 2, 1, 1)], load="open")
    assert judge(run)[:2] == (False, "too few requests to tell")
