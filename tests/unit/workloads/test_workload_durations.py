"""Durations and slices as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.workloads import duration, slice_text


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
        ("3", 3.0),
        ("2e-3", 0.002),
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


def test_endless_duration():
    with pytest.raises(InputError, match="'1e400' is too long a duration"):
        duration("1e400")


@given(st.floats(min_value=0, max_value=1e9))
def test_seconds_come_back_as_written(seconds):
    assert duration(f"{seconds!r}s") == seconds


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("10min..20min", (600.0, 1200.0)),
        ("..500ms", (0.0, 0.5)),
        ("1h..", (3600.0, math.inf)),
        ("1.5..2.5", (1.5, 2.5)),
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
        ("1..1", "ends before it starts"),
        ("a..b", "'a' is not a duration"),
    ],
)
def test_bad_slices(text, message):
    with pytest.raises(InputError, match=message):
        slice_text(text)
