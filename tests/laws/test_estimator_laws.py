"""The laws every estimator must keep: n equal values at once, order, scale and shift."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.estimators.averages import Ema, Mean, Rate, TimedEma, WindowMean

Update = Callable[[Any, float, int], None]


def plain(estimator: Any, x: float, n: int) -> None:
    estimator.update(x, n)


def timed(estimator: Any, x: float, n: int) -> None:
    estimator.update(x, 0.013, n)


FAMILY: dict[str, tuple[Any, Update]] = {
    "ema": (Ema(7.3), plain),
    "timed": (TimedEma(1.0, 10.0), timed),
    "mean": (Mean(), plain),
    "window": (WindowMean(9), plain),
    "rate": (Rate(9), plain),
}
values = st.floats(0, 1e6)
runs = st.lists(st.tuples(values, st.integers(0, 40)), max_size=12)


@pytest.mark.parametrize("name", FAMILY)
@given(runs=runs)
def test_n_at_once_is_n_times_one(name: str, runs: list[tuple[float, int]]) -> None:
    made, update = FAMILY[name]
    jumped, walked = copy.deepcopy(made), copy.deepcopy(made)
    for x, n in runs:
        update(jumped, x, n)
        for _ in range(n):
            update(walked, x, 1)
        assert jumped.value == walked.value
    if name == "window":
        assert jumped.spread == walked.spread


@pytest.mark.parametrize("name", FAMILY)
@given(runs=runs)
def test_none_until_the_first_value(name: str, runs: list[tuple[float, int]]) -> None:
    made, update = FAMILY[name]
    estimator = copy.deepcopy(made)
    for x, n in runs:
        update(estimator, x, n)
    seen = any(x > 0 or name != "rate" for x, n in runs if n)
    assert seen or estimator.value is None
    assert not seen or name == "rate" or estimator.value is not None


@pytest.mark.parametrize("name", ["ema", "timed", "mean", "window"])
@given(seen=st.lists(values, min_size=1, max_size=30))
def test_between_the_least_and_the_largest(name: str, seen: list[float]) -> None:
    made, update = FAMILY[name]
    estimator = copy.deepcopy(made)
    for x in seen:
        update(estimator, x, 1)
    assert min(seen) * (1 - 1e-12) <= estimator.value <= max(seen) * (1 + 1e-12)


@given(seen=st.lists(values, min_size=1, max_size=9), data=st.data())
def test_order_in_a_window_does_not_matter(seen: list[float], data: st.DataObject) -> None:
    one, other = WindowMean(9), WindowMean(9)
    for x in seen:
        one.update(x)
    for x in data.draw(st.permutations(seen)):
        other.update(x)
    assert one.value == other.value


@pytest.mark.parametrize("name", ["ema", "timed", "mean", "window"])
@given(seen=st.lists(values, min_size=1, max_size=30), scale=st.floats(0.1, 10), shift=values)
def test_scale_and_shift(name: str, seen: list[float], scale: float, shift: float) -> None:
    made, update = FAMILY[name]
    one, other = copy.deepcopy(made), copy.deepcopy(made)
    for x in seen:
        update(one, x, 1)
        update(other, scale * x + shift, 1)
    # Both round at every update, relative to the largest value seen.
    assert other.value == pytest.approx(
        scale * one.value + shift, abs=1e-12 * (scale * max(seen) + shift) + 1e-9
    )


@given(seen=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), scale=st.floats(0.1, 10))
def test_a_rate_scales_with_one_over_time(seen: list[float], scale: float) -> None:
    one, other = Rate(9), Rate(9)
    for x in seen:
        one.update(x)
        other.update(scale * x)
    assert one.value is not None
    assert other.value == pytest.approx(one.value / scale)
