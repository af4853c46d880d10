"""How slow the host is, learned from decode steps that waited for a launch."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.methods.keep.step import CLEARLY, FIRST, MOST, PACE, SHARE, SlowHost


def test_a_host_as_the_card_says_is_found_steady():
    slow = SlowHost()
    slow.overlaps = True
    slow.saw(0.034, 0.034, 0.020)
    assert slow.factor == pytest.approx(FIRST, rel=0.01) and not slow.steady
    for _ in range(400):
        slow.saw(0.034, 0.034, 0.020)
    assert slow.factor == 1.0 and slow.steady


def test_an_engine_that_composes_no_step_ahead_waits_for_no_launch():
    slow = SlowHost()
    assert slow.steady
    slow.overlaps = True
    assert not slow.steady


def test_it_rests_where_few_launches_are_slower():
    slow, rng = SlowHost(), np.random.default_rng(1)
    ratios = rng.lognormal(0.15, 0.15, 20_000)
    found = []
    for ratio in ratios:
        slow.saw(0.034 * ratio, 0.034, 0.020)
        found.append(slow.factor)
    rest = np.mean(found[2_000:])
    assert np.mean(ratios > 1.02 * rest) == pytest.approx(SHARE, rel=0.4)


def test_steps_that_a_slow_launch_would_hide_behind_say_nothing():
    slow = SlowHost()
    for _ in range(400):
        slow.saw(0.050, 0.034, 0.050)
    assert slow.factor == FIRST
    assert slow.hides(0.034, 0.050)


def test_it_falls_until_a_slow_launch_hides_behind_decodes():
    """The launch took at most 40 ms, whichever of the two the step waited for; 51 were planned."""
    slow = SlowHost()
    assert not slow.hides(0.034, 0.040)
    for _ in range(400):
        slow.saw(0.040, 0.034, 0.040)
    assert slow.hides(0.034, 0.040)
    assert slow.factor == pytest.approx(CLEARLY * 0.040 / 0.034, abs=PACE * SHARE)


def test_it_is_bounded():
    slow = SlowHost()
    for _ in range(100):
        slow.saw(9.0, 0.034, 0.020)
    assert slow.factor == MOST
