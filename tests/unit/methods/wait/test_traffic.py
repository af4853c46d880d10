"""Rates, prompts and survival curves as parts: the same numbers as from the lengths themselves."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.estimators.hazard import Survival, sample_survival
from headgate.methods.wait.inventory import keeping_up, lines_of, offered
from headgate.methods.wait.traffic import SeenType, cuts, running_pace
from headgate_papers.kv_linear import kv_linear
from headgate_papers.wait.balance import kv_work
from headgate_papers.wait.runs import kind, segments_of

CARD, KV = kv_linear(0.008, 3e-7), 100_000
LENGTHS = np.array([20, 40, 40, 80, 80, 80, 80, 160])


def test_a_type_from_its_survival_curve():
    part = SeenType(3.0, 60, sample_survival(LENGTHS)).part()
    assert part.decodes == pytest.approx(LENGTHS.mean())
    assert part.work == pytest.approx(np.mean([kv_work(60, int(length)) for length in LENGTHS]))
    half = SeenType(3.0, 60, sample_survival(LENGTHS), decoding=0.5).part()
    assert half.decodes == pytest.approx(LENGTHS.mean() / 2)
    assert half.work == pytest.approx(60 + (part.work - 60) / 2)


def test_a_geometric_tail_goes_on_beyond_the_curve():
    draws = np.random.default_rng(1).geometric(0.02, 200_000)
    part = SeenType(1.0, 30, Survival(np.ones(1), 0.02)).part()
    assert part.decodes == pytest.approx(50)
    assert part.work == pytest.approx(np.mean((draws + 1) * (30 + draws / 2)), rel=0.02)
    assert SeenType(1.0, 30, Survival(np.ones(1), 0.02)).end(0.5) == pytest.approx(np.median(draws), abs=1)


def test_segments_count_whoever_is_alive():
    seen = SeenType(8.0, 10, sample_survival(LENGTHS))
    parts = seen.segments((20, 40, 80, 160))
    exact = segments_of(10, [(1, 20), (2, 40), (4, 80), (1, 160)])
    assert [part.rate for part in parts] == pytest.approx(exact.reach)
    assert [part.work for part in parts] == pytest.approx([part.work for part in exact.parts()])
    # One segment for all: the whole type, not a cohort that never shrinks.
    (one,) = seen.segments((160,))
    whole = seen.part()
    assert (one.rate, one.work, one.decodes) == pytest.approx((whole.rate, whole.work, whole.decodes))
    assert cuts(seen, 4) == (40, 80, 160)


def test_the_pace_to_run_at():
    parts = [kind(30, 20, 100), kind(20, 20, 200), kind(10, 20, 300)]
    shortest = keeping_up(lines_of(CARD, parts, KV), parts).shortest
    pace = running_pace(CARD, parts, KV, 4096)
    assert shortest < pace < 1.5 * shortest
    heavy = [part._replace(rate=part.rate * 10) for part in parts]
    full = running_pace(CARD, heavy, KV, 10**6)
    assert full == pytest.approx((KV - sum(part.peak for part in parts)) / offered(heavy))
    slots = running_pace(CARD, heavy, KV, 64)
    assert slots == pytest.approx(64 / sum(part.rate * part.stages for part in heavy))
    assert running_pace(CARD, parts, 500, 4096) is None
    free = running_pace(CARD, parts, KV, 4096, pausing=False)
    assert free == pytest.approx((KV - sum(part.peak for part in parts)) / offered(parts))
