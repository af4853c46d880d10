"""Hazard, survival and trend: known answers, censoring, guards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from headgate.core.errors import InputError
from headgate.estimators.hazard import OutputHazard, Survival, life_table, sample_survival
from headgate_papers.eb.theory import (
    LinearHazard,
    fit_curve,
    fit_hazard,
    fit_lives,
    guarded,
    hazard_trend,
    mann_kendall,
    paper_share,
)

W = [1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10, 11, 12, 12, 13, 15, 20]
W2 = [3, 3, 4, 5, 8, 13, 21, 34, 55, 89]
lengths = st.lists(st.integers(1, 80), min_size=1, max_size=50)


def learned(ended: list[int], window: int = 1000) -> OutputHazard:
    hazard = OutputHazard(window)
    for tokens in ended:
        hazard.update(tokens)
    return hazard


def test_small_samples() -> None:
    fit = fit_hazard(W)
    assert fit == (pytest.approx(0.022813415, abs=6e-10), pytest.approx(0.017580723, abs=6e-10), 15)
    falling = fit_hazard(W2)
    assert falling == (pytest.approx(0.051606061, abs=6e-10), pytest.approx(-0.000325543, abs=6e-10), 89)


def test_sums_of_the_closed_form() -> None:
    """A0 .. d1, by the histogram the closed form avoids."""
    last = np.array(W)
    ages = np.arange(1, 16)
    at_risk = (last[:, None] >= ages).sum(axis=0)
    ended = (last[:, None] == ages).sum(axis=0)
    sums = [int((at_risk * ages**power).sum()) for power in range(3)]
    assert (*sums, int(ended.sum()), int((ended * ages).sum())) == (157, 877, 6939, 19, 142)


@given(lengths)
def test_closed_form_equals_the_fit_of_the_curve(ended: list[int]) -> None:
    last = np.array(ended)
    fit = fit_lives(last, np.ones(len(last), dtype=np.bool_))
    if fit is None:
        assert set(sorted(ended)[: int(np.ceil(0.95 * len(ended)))]) == {1}
        with pytest.raises(InputError, match="t95 >= 2"):
            fit_hazard(ended)
    else:
        again = fit_curve(sample_survival(ended))
        assert again == (pytest.approx(fit.base, abs=1e-9), pytest.approx(fit.slope, abs=1e-9), fit.through)


@given(lengths, st.lists(st.integers(0, 80), max_size=30))
def test_the_fit_conserves_endings(ended: list[int], running: list[int]) -> None:
    """With weights at risk, the fitted line expects as many endings as there were, up to t95."""
    fit = fit_lives(np.array(ended + running), np.arange(len(ended + running)) < len(ended))
    if fit is not None:
        ages = np.arange(1, fit.through + 1)
        at_risk = (np.array(ended + running)[:, None] >= ages).sum(axis=0)
        expected = float(((fit.base + fit.slope * ages) * at_risk).sum())
        assert expected == pytest.approx(sum(tokens <= fit.through for tokens in ended), abs=1e-6)


def test_kaplan_meier_and_exposure() -> None:
    hazard = learned([3, 5, 5, 8])
    survival = hazard.survival([2, 6, 9])
    assert survival is not None
    assert [float(survival.curve[age]) for age in (2, 3, 5, 8, 9)] == pytest.approx(
        [1, 5 / 6, 1 / 2, 1 / 4, 1 / 4]
    )
    assert survival.ending == pytest.approx(4 / 38)
    assert hazard.mean([2, 6, 9]) == pytest.approx(9.5)


def test_cut_short_counts_as_lived_so_far() -> None:
    hazard = learned([3, 5, 5, 8])
    for tokens in (2, 6, 9):
        hazard.update(tokens, finished=False)
    assert hazard.mean() == pytest.approx(38 / 4)
    other = learned([3, 5, 5, 8]).survival([2, 6, 9])
    assert other is not None
    survival = hazard.survival()
    assert survival is not None
    assert np.array_equal(survival.curve, other.curve)


@given(lengths)
def test_without_censoring_kaplan_meier_is_the_share_above(ended: list[int]) -> None:
    survival = learned(ended).survival()
    assert survival is not None
    assert survival.curve == pytest.approx(sample_survival(ended).curve, abs=1e-12)
    assert survival.mean == pytest.approx(np.mean(ended))
    assert learned(ended).mean() == pytest.approx(np.mean(ended))


def test_nothing_known_yet() -> None:
    hazard = OutputHazard(5)
    hazard.update(7, finished=False)
    assert len(hazard) == 1
    assert hazard.survival([3]) is None
    assert hazard.mean([3, 4]) is None
    hazard.update(1)
    assert hazard.mean([2]) == 10


def test_the_window_forgets() -> None:
    hazard = learned([100] * 5 + [3, 5, 8], window=3)
    assert hazard.mean() == pytest.approx(16 / 3)
    assert hazard.mean([50, 60]) == pytest.approx(16 / 3)  # no clock: ages before the window say nothing


def test_late_entry_with_one_at_risk_does_not_end_the_curve() -> None:
    survival = life_table([2, 9], np.array([True, False]), np.array([0, 4]))
    assert survival.curve[2] == 0.5
    assert survival.curve[-1] == 0.5


def slots_of(
    law, slots: int, count: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Slots that are refilled at once: when each request left, how long it was, ages at the end."""
    drawn = law(np.random.default_rng(seed), (slots, 8 + 4 * count // slots))
    left = drawn.cumsum(axis=1)
    order = np.argsort(left, axis=None, kind="stable")[:count]
    ends, sizes = left.ravel()[order], drawn.ravel()[order]
    now = int(ends[-1])
    assert left[:, -1].min() > now
    begun = np.where(left <= now, left, 0).max(axis=1)
    return ends, sizes, now - begun


def geometric(generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int64]:
    return generator.geometric(1 / 256, shape)


def gamma2(generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.ceil(generator.gamma(2, 128, shape)).astype(np.int64)


COLD = {256: (16, 48, 153, 196, 244), 1024: (4, 13, 59, 99, 208), 2048: (2.5, 6.9, 32, 59, 167)}


@pytest.mark.parametrize("slots", COLD)
def test_cold_start(slots: int) -> None:
    """6.8: the mean of the first completions is far too short, the exposure estimate is not."""
    counts = (30, 100, 500, 1000, 5000)
    runs = 6
    plain, exposed = np.zeros(5), np.zeros(5)
    for seed in range(runs):
        ends, sizes, _ = slots_of(geometric, slots, 5000, seed)
        for i, count in enumerate(counts):
            plain[i] += sizes[:count].mean() / runs
            exposed[i] += slots * ends[count - 1] / count / runs
    assert plain == pytest.approx(np.array(COLD[slots]), rel=0.2)
    assert exposed == pytest.approx(np.full(5, 256.0), rel=0.15)
    assert exposed[2:] == pytest.approx(np.full(3, 256.0), rel=0.05)


@pytest.mark.parametrize(
    ("law", "count", "window"),
    [  # after a start rate and mean output agree only if age does not matter
        (geometric, 500, 500),
        (geometric, 20_000, 500),
        (geometric, 20_000, 2000),
        (gamma2, 20_000, 500),
        (gamma2, 20_000, 2000),
    ],
)
def test_running_requests_mend_the_estimate(law, count: int, window: int) -> None:
    """After a start, and in a steady state, where only iterations inside the window may count."""
    ends, sizes, ages = slots_of(law, 1024, count, 3)
    hazard = OutputHazard(window)
    for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
        hazard.update(size, at=end)
    running = ages.tolist()
    mean = hazard.mean(running, at=int(ends[-1]))
    assert mean == pytest.approx(256, rel=0.12)
    survival = hazard.survival(running)
    assert survival is not None
    assert survival.mean == pytest.approx(256, rel=0.15)


NOISE = [  # law, window, 5 and 95 % of the share, relative deviation of the base
    ("geometric", 30, (0.163, 0.463), 0.30),
    ("geometric", 100, (0.168, 0.235), 0.16),
    ("geometric", 500, (0.171, 0.189), 0.07),
    ("gamma2", 500, (0.34, 0.79), None),
    ("gamma2", 2000, (0.39, 0.60), None),
]


@pytest.mark.parametrize(("law", "window", "span", "spread"), NOISE)
def test_window_noise(law: str, window: int, span: tuple[float, float], spread: float | None) -> None:
    """6.8: equations (3) + (5) fitted on windows, slopes of zero or more, g = 5, rho = 1, not clipped."""
    drawn = {"geometric": geometric, "gamma2": gamma2}[law](np.random.default_rng(1), (1000, window))
    fits = [fit_hazard(row) for row in drawn]
    usable = [fit._replace(slope=max(fit.slope, 0.0)) for fit in fits if fit.base > 0]
    shares = [paper_share(5.0, fit, 1.0, cap=np.inf) for fit in usable]
    assert len(usable) >= 999
    assert np.quantile(shares, [0.05, 0.95]) == pytest.approx(np.array(span), rel=0.1)
    if spread is not None:
        assert np.std([fit.base for fit in fits]) * 256 == pytest.approx(spread, rel=0.1)
        assert 0.33 < np.mean([fit.slope < 0 for fit in fits]) < 0.5


def test_small_windows_of_rising_hazards_are_useless() -> None:
    """6.8: Gamma(2), 30 completions: 7 % have no positive base, 41 % a share above 0.8."""
    fits = [fit_hazard(row) for row in gamma2(np.random.default_rng(2), (1000, 30))]
    assert np.mean([fit.base <= 0 for fit in fits]) == pytest.approx(0.07, abs=0.025)
    above = [fit.base <= 0 or paper_share(5.0, fit, 1.0, cap=np.inf) > 0.8 for fit in fits]
    assert np.mean(above) == pytest.approx(0.42, abs=0.04)


def test_guards() -> None:
    assert guarded(LinearHazard(-0.003, 5e-5, 372), 256) == (1 / 256, 5e-5, 372)
    assert guarded(LinearHazard(0.006, -1e-6, 9), 256) == (0.006, 0.0, 9)


def test_mann_kendall() -> None:
    rising = mann_kendall([1, 3, 2, 4, 5, 5, 6, 8, 7, 9])
    assert rising == (40, 124, pytest.approx(3.502303, abs=6e-7), pytest.approx(4.612541e-4, rel=1e-6))
    falling = mann_kendall([5, 4, 3, 2, 1])
    assert falling[0] == -10
    assert falling[1:] == pytest.approx((16.666667, -2.204541, 0.027486), abs=6e-7)
    assert mann_kendall([2, 2, 2, 2]) == (0, 0.0, 0.0, 1.0)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=40))
def test_mann_kendall_backwards_is_its_negative(series: list[int]) -> None:
    forth, back = mann_kendall(series), mann_kendall(series[::-1])
    assert (back.score, back.variance, back.deviations) == (-forth.score, forth.variance, -forth.deviations)


@pytest.mark.parametrize(
    ("call", "inequality"),
    [
        (lambda: OutputHazard(0), ">= 1"),
        (lambda: fit_hazard([1, 1, 1]), "t95 >= 2"),
        (lambda: fit_curve(Survival(np.array([1.0, 0.0]))), "t95 >= 2"),
    ],
)
def test_bad_input_names_the_inequality(call, inequality: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert inequality in str(caught.value)
    assert "\n" not in str(caught.value)


# -- trend of the hazard ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=3, max_size=60))
def test_mann_kendall_counts_pairs(series: list[int]) -> None:
    pairs = [(one, other) for place, one in enumerate(series) for other in series[place + 1 :]]
    assert mann_kendall(series).score == sum(np.sign(other - one) for one, other in pairs)


def test_the_slope_of_the_hazard_is_tested_as_in_a_textbook() -> None:
    """The same p from weighted least squares written out with matrices."""
    ended = gamma2(np.random.default_rng(3), (1, 2000))[0]
    found = hazard_trend(sample_survival(ended))
    assert found is not None
    ages = np.arange(1, found.line.through + 1)
    at_risk = (ended[:, None] >= ages).sum(axis=0).astype(float)
    hazard = (ended[:, None] == ages).sum(axis=0) / at_risk
    design = np.column_stack([np.ones(len(ages)), ages])
    scaled = design * np.sqrt(at_risk)[:, None]
    line, left, *_ = np.linalg.lstsq(scaled, hazard * np.sqrt(at_risk), rcond=None)
    assert found.line[:2] == pytest.approx(tuple(line), rel=1e-6)
    error = np.sqrt(left[0] / (len(ages) - 2) * np.linalg.inv(scaled.T @ scaled)[1, 1])
    assert found.slope_chance == pytest.approx(2 * stats.t.sf(line[1] / error, len(ages) - 2), rel=1e-6)
    assert found.ranks.score > 0


@pytest.mark.parametrize(
    ("draw", "verdict"),
    [
        (lambda random: gamma2(random, (1, 20_000))[0], "rising"),
        (lambda random: np.ceil(random.uniform(0, 512, 20_000)), "rising"),
        (lambda random: np.ceil(random.lognormal(4, 1.5, 20_000)), "falling"),
    ],
)
def test_known_laws_have_their_trend(draw, verdict: str) -> None:
    found = hazard_trend(sample_survival(draw(np.random.default_rng(5))))
    assert found is not None and found.verdict == verdict


@pytest.mark.parametrize(("count", "mean"), [(100, 256), (500, 256), (3000, 256), (10_000, 4)])
def test_a_law_without_memory_seldom_looks_like_a_trend(count: int, mean: int) -> None:
    """Of 200 geometric samples about 5 % are significant by each test, few or many requests."""
    samples = [np.random.default_rng(seed).geometric(1 / mean, count) for seed in range(200)]
    found = [trend for sample in samples if (trend := hazard_trend(sample_survival(sample)))]
    assert len(found) == 200
    assert 0.015 <= np.mean([trend.ranks.chance < 0.05 for trend in found]) <= 0.1
    assert 0.015 <= np.mean([trend.slope_chance < 0.05 for trend in found]) <= 0.1
    assert np.mean([trend.verdict != "no trend" for trend in found]) <= 0.06


def test_outputs_too_short_for_a_trend() -> None:
    assert hazard_trend(sample_survival([1, 1, 1])) is None
    assert hazard_trend(sample_survival([1, 2, 2])) is None
