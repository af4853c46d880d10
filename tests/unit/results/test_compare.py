from __future__ import annotations

import json
import math

import numpy as np
import pytest
from small_runs import make_run, open_run, request

from headgate.core.errors import InputError
from headgate.results.compare import compare
from headgate.results.metrics import summarise


def slower(seed: int = 0, factor: float = 1.1, total: int = 400, **meta):
    """The same requests on an engine slower by this factor."""
    return open_run(total, service=0.2 * factor, seed=seed, **meta)


def row(comparison, name):
    return next(one for one in comparison.rows if one.metric == name)


def test_one_seed_sees_a_small_difference_that_bare_intervals_hide():
    found = compare({"fast": [slower(factor=1.0)], "slow": [slower(factor=1.02)]}, "fast")
    ttft = row(found, "mean TTFT")
    difference = ttft.others["slow"]
    own = summarise(slower(factor=1.02)).ttft.mean
    assert own.low < ttft.baseline.value < own.high  # alone, the intervals overlap
    assert difference.verdict == "worse" and difference.absolute.low > 0
    assert difference.value == own.value
    assert difference.percent.value == pytest.approx(100 * (own.value / ttft.baseline.value - 1))
    assert ttft.winner == "fast" and ttft.level == ()
    assert "20 batches" in ttft.method


def test_values_are_those_of_the_summary():
    kinds = [{"name": "", "first_token": 0.2, "between_tokens": None}]
    run = slower(kinds=kinds)
    found, alone = compare({"a": [run], "b": [run]}, "a"), summarise(run)
    expected = {
        "request throughput": alone.request_rate, "total token throughput": alone.total_rate,
        "mean TTFT": alone.ttft.mean, "mean TPOT": alone.tpot.mean, "mean E2E": alone.e2e.mean,
        "goodput": alone.goodput.share,
    }  # fmt: skip
    assert [one.metric for one in found.rows] == [
        "request throughput", "total token throughput", "mean TTFT", "p99 TTFT", "mean TPOT", "p99 ITL",
        "mean E2E", "longest gap", "goodput",
    ]  # fmt: skip
    for name, estimate in expected.items():
        ours = row(found, name).baseline
        expected_ends = (estimate.value, estimate.low, estimate.high)
        assert (ours.value, ours.low, ours.high) == pytest.approx(expected_ends)
    assert row(found, "p99 TTFT").baseline.value == alone.ttft.p99
    assert row(found, "p99 ITL").baseline.value == alone.itl.p99
    assert row(found, "longest gap").baseline.value == alone.longest_gap


def test_equal_runs_show_no_difference_and_no_winner():
    found = compare({"a": [slower()], "b": [slower()]}, "a")
    for one in found.rows:
        assert one.others["b"].verdict == "no difference seen"
        assert one.others["b"].absolute.value == 0
        assert one.winner is None and one.level


def test_higher_is_better_for_rates():
    """Overload: the faster engine has the higher rate."""
    runs = {name: [open_run(1000, rate=50, service=time)] for name, time in (("a", 0.2), ("b", 0.1))}
    rate = row(compare(runs, "a"), "request throughput")
    assert rate.others["b"].verdict == "better" and rate.winner == "b"
    assert rate.others["b"].percent.value == pytest.approx(100, rel=1e-6)
    assert row(compare(runs, "b"), "request throughput").others["a"].verdict == "worse"


def test_seeds_are_paired_one_by_one_by_hand():
    runs = {name: [slower(seed, factor) for seed in range(4)] for name, factor in (("a", 1.0), ("b", 1.1))}
    found = compare(runs, "a")
    means = {name: np.array([summarise(run).ttft.mean.value for run in own]) for name, own in runs.items()}
    gain = means["b"] - means["a"]
    half = 3.182446 * gain.std(ddof=1) / 2  # t quantile with 3 degrees of freedom, square root of 4
    ours = row(found, "mean TTFT").others["b"]
    assert ours.absolute.value == pytest.approx(gain.mean())
    assert ours.absolute.high == pytest.approx(gain.mean() + half, rel=1e-6)
    assert ours.value == pytest.approx(means["b"].mean())
    assert row(found, "mean TTFT").method == "by seed" and found.seeds == 4


def test_level_with_the_best():
    found = compare({"a": [slower(factor=2.0)], "b": [slower()], "c": [slower()]}, "a")
    ttft = row(found, "mean TTFT")
    assert (ttft.winner, ttft.level) == ("b", ("c",))
    assert found.policies == ("a", "b", "c")


def test_few_requests_give_no_verdict():
    found = compare({"a": [slower(total=30)], "b": [slower(total=30, factor=2.0)]}, "a")
    ttft = row(found, "mean TTFT")
    assert ttft.others["b"].verdict == "too few requests" and ttft.others["b"].absolute.low is None
    assert ttft.others["b"].percent.value > 0 and ttft.winner is None


def test_what_one_policy_never_did_is_not_measured():
    waits = [request(n, n, math.nan, math.nan, math.nan, 1, 0, "") for n in range(60)]
    serves = [request(n, n, n, n + 1, n + 2, 1, 2) for n in range(60)]
    found = compare({"a": [make_run(waits)], "b": [make_run(serves)]}, "a")
    assert row(found, "mean TTFT").others["b"].verdict == "not measured"
    assert any("not the same number" in note and "a 0, b 60" in note for note in found.notes)
    json.dumps(found.as_dict(), allow_nan=False)


def test_notes_name_runs_that_are_not_stationary():
    runs = {name: [open_run(1000, rate=50, seed=1)] for name in ("a", "b")}
    assert compare(runs, "a").notes[0].startswith("not stationary: a, b (queue still growing")
    assert compare({"a": [slower()], "b": [slower()]}, "a").notes == ()


def test_as_dict_is_strict_json_with_winners():
    found = compare({"a": [slower()], "b": [slower(factor=1.5)]}, "a").as_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["rows"][2]["winner"] == "a"


def changed(column: str, value: float):
    run = slower()
    run.requests[column][5] = value
    return run


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"a": [slower()]}, "at least two policies"),
        ({"b": [slower()]}, "unknown baseline 'a'"),
        ({"a": [slower()], "b": [slower(), slower()]}, "'b' has 2 runs, 'a' has 1"),
        ({"a": [], "b": []}, "'a' has 0 runs"),
        ({"a": [slower()], "b": [slower(total=399)]}, "399 against 400 of them"),
        ({"a": [slower()], "b": [slower(seed=1)]}, "arrival of request 0 differs"),
        ({"a": [slower()], "b": [changed("prompt", 11)]}, "prompt of request 5 differs"),
        ({"a": [slower()], "b": [changed("output", 4)]}, "output of request 5 differs"),
        ({"a": [slower()], "b": [slower(clients=4)]}, "one was sent closed, the other open"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, message):
    with pytest.raises(InputError, match=message):
        compare(runs, "a")


def test_unfinished_outputs_may_differ_and_closed_arrivals_too():
    cut = changed("output", 1)
    cut.requests["how"][5] = -1
    compare({"a": [slower()], "b": [cut]}, "a")
    compare({"a": [slower(clients=4)], "b": [slower(clients=4, factor=1.2)]}, "a")
    moved = slower(clients=4)
    moved.requests["arrival"] += 1e-3
    compare({"a": [slower(clients=4)], "b": [moved]}, "a")
