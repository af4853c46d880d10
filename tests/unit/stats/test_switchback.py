"""Estimators of a switchback: published values, known intervals, and no difference where there is none."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest

from headgate.stats.switchback import (
    ANY_TIME,
    BINS,
    CANNOT_TELL,
    GAP_P99,
    KEPT,
    LESS,
    LIGHT,
    LOOK,
    MORE,
    OVERLOAD,
    SAME,
    SATURATED,
    TTFT,
    TTFT_P95,
    Change,
    Looks,
    Sums,
    anytime,
    bin_of,
    block_length,
    compare,
    difference,
    fieller,
    in_rounds,
    judge_metric,
    middle_of,
    quantile,
    rounds_missing,
    state_of,
    student,
    woodruff,
    word_for,
)


def pairs(rounds, seed, factor=1.0, spread=0.1, kept=(0.9, 0.9)):
    """Rounds of two arms with shared ups and downs; the arm's times are `factor` times as long."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        load = rng.lognormal(0, 0.5)
        both = []
        for arm in (0, 1):
            times = 0.2 * load * rng.lognormal(0, spread) * rng.lognormal(0, 1, 200) * (factor if arm else 1)
            sums = Sums(promised=200, kept=rng.binomial(200, kept[arm]), ttft=times.sum(), firsts=200)
            sums.gap_seconds, sums.gaps = times.sum(), 200
            np.add.at(sums.gap_bins, [bin_of(time) for time in times.tolist()], 1)
            both.append(sums)
        found.append(tuple(both))
    return found


def test_critical_values_are_those_of_the_design():
    assert [round(anytime(n, ANY_TIME), 2) for n in (10, 20, 30)] == [3.87, 3.42, 3.35]
    assert [round(anytime(n, LOOK), 2) for n in (10, 20, 30)] == [5.27, 4.20, 4.00]
    assert student(31, 0.05) == pytest.approx(2.042, abs=1e-3)
    assert anytime(2, LOOK) == inf  # two rounds tell nothing
    assert Looks(planned=False).at_the_end(10) == pytest.approx(3.87, abs=5e-3)
    assert Looks(comparisons=2).at_the_end(10) == pytest.approx(student(10, 0.02))


def test_every_round_holds_each_arm_once_in_an_order_of_chance():
    orders = [order for order, _ in zip(in_rounds(3, 7), range(600), strict=False)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    counts = {tuple(order): orders.count(order) for order in orders}
    assert len(counts) == 6 and min(counts.values()) > 60
    assert orders == [order for order, _ in zip(in_rounds(3, 7), range(600), strict=False)]


def test_bins_are_one_percent_wide():
    for seconds in (0.001, 0.05, 1.0, 300.0):
        assert abs(log(float(middle_of(bin_of(seconds))) / seconds)) <= 0.0051
    assert bin_of(0.0) == 0 and bin_of(1e9) == BINS - 1
    bins = np.zeros(BINS)
    for seconds in np.linspace(0.001, 1, 5000):
        bins[bin_of(float(seconds))] += 1
    assert quantile(bins, 0.95) == pytest.approx(0.95, rel=0.011)


def test_a_difference_of_shares_keeps_the_pairing():
    tops = np.array([[10.0, 20], [50, 60], [90, 100], [30, 40]])  # ups and downs are shared
    unders = np.full((4, 2), 100.0)
    change = difference(tops, unders, 3.0)
    assert change.value == pytest.approx(0.1) and change.high - change.low < 1e-9
    apart = difference(np.array([[10.0, 90], [50, 60], [90, 10], [30, 60]]), unders, 3.0)
    assert apart.high - apart.low > 0.5
    assert difference(tops, np.zeros((4, 2)), 3.0) is None


def test_fieller_holds_the_true_ratio_and_knows_when_it_has_no_end():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        load = rng.lognormal(0, 0.4, 20)
        tops = np.stack([load * rng.lognormal(0, 0.2, 20), 1.3 * load * rng.lognormal(0, 0.2, 20)], 1) * 100
        change = fieller(tops, np.full((20, 2), 100.0), student(20, 0.05))
        inside += change.low <= 0.3 <= change.high
    assert 184 <= inside <= 199
    wild = fieller(np.array([[1.0, 5], [90, 5], [1, 5]]), np.full((3, 2), 1.0), 4.3)
    assert wild.high == inf and wild.low == -1.0 and word_for(wild, 0.05) == CANNOT_TELL


def test_woodruff_holds_the_true_ratio_of_percentiles():
    inside = 0
    for seed in range(40):
        rounds = pairs(20, seed, factor=1.5)
        bins = np.array([[sums.gap_bins for sums in both] for both in rounds])
        change = woodruff(bins, 0.95, student(20, 0.05))
        inside += change.low <= 0.5 <= change.high
        assert change.low <= change.value <= change.high
    assert inside >= 35
    bins[:, 1] = bins[:, 0]
    same = woodruff(bins, 0.99, 2.0)
    assert same.value == pytest.approx(0, abs=1e-9) and -0.15 < same.low < 0 < same.high < 0.15


@pytest.mark.parametrize("metric", [KEPT, TTFT, GAP_P99], ids=lambda metric: metric.name)
def test_no_difference_is_seldom_called_one(metric):
    found = 0
    for seed in range(50):
        verdict = judge_metric(metric, pairs(15, seed), lambda n: student(n, 0.04))
        found += verdict.word in (MORE, LESS)
    assert found <= 5  # 2 expected


def test_looks_after_every_round_find_no_difference_either():
    looks, stopped = Looks(), 0
    for seed in range(40):
        rounds = pairs(25, seed)
        stopped += any(
            word_for(compare(KEPT, rounds[:n], looks.on_the_way(n)), 0.0) != CANNOT_TELL for n in range(6, 26)
        )
    assert stopped <= 2


def test_words():
    assert word_for(Change(1, 1, 0.2, 0.1, 0.3), 0.05) == MORE
    assert word_for(Change(1, 1, -0.2, -0.3, -0.1), 0.05) == LESS
    assert word_for(Change(1, 1, 0.0, -0.04, 0.04), 0.05) == SAME
    assert word_for(Change(1, 1, 0.0, -0.06, 0.04), 0.05) == CANNOT_TELL
    assert word_for(None, 0.05) == CANNOT_TELL


def test_five_rounds_cannot_tell_whatever_they_say():
    rounds = pairs(6, 3, factor=50.0)
    assert judge_metric(TTFT, rounds, lambda n: student(n, 0.04)).word == MORE
    verdict = judge_metric(TTFT, rounds[:5], lambda n: student(n, 0.04))
    assert (verdict.word, verdict.rounds_missing) == (CANNOT_TELL, 1)
    assert verdict.change.high == inf  # no interval is shown either
    assert judge_metric(TTFT, rounds[:1], lambda n: 2.0).change is None


def sparse(rounds, seed, rate):
    """Two equal arms that get so many requests a block, on average."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(rounds):
        both = []
        for _ in (0, 1):
            times = rng.lognormal(-2, 0.7, rng.poisson(rate))
            sums = Sums(promised=len(times), kept=(times < 0.2).sum(), ttft=times.sum(), firsts=len(times))
            np.add.at(sums.ttft_bins, [bin_of(time) for time in times.tolist()], 1)
            both.append(sums)
        found.append(tuple(both))
    return found


@pytest.mark.parametrize("metric", [KEPT, TTFT, TTFT_P95], ids=lambda metric: metric.name)
def test_a_class_that_seldom_sends_shows_no_difference(metric):
    found, later = 0, lambda n: student(n, 0.04)
    for seed in range(40):
        found += judge_metric(metric, sparse(20, seed, 0.2), later).word in (MORE, LESS, SAME)
    assert found == 0
    for seed in range(40):
        found += judge_metric(metric, sparse(20, seed, 1.5), later).word in (MORE, LESS)
    assert found <= 5  # 2 expected


def test_one_request_in_each_arm_tells_nothing():
    base, arm = Sums(promised=1, kept=1, ttft=0.1, firsts=1), Sums(promised=1, ttft=0.2, firsts=1)
    rounds = [(base, Sums()), *[(Sums(), Sums())] * 4, (Sums(), arm)]
    for metric in (KEPT, TTFT):
        verdict = judge_metric(metric, rounds, Looks().at_the_end)
        assert (verdict.word, verdict.rounds_missing, verdict.change.high) == (CANNOT_TELL, None, inf)
    half = judge_metric(KEPT, [(base, arm)] * 3 + [(base, Sums())] * 3, Looks().at_the_end)
    assert (half.word, half.rounds_missing, half.change.low) == (CANNOT_TELL, 6, -inf)


def test_forecasts_grow_with_what_is_missing():
    later = lambda n: 2.0  # noqa: E731
    near = rounds_missing(Change(1, 1, 0.10, -0.01, 0.21), 10, 0.01, 2.0, later)
    far = rounds_missing(Change(1, 1, 0.10, -0.20, 0.40), 10, 0.01, 2.0, later)
    assert near == 3 and far == 81  # (0.11 / 0.10)^2 and (0.30 / 0.10)^2 of the rounds
    same = rounds_missing(Change(1, 1, 0.0, -0.05, 0.05), 10, 0.01, 2.0, later)
    assert same == 241  # until the interval lies inside the margin
    assert rounds_missing(Change(1, 1, 0.0, -1.0, inf), 10, 0.01, 2.0, later) is None


def test_the_backlog_tells_the_state_of_the_server():
    assert state_of([[0.1, 0.3, 4.9], [0.0, 0.2, 0.1]]).name == LIGHT
    assert state_of([[18.1, 18.2, 18.0], [18.3, 18.1, 18.2]]).name == SATURATED
    overload = state_of([[1.5, 30.0, 38.0], [2.0, 20.0, 25.0]])
    assert overload.name == OVERLOAD and "lower the load" in overload.said()


def test_blocks_are_as_long_as_batches_need():
    assert block_length(0.5) == (30.0, 5.0)
    assert block_length(9.5) == (38.0, 10.0)
    assert block_length(300.0) == (120.0, 40.0)
