from __future__ import annotations

import math

import numpy as np
import pytest

from headgate.stats.figures import PartOrder, alike, correlation, half_width, widening

SEEDS = 400


def held(make, order: PartOrder) -> tuple[float, float]:
    """Share of the intervals of a mean of 20 parts that hold 0, the truth, and width over that needed."""
    rng = np.random.default_rng(0)
    series = [make(rng) for _ in range(SEEDS)]
    means = np.array([one.mean() for one in series])
    half = np.array([half_width(one - one.mean(), order) for one in series])
    return float(np.mean(np.abs(means) < half)), float(half.mean() / 1.96 / means.std())


def independent(rng):
    return rng.normal(size=20)


def remembering(rng):
    """AR(1) with a correlation of 0.6."""
    found = rng.normal(size=40)
    for place in range(1, 40):
        found[place] += 0.6 * found[place - 1]
    return found[20:]


def telescoping(rng):
    """Steps between points that only wobble: what one is late the next is early."""
    return np.diff(rng.normal(size=21))


def test_seeds_have_the_plain_t_interval():
    parts = np.arange(20.0)  # alike as can be, but seeds have no order
    assert half_width(parts) == pytest.approx(2.093024 * math.sqrt(35 / 20), rel=1e-6)
    assert half_width(parts, PartOrder.BATCHES) > 3 * half_width(parts)


@pytest.mark.parametrize("order", PartOrder)
def test_too_few_or_unknown_parts_give_none(order):
    assert half_width(np.array([1.0]), order) is None
    assert half_width(np.array([1.0, math.nan]), order) is None
    assert half_width(np.zeros(20), order) == 0
    assert half_width(np.array([1.0, 2.0]), order) == pytest.approx(12.7062 * 0.5, rel=1e-4)


def test_correlation_by_hand():
    """2, 1, -1, -2 and their like: products of neighbours 2 - 1 + 2 ... over the squares."""
    parts = np.array([2.0, 1.0, 0.0, -1.0, -2.0])
    assert correlation(parts) == pytest.approx((5 * (2 + 0 + 0 + 2) / 10 + 1) / 1)
    assert correlation(np.ones(20)) == 0 and correlation(np.array([1.0, 2.0])) == 0


def test_widening_is_that_of_ar1_and_never_narrows():
    parts = np.repeat([1.0, -1.0, 1.0, -1.0, 1.0], 4)
    own = correlation(parts)
    assert widening(parts) == pytest.approx(math.sqrt((1 + own) / (1 - own))) and own > 0.5
    assert widening(np.array([1.0, -1.0] * 10)) == 1
    assert widening(np.arange(20.0)) == pytest.approx(math.sqrt(1.9 / 0.1))  # no further
    assert alike(parts) and not alike(np.array([1.0, -1.0] * 10))


def test_chance_is_seldom_called_alike():
    rng = np.random.default_rng(0)
    share = np.mean([alike(rng.normal(size=20)) for _ in range(2000)])
    assert 0.03 < share < 0.07


@pytest.mark.parametrize(
    ("make", "order", "least", "widest"),
    [
        (independent, PartOrder.SEEDS, 0.93, 1.15),
        (independent, PartOrder.BATCHES, 0.94, 1.3),
        (independent, PartOrder.CURVE, 0.90, 1.3),
        (remembering, PartOrder.BATCHES, 0.87, 1.5),
        (telescoping, PartOrder.CURVE, 0.97, 2.1),
    ],
)
def test_intervals_hold_what_they_say_and_are_not_too_wide(make, order, least, widest):
    share, width = held(make, order)
    assert share >= least and width <= widest


def test_plain_intervals_would_not_do():
    """Why orders are told apart: too sure of themselves with memory, far too wide when steps telescope."""
    assert held(remembering, PartOrder.SEEDS)[0] < 0.75
    assert held(telescoping, PartOrder.SEEDS)[1] > 4
