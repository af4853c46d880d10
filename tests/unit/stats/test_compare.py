from __future__ import annotations

import json
import math

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.stats.comparison import compare
from headgate.stats.figures import half_width
from headgate.stats.flow import choose
from headgate.stats.measured import Measured
from headgate.stats.metrics import rate_spread, summarise
from small_runs import make_run, open_run, request


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
    scaled = 100 * difference.absolute.low / ttft.baseline.value
    assert difference.percent.low == pytest.approx(scaled)  # the two never contradict each other
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
        seen = "needs more seeds" if one.metric == "longest gap" else "no difference seen"
        assert one.others["b"].verdict == seen
        assert one.others["b"].absolute.value == 0
        assert one.winner is None and (one.level or one.metric == "longest gap")


def saturated(service: float, **meta):
    """A closed loop of four clients: the engine is never idle, and nothing piles up."""
    return open_run(1000, rate=50, service=service, clients=4, **meta)


def test_higher_is_better_for_rates():
    runs = {name: [saturated(time)] for name, time in (("a", 0.2), ("b", 0.1))}
    rate = row(compare(runs, "a"), "request throughput")
    assert rate.others["b"].verdict == "better" and rate.winner == "b"
    assert rate.others["b"].percent.value == pytest.approx(100, rel=1e-6)
    assert row(compare(runs, "b"), "request throughput").others["a"].verdict == "worse"


def overload(shortest_first: bool):
    """All come within 20 s and few are long. Short ones first, many end soon; and it is 5 % slower in all."""
    run = open_run(1000, rate=50)
    service = np.random.default_rng(0).lognormal(-2.0, 1.2, 1000) * (1.05 if shortest_first else 1.0)
    order = np.argsort(service if shortest_first else run.requests["arrival"], kind="stable")
    ends = run.requests["arrival"].max() + np.cumsum(service[order])
    run.requests["admitted"][order] = ends - service[order]
    run.requests["first_token"][order] = ends - service[order] * 2 / 3
    run.requests["finished"][order] = ends
    return run


def test_an_overload_gives_no_verdict_on_throughput():
    """In its window the slower engine serves 'more', because it takes short requests first."""
    runs = {"fifo": [overload(False)], "short": [overload(True)]}
    window = {name: Measured(own[0]).metrics.request_rate.value for name, own in runs.items()}
    assert window["short"] > 1.02 * window["fifo"]
    found = compare(runs, "fifo")
    for metric in ("request throughput", "total token throughput"):
        rate = row(found, metric)
        assert rate.others["short"].value < rate.baseline.value  # over the whole run
        assert rate.others["short"].verdict == "backlog grows"
        assert (rate.best, rate.winner, rate.level, rate.apart) == (None, None, (), ())
    assert found.doubts == {"fifo": "backlog grows", "short": "backlog grows"}
    assert found.whole["short"].rate < found.whole["fifo"].rate and found.whole["fifo"].served == 1000
    assert row(found, "mean TTFT").others["short"].verdict != "backlog grows"


def test_only_those_in_doubt_get_no_verdict():
    runs = {"a": [saturated(0.2)], "b": [saturated(0.1)], "c": [saturated(0.1)]}
    rate = row(compare(runs, "a", bound=5.2), "request throughput")
    assert [each.verdict for each in rate.others.values()] == ["above the bound"] * 2 and rate.winner is None
    assert compare(runs, "a", bound=5.2).doubts == {"b": "above the bound", "c": "above the bound"}
    above = compare(runs, "b", bound=5.2)  # and one of them is what others are compared with
    assert {each.verdict for each in row(above, "request throughput").others.values()} == {"above the bound"}
    assert compare(runs, "a", bound=10.2).doubts == {}
    one_of_many = {name: [slower(seed) for seed in range(12)] for name in ("a", "b")}
    one_of_many["b"][3] = open_run(400, seed=3, service=0.3)  # not stationary: by chance, so far
    assert compare(one_of_many, "a").doubts == {}


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


def fixed(values: list[float]):
    """A run whose TTFTs are given, one request a second."""
    return make_run([request(n, n, n, n + value, n + value + 1, 1, 2) for n, value in enumerate(values)])


def test_no_mark_when_none_can_be_told_from_the_best():
    """The best by value is noise: the others, told from each other, cannot be told from it."""
    rng = np.random.default_rng(0)
    runs = {"wild": rng.exponential(1.0, 400) * 3, "low": np.full(400, 6.0), "high": np.full(400, 6.1)}
    found = compare({name: [fixed(values.tolist())] for name, values in runs.items()}, "low")
    ttft = row(found, "mean TTFT")
    assert (ttft.best, ttft.winner) == ("wild", "wild") and ttft.apart == ("low", "high")
    runs["wild"] *= 1.8
    found = compare({name: [fixed(values.tolist())] for name, values in runs.items()}, "low")
    ttft = row(found, "mean TTFT")
    assert (ttft.best, ttft.winner, ttft.level, ttft.apart) == ("wild", None, ("low", "high"), ())
    assert ttft.others["high"].verdict == "worse"


def test_who_was_not_measured_makes_no_winner():
    """Of three, one never served anybody: the other two are level, so there is no best."""
    waits = make_run([request(n, n, math.nan, math.nan, math.nan, 1, 0, "") for n in range(60)])
    serves = make_run([request(n, n, n, n + 1, n + 2, 1, 2) for n in range(60)])
    ttft = row(compare({"a": [serves], "b": [serves], "c": [waits]}, "a"), "mean TTFT")
    assert ttft.winner is None and ttft.level == ("b",)


def test_the_longest_gap_has_no_interval_from_one_seed_but_from_several():
    runs = {name: [slower(seed, factor) for seed in range(4)] for name, factor in (("a", 1.0), ("b", 1.5))}
    one = row(compare({name: own[:1] for name, own in runs.items()}, "a"), "longest gap")
    alone = [summarise(runs[name][0]).longest_gap for name in ("a", "b")]
    difference = one.others["b"]
    assert (one.baseline.value, difference.value) == tuple(alone) and one.baseline.low is None
    assert difference.absolute.value == alone[1] - alone[0] and difference.absolute.low is None
    assert difference.verdict == "needs more seeds" and one.winner is None
    assert "one seed: no interval" in one.method
    several = row(compare(runs, "a"), "longest gap")
    gain = [summarise(b).longest_gap - summarise(a).longest_gap for a, b in zip(*runs.values(), strict=True)]
    assert several.others["b"].absolute.value == pytest.approx(np.mean(gain))
    assert several.others["b"].verdict == "worse" and several.winner == "a"


def test_percentiles_are_centred_on_the_pooled_ones_and_hold_the_truth():
    """Independent exponential waits: the interval of p99 must hold ln 100 in most of 40 runs."""
    held = 0
    for seed in range(40):
        values = np.random.default_rng(seed).exponential(1.0, 1000)
        own = fixed(values.tolist())
        found = row(compare({"a": [own], "b": [own]}, "a", window="all"), "p99 TTFT").baseline
        assert found.value == pytest.approx(np.quantile(values, 0.99))
        assert found.value - found.low == pytest.approx(found.high - found.value)
        held += found.low < math.log(100) < found.high
    assert 33 <= held < 40


def test_the_percentile_of_gaps_holds_the_truth_too():
    """One gap per request, independent and exponential: most of 30 intervals hold ln 100, none is endless."""
    held = 0
    for seed in range(30):
        gaps = np.random.default_rng(seed).exponential(1.0, 2000).tolist()
        rows = [request(n, n, n, n + 1, n + 1 + gap, 1, 2) for n, gap in enumerate(gaps)]
        stays = [{"request": n, "opened": n + 1 + gap, "gap": gap} for n, gap in enumerate(gaps)]
        own = make_run(rows, stays=stays)
        found = row(compare({"a": [own], "b": [own]}, "a", window="all"), "p99 ITL").baseline
        assert found.value == pytest.approx(np.quantile(gaps, 0.99))
        held += found.low < math.log(100) < found.high < 9
    assert held >= 24


def test_rates_that_only_wobble_have_no_wide_interval():
    """Finishes jitter around one a second: the rate is known far better than 20 independent shares say."""
    jitter = np.random.default_rng(0).uniform(0, 5, 1000).tolist()
    own = make_run([request(n, n, n, n + 1, n + 1 + late, 1, 2) for n, late in enumerate(jitter)])
    spread = rate_spread(choose(own), np.ones(1000))
    assert half_width(spread.parts, spread.order) < half_width(spread.parts) / 1.5


def test_lost_requests_are_compared_only_when_some_were_lost():
    assert "lost requests" not in [
        one.metric for one in compare({"a": [slower()], "b": [slower()]}, "a").rows
    ]
    rows = [request(n, n, n, n + 1, n + 2, 1, 2) for n in range(100)]
    gone = [dict(row) for row in rows]
    for number, how in ((3, "aborted"), (20, "abandoned"), (50, "refused"), (70, "abandoned")):
        gone[number] = request(number, number, math.nan, math.nan, number + 1, 1, 0, how)
    gone[99] = request(99, 99, 99, math.nan, math.nan, 1, 0, "")  # still here: not lost
    lost = row(compare({"a": [make_run(rows)], "b": [make_run(gone)]}, "a"), "lost requests")
    assert (lost.baseline.value, lost.others["b"].value, lost.unit) == (0, 0.04, "share")
    assert not lost.higher_is_better and lost.best == "a"
    # 4 of 20 batches of five lost one each: influences of 0.16 and -0.04, deviation 0.0821, error 0.01835
    assert lost.others["b"].absolute.high == pytest.approx(0.04 + 2.093024 * 0.0183532, rel=1e-4)
    assert lost.others["b"].verdict == "worse"


def test_rough_intervals_are_named():
    rng = np.random.default_rng(0)
    walk = 5 + np.repeat(np.cumsum(rng.normal(0, 0.1, 40)), 10)
    found = compare({"a": [fixed([1.0] * 400)], "b": [fixed(walk.tolist())]}, "a")
    assert any(note.startswith("Intervals unreliable") and "mean TTFT" in note for note in found.notes)
    assert row(found, "mean TTFT").others["b"].absolute.rough
    assert "TTFT" in summarise(fixed(walk.tolist())).rough


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
    assert any("Different numbers" in note and "a 0, b 60" in note for note in found.notes)
    json.dumps(found.as_dict(), allow_nan=False)


def test_notes_name_runs_that_are_not_stationary():
    runs = {name: [open_run(1000, rate=50, seed=1)] for name in ("a", "b")}
    assert compare(runs, "a").notes[0].startswith("Overloaded: the backlog grows")
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


def test_no_difference_is_below_minus_a_hundred_percent():
    runs = {
        name: [make_run([request(0, 0, 0, first, first + 1, 5, 3)]) for first in firsts]
        for name, firsts in {"mixed": (9.0, 0.1), "eb": (0.1, 0.1)}.items()
    }
    found = row(compare(runs, "mixed"), "mean TTFT")
    other = found.others["eb"]
    assert found.baseline.low == 0.0 and other.percent.low == -100.0
    assert other.absolute.low < -found.baseline.value  # percents are cut, not what the verdict rests on
