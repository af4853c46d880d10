"""The laws every average must keep: order, bounds, scale and shift."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.estimators.averages import Ema, Mean, TimedEma, WindowMean

Update = Callable[[Any, float], None]


def plain(estimator: Any, x: float) -> None:
    estimator.update(x)


def timed(estimator: Any, x: float) -> None:
    estimator.update(x, 0.013)


FAMILY: dict[str, tuple[Any, Update]] = {
    "ema": (Ema(7.3), plain),
    "timed": (TimedEma(1.0, 10.0), timed),
    "mean": (Mean(), plain),
    "window": (WindowMean(9), plain),
}
values = st.floats(0, 1e6)


@pytest.mark.parametrize("name", FAMILY)
@given(seen=st.lists(values, min_size=1, max_size=30))
def test_between_the_least_and_the_largest(name: str, seen: list[float]) -> None:
    made, update = FAMILY[name]
    estimator = copy.deepcopy(made)
    for x in seen:
        update(estimator, x)
    assert min(seen) * (1 - 1e-12) <= estimator.value <= max(seen) * (1 + 1e-12)


@given(seen=st.lists(values, min_size=1, max_size=9), data=st.data())
def test_order_in_a_window_does_not_matter(seen: list[float], data: st.DataObject) -> None:
    one, other = WindowMean(9), WindowMean(9)
    for x in seen:
        one.update(x)
    for x in data.draw(st.permutations(seen)):
        other.update(x)
    assert one.value == other.value


@pytest.mark.parametrize("name", FAMILY)
@given(seen=st.lists(values, min_size=1, max_size=30), scale=st.floats(0.1, 10), shift=values)
def test_scale_and_shift(name: str, seen: list[float], scale: float, shift: float) -> None:
    made, update = FAMILY[name]
    one, other = copy.deepcopy(made), copy.deepcopy(made)
    for x in seen:
        update(one, x)
        update(other, scale * x + shift)
    # Both round at every update, relative to the largest value seen.
    assert other.value == pytest.approx(
        scale * one.value + shift, abs=1e-12 * (scale * max(seen) + shift) + 1e-9
    )
