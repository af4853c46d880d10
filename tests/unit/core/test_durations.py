"""Durations and slices as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.durations import duration, slice_text
from headgate.core.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("7ms", 0.007),
        ("0.5s", 0.5),
        (".5s", 0.5),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("1.5 h", 5400.0),
        ("3s", 3.0),
        ("30us", 3e-5),
        ("2e-3s", 0.002),
        (" 10 s ", 10.0),
        ("0", 0.0),
    ],
)
def test_known_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5m", "5 minutes", "-1s", "nan", "inf", "1h30min", "1,5s", "."])
def test_what_is_no_duration(text):
    with pytest.raises(InputError, match=r"is not a duration; write 500ms, 0\.5s, 2min or 1h"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("500", "'500' has no unit; write 500ms or 500s"),
        (" 0.5 ", "'0.5' has no unit; write 0.5ms or 0.5s"),
        ("2e-3", "'2e-3' has no unit; write 2e-3ms or 2e-3s"),
    ],
)
def test_a_bare_number_is_refused_with_its_two_meanings(text, message):
    with pytest.raises(InputError) as told:
        duration(text)
    assert str(told.value) == message


def test_prices_are_seconds_as_in_a_card():
    assert duration("3e-5", None) == duration("30us", None) == 3e-5


def test_endless_duration():
    with pytest.raises(InputError, match="'1e400s' is too long a duration"):
        duration("1e400s")


@given(st.floats(min_value=0, max_value=1e9))
def test_seconds_come_back_as_written(seconds):
    assert duration(f"{seconds!r}s") == seconds


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("10min..20min", (600.0, 1200.0)),
        ("..500ms", (0.0, 0.5)),
        ("1h..", (3600.0, math.inf)),
        ("1.5s..2.5s", (1.5, 2.5)),
        ("..", (0.0, math.inf)),
    ],
)
def test_known_slices(text, ends):
    assert slice_text(text) == ends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10min", "'10min' is not a slice of time; write it as 10min..20min"),
        ("20min..10min", "ends before it starts"),
        ("1s..1s", "ends before it starts"),
        ("10..20", "'10' has no unit; write 10s or 10min"),
        ("a..b", "'a' is not a duration"),
    ],
)
def test_bad_slices(text, message):
    with pytest.raises(InputError, match=message):
        slice_text(text)
