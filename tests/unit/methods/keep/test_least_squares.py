"""Coefficients found from what is seen: exactly, under noise, after a change, with unseen features."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.methods.keep.learned import RelativeLeastSquares

TRUE = np.array([2.0, 0.5, 0.01])
PRIOR = (1.0, 1.0, 0.02)


def rows(count, rng, tokens=True):
    for _ in range(count):
        yield np.array([1.0, float(rng.random() < 0.5), rng.uniform(10, 500) if tokens else 0.0])


def test_it_finds_a_law_without_noise():
    rng, fit = np.random.default_rng(1), RelativeLeastSquares(PRIOR)
    for row in rows(300, rng):
        fit.update(row, float(row @ TRUE))
    assert fit.values == pytest.approx(TRUE, rel=0.01)
    assert fit.seen == 300


def test_it_finds_a_law_under_noise_and_outliers():
    rng, fit = np.random.default_rng(2), RelativeLeastSquares(PRIOR)
    for row in rows(3000, rng):
        stall = 20.0 if rng.random() < 0.002 else 1.0
        fit.update(row, float(row @ TRUE) * rng.lognormal(0.0, 0.05) * stall)
    assert fit.values @ [1.0, 1.0, 200.0] == pytest.approx(TRUE @ [1.0, 1.0, 200.0], rel=0.05)


def test_it_follows_a_change():
    rng, fit = np.random.default_rng(3), RelativeLeastSquares(PRIOR)
    for factor in (1.0, 1.5):
        for row in rows(4000, rng):
            fit.update(row, factor * float(row @ TRUE))
    assert fit.values == pytest.approx(1.5 * TRUE, rel=0.1)


def test_what_is_not_seen_stays_as_it_was():
    rng, fit = np.random.default_rng(4), RelativeLeastSquares(PRIOR)
    for row in rows(20_000, rng, tokens=False):
        fit.update(row, float(row @ TRUE))
    assert fit.values[2] == PRIOR[2]
    assert np.isfinite(fit.values).all()
    for row in rows(100, rng):
        fit.update(row, float(row @ TRUE))
    assert fit.values == pytest.approx(TRUE, rel=0.05)


def test_many_small_noisy_observations_do_not_spoil_the_large_ones():
    """As on an asynchronous engine, whose small steps seem to take half or twice their time."""
    errors = {}
    for least in (0.0, 4.0):
        rng, fit = np.random.default_rng(5), RelativeLeastSquares(PRIOR, least)
        for number in range(200):
            row = np.array([1.0, 1.0, rng.uniform(1, 20) if number % 8 else rng.uniform(400, 800)])
            noise = rng.choice([0.4, 1.0, 2.0]) if number % 8 else 1.0
            fit.update(row, float(row @ TRUE) * noise)
        large = np.array([1.0, 1.0, 800.0])
        errors[least] = abs(float(fit.values @ large) / float(TRUE @ large) - 1)
    assert errors[4.0] < 0.02 < errors[0.0]
