"""Nested WAIT: segments, thresholds, the residue between them, memory bounds."""

from __future__ import annotations

from itertools import pairwise
from math import exp, expm1, inf, log, log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.methods.wait.inventory import lines_of, offered, with_slack
from headgate_papers.kv_linear import kv_linear
from headgate_papers.wait.balance import along_the_ray, filled, kv_work
from headgate_papers.wait.rules import least_nested
from headgate_papers.wait.runs import kind, segments_of
from headgate_papers.wait.segments import (
    Segments,
    best_choice,
    chance_of_overflow,
    choices,
    decay,
    decays,
    equal_shares,
    even_ends,
    memory_bound,
    nested_pace,
    segments_from,
)

KV, T, D0 = 100_000, 200.0, 0.008
LINES = lines_of(kv_linear(D0, 3e-7), [kind(1, 1, 1)], KV)
SMALL = segments_of(10, [(300, 2), (200, 4), (100, 8)])
FOUR = segments_of(10, [(0.8 * rate, rate) for rate in (20, 40, 80, 160)])
BINS = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)
LMSYS = segments_of(60, [(55 * rate / 66, 50 * place) for place, rate in enumerate(BINS, 1)])


def study(count: int) -> Segments:
    types = [(50 / 66 / 50 * BINS[(length - 1) // 50], length) for length in range(1, 501)]
    return segments_of(62, types, even_ends(500, count))


# before, after, stay: theta, and the lower bound 8 (r - p)
THETA = [
    (10, 6, 0.5, 0.82216323, 0.8),
    (100, 60, 0.5, 0.82216323, 0.8),
    (20, 11, 0.5, 0.40269181, 0.4),
    (4, 3, 0.5, 2.43751145, 2.0),
    (2, 1, 0.4, 0.81093022, 0.8),
    (6, 4, 0.5, 1.44363548, 1.3333),
    (4, 2, 1 / 3, 1.38629436, 1.3333),
    (66, 45, 43 / 66, 0.27516185, 0.242424),
    (150, 145, 14 / 15, 1.66848341, 0.266667),
    (1000, 910, 0.9, 0.23664597, 0.08),
]


@pytest.mark.parametrize(("before", "after", "stay", "theta", "least"), THETA)
def test_decay(before, after, stay, theta, least):
    found = decay(after / before, stay)
    assert found == pytest.approx(theta, abs=1e-8)
    assert 8 * (after / before - stay) == pytest.approx(least, abs=1e-4) and found >= least * (1 - 1e-6)


def test_the_printed_bound_of_decay_is_none():
    """Divided by n_k, as printed, it exceeds theta."""
    printed = {(10, 6, 0.5): 1.3333, (20, 11, 0.5): 0.7273, (4, 3, 0.5): 2.6667, (2, 1, 0.4): 1.6}
    printed[66, 45, 43 / 66] = 0.355556
    for (before, after, stay), said in printed.items():
        assert 8 * (after - before * stay) / after == pytest.approx(said, abs=1e-4)
        assert said > decay(after / before, stay)
    # Small gaps: theta is nearly 2(r - p) / (p(1 - p)).
    assert decay(0.401, 0.4) == pytest.approx(2 * 0.001 / 0.24, rel=0.01)


@given(st.floats(0.01, 0.99), st.floats(0.001, 0.999))
def test_decay_solves_its_equation(stay, share):
    ratio = stay + share * (1 - stay)
    theta = decay(ratio, stay)
    if theta < 30:
        assert -theta * ratio + log1p(stay * expm1(theta)) == pytest.approx(0, abs=1e-9)
    assert theta >= 8 * (ratio - stay) * (1 - 1e-6)


def tail(before, size, stay, at_least):
    """A bound on the probability that so many are left over: exp(-θ(c - n))."""
    theta = decay(size / before, stay)
    if theta == inf:
        return 0.0 if at_least > size - 1 else 1.0
    return min(1.0, exp(-theta * (at_least - size)))


def test_decay_at_its_ends():
    assert decay(0.5, 0.3) == pytest.approx(2 * log(0.7 / 0.3))
    assert (decay(0.4, 0.4), decay(0.3, 0.4)) == (0.0, 0.0)
    assert (decay(1.0, 0.9), decay(0.5, 0.0)) == (inf, inf)
    assert tail(5, 5, 0.9, 5) == 0.0 and tail(5, 5, 0.9, 4) == 1.0


def test_residue_stays_within_its_bounds():
    """6.3: 10, 6, 0.5 has mean 3.03 (bound 7.25), P(Z>=8) 0.0182 (0.193), P(Z>=11) 0.0015 (0.0164)."""
    draws = np.random.default_rng(0).binomial(10, 0.5, 200_000)
    seen, residue = np.empty(len(draws), dtype=np.int64), 0
    for step, more in enumerate(draws.tolist()):
        residue += more
        residue -= 6 if residue >= 6 else 0
        seen[step] = residue
    mean = 6 + 10 * 0.5 * 0.5 / (2 * (6 - 10 * 0.5))  # n_k + n_{k-1} p(1-p) / (2(n_k - n_{k-1} p)), a bound
    assert seen.mean() == pytest.approx(3.03, abs=0.1) and seen.mean() <= mean == 7.25
    for at_least, simulated, bound in ((8, 0.0182, 0.193), (11, 1.5e-3, 0.0164)):
        assert tail(10, 6, 0.5, at_least) == pytest.approx(bound, rel=5e-3)
        assert np.mean(seen >= at_least) == pytest.approx(simulated, rel=0.4)
        assert np.mean(seen >= at_least) <= tail(10, 6, 0.5, at_least)


def test_segments_from_types_and_samples():
    assert (SMALL.ends, SMALL.reach) == ((2, 4, 8), (600, 300, 100))
    assert SMALL.stays == pytest.approx((0.5, 1 / 3))
    lengths = [2] * 3 + [4] * 2 + [8]
    sampled = segments_from(10, lengths, 600, (2, 4, 8))
    assert sampled.reach == pytest.approx(SMALL.reach)
    assert [part.work for part in SMALL.parts()] == [
        sum(10 + k for k in ks) for ks in ((0, 1, 2), (3, 4), range(5, 9))
    ]
    assert even_ends(500, 10) == tuple(range(50, 501, 50))
    assert equal_shares([1, 2, 3, 4, 5, 6, 7, 8], 4) == (2, 4, 6, 8)
    assert equal_shares([5] * 9, 3) == (5,)
    for bad in ((), (3, 3), (-1, 2)):
        with pytest.raises(InputError, match="growing"):
            segments_of(1, [(1, 1)], bad)
    with pytest.raises(InputError, match="choose 1 to 4"):
        even_ends(4, 9)


def test_full_batch_equals_that_of_wait():
    """Identity of 4.3: n_i = tΛ_i gives M^π = t Σ λ_j w_j."""
    for segments, prompt, types in (
        (FOUR, 10, [(0.8 * rate, rate) for rate in (20, 40, 80, 160)]),
        (LMSYS, 60, [(55 * rate / 66, 50 * place) for place, rate in enumerate(BINS, 1)]),
    ):
        work = sum(rate * kv_work(prompt, length) for rate, length in types)
        assert offered(segments.parts()) == pytest.approx(work)


def test_whole_thresholds():
    found = least_nested(LINES, SMALL, KV)
    assert (found.sizes, found.kv) == ((5, 3, 2), 378) and found.seconds == pytest.approx(8.1134e-3)
    for slack in (0.05, 0.2):
        assert least_nested(LINES, SMALL, KV, slack)[:2] == ((6, 4, 2), 438)
    assert least_nested(LINES, FOUR, KV)[:2] == ((8, 8, 7, 5), 81_780)
    with pytest.raises(InputError, match=r"\(10\), DT\(n\) < n_1/Lambda"):
        least_nested(LINES, FOUR, 50_000)


def test_printed_ratios_violate_condition_10():
    assert filled(LINES, FOUR.parts(), (15, 14, 12, 8)).kv == 135_000
    printed = (66, 43, 32, 24, 17, 11, 7, 4, 2, 1)
    assert [66 / 55 * reach for reach in LMSYS.reach] == pytest.approx(printed)
    assert filled(LINES, LMSYS.parts(), printed).kv == 1_881_385
    assert memory_bound(LINES, LMSYS, printed, 0.1, 1).total == inf


def test_slack_makes_condition_10_hold():
    for slack in (0.02, 0.05):
        pace = nested_pace(LINES, LMSYS, slack, KV)
        found = along_the_ray(LINES, LMSYS.parts(slack), 1.05 * pace.shortest)
        for (before, after), stay in zip(pairwise(found.sizes), LMSYS.stays, strict=True):
            assert after / before == pytest.approx((1 + slack) * stay)
    sizes = [along_the_ray(LINES, LMSYS.parts(slack), 1.0).sizes for slack in (0.1, 0.05)]
    steep, rising = ([round(rate, 4) for rate in decays(LMSYS, each)] for each in sizes)
    assert steep == [0.6183, 0.9232, 0.9529, 0.7749, 0.6087, 0.5868, 0.4818, 0.4027, 0.4027]
    rising = [round(rate, 4) for rate in decays(LMSYS, along_the_ray(LINES, LMSYS.parts(0.05), 1.0).sizes)]
    assert rising == [0.2966, 0.4202, 0.4315, 0.3618, 0.2924, 0.283, 0.2365, 0.2003, 0.2003]
    with pytest.raises(
        InputError, match=r"M\* <= C = 30,000.* 4 segments with 0.05 slack each, as \(10\) wants"
    ):
        nested_pace(LINES, FOUR, 0.05, 30_000)


def test_memory_bounds():
    bound = memory_bound(LINES, SMALL, (5, 3, 2), 0.01, T / D0)
    assert (bound.full, bound.waiting, bound.tail) == (378, 64, pytest.approx(296.758, abs=1e-3))
    four = memory_bound(LINES, FOUR, (8, 8, 7, 5), 0.1, T / D0)
    assert decays(FOUR, (8, 8, 7, 5)) == [
        inf,
        pytest.approx(0.31448, abs=1e-5),
        pytest.approx(0.45363, abs=1e-5),
    ]
    assert (four.full, four.waiting, four.total) == (81_780, 1040, pytest.approx(87_654.8, abs=0.1))


@pytest.mark.parametrize(
    ("slack", "miss", "full", "waiting", "tail", "total"),
    [
        (0.05, 0.1, 33_998, 527, 158_914, 193_439),
        (0.05, 1e-5, 33_998, 527, 258_983, 293_508),
        (0.1, 0.1, 50_337, 801, 77_369, 128_507),
    ],
)
def test_memory_bounds_of_chat(slack, miss, full, waiting, tail, total):
    (choice,) = choices(LINES, [LMSYS], slack, miss, T)
    assert choice.bound[:2] == pytest.approx((full, waiting), abs=0.5)
    assert (choice.bound.tail, choice.bound.total) == pytest.approx((tail, total), abs=0.5)
    assert chance_of_overflow(choice.bound, miss, choice.bound.total) == pytest.approx(miss)
    assert chance_of_overflow(choice.bound, miss, 1e6) < 1e-9
    assert chance_of_overflow(choice.bound, miss, 30_000) == 1.0


def test_best_number_of_segments():
    """6.4: 95,569 / 96,212 / 118,744 / 211,722 for L = 4, 5, 10, 20; 2 and 50 cannot keep up."""
    found = choices(LINES, [study(count) for count in (2, 4, 5, 10, 20, 50)], 0.1, 0.1, T)
    totals = [choice.bound and round(choice.bound.total) for choice in found]
    assert totals == [None, 95_569, 96_212, 118_744, 211_722, None]
    fine = [choice.bound for choice in found if choice.bound]
    assert [round(bound.full) for bound in fine] == [52_592, 43_288, 40_283, 111_764]
    assert [round(bound.tail) for bound in fine] == [42_763, 52_668, 77_820, 95_878]
    assert [round(bound.waiting) for bound in fine][:: len(fine) - 1] == [214, 4079]
    assert best_choice(found).segments.ends == even_ends(500, 4)
    with pytest.raises(InputError, match=r"unstable: .*seconds of work"):
        best_choice(found[:1])


def test_one_segment_needs_no_queue():
    one = segments_of(10, [(100, 5), (50, 9)], (9,))
    bound = memory_bound(LINES, one, (2,), 0.01, 1000)
    assert bound.total == bound.full == 2 * kv_work(10, 9)
    assert chance_of_overflow(bound, 0.01, bound.total) == 0.0
    assert chance_of_overflow(bound, 0.01, bound.total - 1) == 1.0


def test_slack_by_part():
    assert [part.rate for part in with_slack(SMALL.parts(), (0, 0.1, 0.21))] == pytest.approx(
        [part.rate for part in SMALL.parts(0.1)]
    )
    assert exp(-SMALL.paused(0)) == 1 and SMALL.paused(2) == 14
