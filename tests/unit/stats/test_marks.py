"""Marks follow the paired test: nothing is called level that was not tested, or is far away."""

from __future__ import annotations

import numpy as np

from headgate.stats.comparison import METRICS, CardErrors, _row
from headgate.stats.figures import Spread

TTFT = next(metric for metric in METRICS if metric.name == "p99 TTFT")


def row(**values: list[float]):
    every = {name: {TTFT.name: Spread.of_values(np.array(own))} for name, own in values.items()}
    return _row(TTFT, every, next(iter(values)), len(next(iter(values.values()))), CardErrors(), {})


def test_far_away_is_never_level_however_wide_the_interval():
    """89.8 with an interval that reaches below zero is not told from 4.9, and is not marked as equal."""
    found = row(one=[5.0, 4.8, 4.9], other=[250.0, 10.0, 9.4])
    assert found.best == "one" and found.level == () and found.apart == ()


def test_near_and_tested_is_level():
    found = row(one=[5.0, 4.8, 4.9], other=[5.2, 4.7, 5.0])
    assert found.level == ("other",)


def test_without_a_test_nothing_is_level():
    found = row(one=[5.0], other=[5.1])
    assert found.level == () and found.apart == ()


def test_told_apart_is_apart():
    found = row(one=[5.0, 4.8, 4.9], other=[9.0, 8.8, 8.9])
    assert found.apart == ("other",) and found.winner == "one"
