from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.stats.figures import Estimate, Spread, batches, figures, half_width, per_batch, quantiles

NUMBERS = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 5)), min_size=1, max_size=30)


@given(NUMBERS)
def test_weighted_figures_are_those_of_the_sample_written_out(pairs):
    values, weights = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    whole = np.repeat(values, weights)
    found = figures(values, weights=weights)
    assert found.count == len(whole)
    if not len(whole):
        assert math.isnan(found.p99)
        return
    shares = [0.0, 0.37, 0.5, 0.99, 1.0]
    np.testing.assert_allclose(quantiles(values, weights, shares), np.quantile(whole, shares), atol=1e-9)
    expected = [whole.mean(), np.median(whole), *np.quantile(whole, [0.9, 0.95, 0.99]), whole.std()]
    ours = [found.mean.value, found.median, found.p90, found.p95, found.p99, found.std]
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    plain = figures(whole)
    assert (plain.p99, plain.median, plain.count) == pytest.approx((found.p99, found.median, found.count))


def test_half_width_is_the_t_interval():
    parts = np.arange(20.0)
    # sample deviation of 0..19 is sqrt(35); t quantile with 19 degrees of freedom is 2.093024
    assert half_width(parts) == pytest.approx(2.093024 * math.sqrt(35 / 20), rel=1e-6)
    assert half_width(parts[:1]) is None
    assert half_width(np.array([1.0, math.nan])) is None


def test_batches_are_equal_and_consecutive():
    chosen = np.ones(50, bool)
    chosen[:10] = False
    number = batches(chosen)
    assert number[:10].tolist() == [-1] * 10
    assert number[10:].tolist() == [batch for batch in range(20) for _ in range(2)]
    assert np.all(batches(np.ones(39, bool)) == -1)


def test_sums_by_batch_leave_out_the_unknown():
    number = batches(np.ones(40, bool))
    values = np.arange(40.0)
    values[1] = math.nan
    sums = per_batch(number, values)
    assert sums[0] == 0 and sums[1] == 2 + 3 and len(sums) == 20
    assert len(per_batch(np.full(4, -1), np.ones(4))) == 0


def test_ratio_of_sums_and_its_influences():
    spread = Spread.of_ratio(np.array([2.0, 6.0]), np.array([1.0, 3.0]))
    assert spread.value == 2
    assert spread.parts.tolist() == [0, 0]  # both parts have the same ratio
    uneven = Spread.of_ratio(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    assert (uneven.value, uneven.parts.tolist()) == (2, [-1, 1])
    assert math.isnan(Spread.of_ratio(np.zeros(2), np.zeros(2)).value)


def test_pairing_removes_what_hit_both_alike():
    noise = np.random.default_rng(0).normal(size=20)
    base, other = Spread.of_values(10 + noise), Spread.of_values(11 + noise)
    difference = other.minus(base).estimate()
    assert difference.value == pytest.approx(1)
    assert difference.low == pytest.approx(1) and difference.high == pytest.approx(1)
    alone = base.estimate()
    assert alone.high - alone.low > 0.5


def test_unequal_parts_give_no_interval():
    one, two = Spread(2.0, np.zeros(20)), Spread(1.0, np.empty(0))
    assert one.minus(two).estimate() == Estimate(1.0)


def test_intervals_stay_where_values_can_be():
    few = Spread.of_values(np.array([0.1, 5.0, 0.2]))
    assert few.estimate().low < 0 < few.value
    cut = few.estimate().cut()
    assert (cut.value, cut.low, cut.high) == (few.value, 0.0, few.estimate().high)
    assert figures(np.array([0.1, 5.0]), few).mean.low == 0.0
    assert Estimate(0.5, -0.2, 1.3).as_share() == Estimate(0.5, 0.0, 1.0)
    assert Estimate(3.0).cut() == Estimate(3.0)
