from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.stats import gaps as gaps_module
from headgate.stats.figures import quantiles
from headgate.stats.gaps import Gaps, range_maximum
from small_runs import make_run, naive_run, request

RUNS = st.builds(
    naive_run,
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    replicas=st.integers(1, 3),
    requests=st.integers(1, 8),
    merge=st.booleans(),
)


def written_out(sample) -> np.ndarray:
    return np.sort(np.repeat(sample.values, sample.weights))


def close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(RUNS, st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_the_weighted_sample_is_every_gap_of_the_chosen_requests(made, seed):
    run, tokens = made
    keep = np.random.default_rng(seed).random(len(tokens)) < 0.6
    gaps = Gaps(run)
    for chosen in (None, keep):
        rows = [id for id in tokens if chosen is None or chosen[id]]
        expected = np.sort(np.concatenate([np.empty(0), *(np.diff(tokens[id]) for id in rows)]))
        sample = gaps.sample(chosen)
        assert sample.exact
        close(written_out(sample), expected)


@given(RUNS)
@settings(max_examples=150, deadline=None)
def test_longest_gap_and_lists_are_those_of_the_tokens(made):
    run, tokens = made
    gaps = Gaps(run)
    longest, lists = gaps.longest(), gaps.lists()
    for id, times in tokens.items():
        expected = np.diff(times)
        close(lists[id], expected)
        close(longest[id], expected.max() if len(expected) else math.nan)


def test_the_made_up_runs_have_everything_that_could_go_wrong():
    found = [naive_run(seed, rows=40, requests=6, merge=True)[0] for seed in range(20)]
    stays = {name: np.concatenate([run.stays[name] for run in found]) for name in found[0].stays}
    assert np.any(stays["ticks"] == 0)
    assert np.any(~np.isnan(stays["gap"]))  # came back after an eviction
    assert np.any(np.isnan(stays["gap"]) & (stays["first_tick"] > 0))
    inside = 0  # stays that begin within a row
    for run in found:
        ticks = Gaps(run).ticks
        inside += int(np.sum(ticks.place(run.stays["first_tick"][run.stays["ticks"] > 0])[1] > 0))
    assert inside > 0
    assert np.any(np.concatenate([run.steps["decodes"] for run in found]) == 0)


@given(RUNS)
@settings(max_examples=60, deadline=None)
def test_gathered_values_keep_the_mean_and_move_quantiles_by_a_thousandth(made):
    run, _ = made
    exact = Gaps(run).sample()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps_module, "EXACT", -1)
        rough = Gaps(run).sample()
    assert not rough.exact
    assert rough.weights.sum() == exact.weights.sum()
    assert rough.values @ rough.weights == pytest.approx(exact.values @ exact.weights, rel=1e-12)
    for share in (0.0, 0.25, 0.5, 0.9, 1.0):
        ours, theirs = (quantiles(one.values, one.weights, [share])[0] for one in (rough, exact))
        assert math.isnan(theirs) or ours == pytest.approx(theirs, rel=1.001e-3)


def test_a_long_row_is_gathered_without_being_written_out():
    count, first, slope = 1_000_000_000, 0.01, 1e-11
    seconds = count * first + slope * count * (count - 1) / 2
    steps = [{"start": 0.0, "count": count, "first": first, "seconds": seconds, "decodes": 1}]
    stays = [{"request": 0, "opened": 0.0, "gap": math.nan, "first_tick": 0, "ticks": count}]
    sample = Gaps(make_run([request(0, 0, 0, 0, seconds, 1, count + 1)], steps, stays)).sample()
    assert not sample.exact and len(sample.values) < 2000
    assert sample.weights.sum() == count
    assert float(sample.values @ sample.weights) == pytest.approx(seconds, rel=1e-9)
    assert quantiles(sample.values, sample.weights, [0.5])[0] == pytest.approx(0.015, rel=1e-3)


def test_by_hand():
    """Tokens of 0: 1 | 2 3 4 (row of three) then 6 after a prefill-only step; 1 joins at 5 and ends at 6."""
    steps = [
        {"start": 0, "count": 1, "first": 1, "seconds": 1, "prefill": 5},
        {"start": 1, "count": 3, "first": 1, "seconds": 3, "decodes": 1},
        {"start": 4, "count": 1, "first": 1, "seconds": 1, "prefill": 5},
        {"start": 5, "count": 1, "first": 1, "seconds": 1, "decodes": 2},
    ]
    stays = [
        {"request": 7, "opened": 1, "gap": math.nan, "first_tick": 0, "ticks": 4},
        {"request": 9, "opened": 5, "gap": math.nan, "first_tick": 3, "ticks": 1},
    ]
    run = make_run([request(7, 0, 0, 1, 6, 5, 5), request(9, 3, 4, 5, 6, 5, 2)], steps, stays)
    gaps = Gaps(run)
    assert written_out(gaps.sample()).tolist() == [1, 1, 1, 1, 2]
    assert gaps.longest().tolist() == [2, 1]
    assert gaps.lists() == [[1, 1, 1, 2], [1]]


def test_a_stay_of_an_unknown_request_is_refused():
    stays = [{"request": 3, "opened": 0.0, "gap": math.nan, "first_tick": 0, "ticks": 0}]
    with pytest.raises(InputError, match="'stays' names a request that table 'requests' lacks"):
        Gaps(make_run([request(0, 0, 0, 0, 1, 1, 1)], [], stays))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=70), st.data())
def test_range_maximum_is_that_of_the_slice(values, data):
    ends = st.integers(0, len(values) - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends).map(sorted), max_size=10))
    low, high = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    expected = [max(values[a : b + 1]) for a, b in pairs]
    assert range_maximum(np.array(values), low, high).tolist() == expected


def needed(times, due) -> float:
    """A plain loop over all tokens: the least T for which token j came by due + j x T."""
    return max((max(0.0, (time - due) / j) for j, time in enumerate(times) if j), default=0.0)


@given(RUNS, st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_the_envelope_is_that_of_every_token(made, seed):
    run, tokens = made
    late = np.random.default_rng(seed).uniform(-0.5, 1.5, len(tokens))  # the first token, beside the last one
    due = np.array([late[id] * (times[-1] if times else 1.0) for id, times in tokens.items()])
    found = Gaps(run).envelope(due, np.ones(len(tokens)))
    for id, times in tokens.items():
        close(found[id], needed(times, due[id]))


def test_steps_that_become_shorter_have_their_worst_token_inside():
    """The ends 3, 5, 6 of three steps: from a due time of 2 the second token is the slowest, (5 - 2) / 2."""
    steps = [{"start": 0, "count": 3, "first": 3, "seconds": 6, "decodes": 1}]
    stays = [{"request": 0, "opened": 0.0, "gap": math.nan, "first_tick": 0, "ticks": 3}]
    run = make_run([request(0, 0, 0, 0, 6, 1, 4)], steps, stays)
    assert Gaps(run).envelope(np.array([2.0]), np.ones(1)).tolist() == [1.5]


def test_a_long_row_has_its_envelope_without_being_written_out():
    count, first, slope = 1_000_000_000, 0.01, 1e-12
    seconds = count * first + slope * count * (count - 1) / 2
    steps = [{"start": 0.0, "count": count, "first": first, "seconds": seconds, "decodes": 1}]
    stays = [{"request": 0, "opened": 0.0, "gap": math.nan, "first_tick": 0, "ticks": count}]
    gaps = Gaps(make_run([request(0, 0, 0, 0, seconds, 1, count + 1)], steps, stays))
    found = gaps.envelope(np.array([1000.0]), np.ones(1))
    assert found[0] == pytest.approx((seconds - 1000) / count, rel=1e-12)
