"""Fractional thresholds: the quota sequences, and changes on the way."""

from __future__ import annotations

from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.methods.wait.tracks import Quota


def steps(quota: Quota, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(quota.next())
        quota.advance()
    return found


@pytest.mark.parametrize(
    ("each", "sequence"),
    [
        (0.25, [1, 0, 0, 0, 1, 0, 0, 0]),
        (0.4, [1, 0, 1, 0, 0, 1, 0, 1, 0, 0]),
        (1.5, [2, 1, 2, 1]),
        (2, [2, 2, 2]),
        (inf, [inf, inf]),
    ],
)
def test_sequences(each, sequence):
    assert steps(Quota(each), len(sequence)) == sequence


@given(st.floats(0.001, 5), st.integers(1, 300))
def test_as_many_as_x_per_step_and_never_one_more(each, count):
    admitted = sum(steps(Quota(each), count))
    assert admitted == ceil(each * count - 1e-9)


@given(st.floats(0.01, 3))
def test_idle_steps_lead_to_one_that_admits(each):
    quota = Quota(each)
    quota.advance()
    skip = quota.idle_steps()
    assert quota.next(skip) >= 1
    assert all(quota.next(earlier) == 0 for earlier in range(skip))


@given(st.lists(st.sampled_from([0.03, 0.3, 0.31, 1.0, 2.5]), min_size=2, max_size=40))
def test_changing_often_lets_nobody_else_in(rates):
    """A review after every step: what has entered is still within one of the sum of what was allowed."""
    quota = Quota(rates[0])
    admitted = 0.0
    for each in rates:
        quota.change(each)
        admitted += quota.next()
        quota.advance()
    assert sum(rates) - 1e-6 <= admitted <= sum(rates) + 1


def test_kv_of_the_mini_example():
    """6.2: l = 1, l' = 3, x = 0.5, saturated: KV per step alternates 4, 6."""
    quota, ages, held = Quota(0.5), [], []
    for _ in range(40):
        ages = [age + 1 for age in ages if age < 3] + [0] * int(quota.next())
        quota.advance()
        held.append(sum(1 + age for age in ages))
    assert held[8:] == [held[8], held[9]] * 16 and set(held[8:]) == {4, 6}
    assert max(held) <= 9  # x w + l + l'
