"""Averages: known answers and what bad parameters say."""

from __future__ import annotations

from math import exp, log

import pytest

from headgate.estimators.averages import Ema, Mean, TimedEma, WindowMean


def test_ema_halves_with_each_half_life() -> None:
    ema = Ema(half_life=3)
    ema.update(8.0)
    for _ in range(3):
        ema.update(0.0)
    assert ema.value == pytest.approx(4.0)
    weighted = Ema(half_life=log(0.5) / log(0.7))  # weight of the new value 0.3
    weighted.update(0.0)
    weighted.update(1.0)
    assert weighted.value == pytest.approx(0.3)


def test_timed_ema_rises_faster_than_it_falls() -> None:
    ema = TimedEma(rising=1.0, falling=10.0)
    ema.update(0.0, 5.0)
    ema.update(100.0, 1.0)
    assert ema.value == pytest.approx(100 * (1 - exp(-1)))
    before = ema.value
    assert before is not None
    ema.update(0.0, 1.0)
    assert ema.value == pytest.approx(before * exp(-0.1))
    ema.update(55.0, 0.0)
    assert ema.value == pytest.approx(before * exp(-0.1))  # it lasted no time


def test_timed_ema_does_not_see_how_time_is_cut() -> None:
    whole, parts = TimedEma(1.0, 10.0), TimedEma(1.0, 10.0)
    for ema in (whole, parts):
        ema.update(10.0, 1.0)
    whole.update(50.0, 2.0)
    for _ in range(100):
        parts.update(50.0, 0.02)
    assert parts.value == pytest.approx(whole.value)


def test_mean_and_window() -> None:
    mean, window = Mean(), WindowMean(3)
    for x in (1.0, 2.0, 6.0, 7.0):
        mean.update(x)
        window.update(x)
    assert mean.value == 4
    assert window.value == 5
    assert window.spread == pytest.approx((14 / 3) ** 0.5)
    assert len(window) == 3


def test_nothing_before_the_first_update() -> None:
    for empty in (Ema(1), TimedEma(1, 1), Mean(), WindowMean(1)):
        assert empty.value is None
    assert WindowMean(2).spread is None
