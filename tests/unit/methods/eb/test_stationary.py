"""The steady-state optimum: known answers."""

from __future__ import annotations

from math import exp, inf, log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headgate.core.errors import InputError
from headgate.estimators.hazard import Survival, sample_survival
from headgate.methods.eb.thresholds import base_share, stationary_share
from headgate_papers.eb.theory import fit_curve, guarded, paper_share

W = [1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10, 11, 12, 12, 13, 15, 20]
W2 = [3, 3, 4, 5, 8, 13, 21, 34, 55, 89]
OVERHEADS = (0.452117, 5.0, 15.0)


def continuous(law: object, last: int = 60_000) -> Survival:
    """A continuous law in whole iterations: the length is rounded up."""
    return Survival(law.sf(np.arange(last)))  # type: ignore[attr-defined]


def phase_share(survival: Survival, phase: int) -> float:
    """The share of slots that end in a phase of that many iterations, in a steady state: 1 / M(T)."""
    return 1 / survival.renewals(phase)


def uniform(mean: int) -> Survival:
    """Whole lengths from half to one and a half times the mean."""
    low, high = mean // 2, mean * 3 // 2
    ages = np.arange(high + 1)
    return Survival(np.clip((high - ages) / (high - low + 1), 0, 1))


LOGNORMAL = stats.lognorm(1, scale=256 * exp(-0.5))
LAWS = {
    "geometric": Survival(np.ones(1), 1 / 256),
    "gamma2": continuous(stats.gamma(2, scale=128)),
    "gamma4": continuous(stats.gamma(4, scale=64)),
    "uniform": uniform(256),
    "lognormal": continuous(LOGNORMAL, 30 * 256),  # the known answers come with this cut
}
BEST = {  # (T*, theta*) for the three overheads
    "geometric": [(15, 0.057018), (49, 0.174512), (83, 0.277367)],
    "gamma2": [(15, 0.056926), (51, 0.181167), (87, 0.290412)],
    "gamma4": [(15, 0.056926), (51, 0.181174), (88, 0.293378)],
    "uniform": [(16, 0.060728), (55, 0.195140), (96, 0.320449)],
    "lognormal": [(15, 0.056950), (51, 0.181315), (86, 0.287687)],
}
LEAST = {  # least cost at g = 5, and what theta_0(1 / mu_O) costs more at g = 15, in per cent
    "geometric": (309.433555, 0.00),
    "gamma2": (309.107805, 0.05),
    "gamma4": (309.095840, 0.06),
    "uniform": (307.470817, 1.12),
    "lognormal": (308.855572, 0.03),
}


@pytest.mark.parametrize("law", BEST)
def test_known_optima(law: str) -> None:
    for overhead, (phase, share) in zip(OVERHEADS, BEST[law], strict=True):
        best = stationary_share(LAWS[law], overhead)
        assert (best.phase, best.share) == (phase, pytest.approx(share, abs=6e-7))
    assert stationary_share(LAWS[law], 5.0).cost == pytest.approx(LEAST[law][0], abs=6e-7)


def test_the_whole_lognormal_differs_in_the_fourth_digit() -> None:
    whole = continuous(LOGNORMAL, 1_000_000)
    best = [stationary_share(whole, overhead) for overhead in OVERHEADS]
    assert [(found.phase, round(found.share, 6)) for found in best] == [
        (15, 0.056927),
        (51, 0.181245),
        (86, 0.287583),
    ]
    assert best[1].cost == pytest.approx(308.974690, abs=6e-7)


@pytest.mark.parametrize("law", BEST)
def test_the_mean_alone_is_nearly_enough(law: str) -> None:
    """6.7, last column: equation (3) with p0 = 1 / mu_O, at the phase length whose share is nearest."""
    survival, overhead = LAWS[law], 15.0
    share = base_share(overhead / 256)
    phases = range(1, 400)
    nearest = min(phases, key=lambda phase: abs(phase_share(survival, phase) - share))
    cost = (nearest + overhead) / phase_share(survival, nearest)
    more = 100 * (cost / stationary_share(survival, overhead).cost - 1)
    assert more == pytest.approx(LEAST[law][1], abs=0.012)


@pytest.mark.parametrize(
    ("lengths", "overhead", "phase", "share", "cost"),
    [
        (W, 0.1, 1, 0.123457, 8.91),
        (W, 1, 4, 0.425532, 11.75),
        (W, 2, 5, 0.5, 14),
        (W, 5, 8, 0.666667, 19.5),
        (W, 20, 13, 0.909091, 36.3),
        (W2, 1, 7, 0.270270, 29.6),
        (W2, 5, 13, 0.434783, 41.4),
        ([10] * 7, 3, 10, 1.0, 13),
    ],
)
def test_small_samples(lengths: list[int], overhead: float, phase: int, share: float, cost: float) -> None:
    best = stationary_share(sample_survival(lengths), overhead)
    assert best.phase == phase
    assert best.share == pytest.approx(share, abs=6e-7)
    assert best.cost == pytest.approx(cost, abs=1e-9)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.floats(0, 50))
def test_nothing_is_ruled_out_wrongly(lengths: list[int], overhead: float) -> None:
    survival = sample_survival(lengths)
    best = stationary_share(survival, overhead)
    costs = {phase: (phase + overhead) / phase_share(survival, phase) for phase in range(1, max(lengths) + 2)}
    assert best.cost == pytest.approx(min(costs.values()), rel=1e-12)
    assert best.cost == pytest.approx(costs[best.phase], rel=1e-12)


@given(st.floats(1e-3, 0.2), st.floats(0.05, 40))
def test_geometric_outputs_give_equation_3(ending: float, overhead: float) -> None:
    """In whole iterations: no share near that of (3), in discrete time, is cheaper than the one found."""
    best = stationary_share(Survival(np.ones(1), ending), overhead)
    rate = -log1p(-ending)
    length = -log1p(-base_share(rate * overhead)) / rate
    assert abs(best.phase - length) <= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.floats(0.1, 20), st.integers(2, 5))
def test_longer_iterations_change_no_cost(lengths: list[int], overhead: float, unit: int) -> None:
    """Everything in units of time that are shorter: phases and costs grow with it, up to whole numbers."""
    best = stationary_share(sample_survival(lengths), overhead)
    finer = stationary_share(sample_survival([unit * x for x in lengths]), unit * overhead)
    assert finer.cost <= unit * best.cost * (1 + 1e-12)


@given(st.floats(1e-3, 0.3), st.integers(1, 200), st.integers(0, 150))
def test_a_tail_goes_on_where_the_curve_stops(ending: float, phase: int, last: int) -> None:
    cut = Survival((1 - ending) ** np.arange(last + 1), ending)
    whole = Survival(np.ones(1), ending)
    assert cut.renewals(phase) == pytest.approx(whole.renewals(phase), rel=1e-9)
    assert cut.mean == pytest.approx(1 / ending, rel=1e-9)


FITS = {  # p0, eta, t95
    "gamma2": (1.901493e-3, 1.089975e-5, 608),
    "gamma4": (-2.873265e-4, 2.651513e-5, 497),
    "lognormal": (4.386230e-3, -1.235345e-6, 805),
}


@pytest.mark.parametrize("law", FITS)
def test_population_fits(law: str) -> None:
    fit = fit_curve(LAWS[law])
    assert fit == (pytest.approx(FITS[law][0], rel=4e-7), pytest.approx(FITS[law][1], rel=5e-7), FITS[law][2])


def test_population_fits_of_uniform_outputs() -> None:
    assert fit_curve(uniform(512)) == (
        pytest.approx(-1.708946e-3, rel=4e-7),
        pytest.approx(1.286986e-5, rel=4e-7),
        743,
    )
    assert fit_curve(uniform(1024)).base == pytest.approx(-8.533911e-4, rel=1e-7)
    assert fit_curve(uniform(128)).base == pytest.approx(-6.813341e-3, rel=1e-7)


GUARDED = [  # law, mean, g, rho, literal (None: undefined), guarded
    ("gamma2", 256, 0.143321, 2.632, 0.146040, 0.073845),
    ("gamma2", 256, 0.452117, 5.126, 0.396165, 0.174264),
    ("gamma2", 256, 5, 1, 0.474011, 0.283910),
    ("gamma4", 256, 5, 1, None, 0.441158),
    ("uniform512", 512, 0.143321, 2.632, None, 0.139756),
    ("uniform512", 512, 0.452117, 5.126, None, 0.245242),
    ("uniform512", 512, 5, 1, None, 0.521348),
]


@pytest.mark.parametrize(("law", "mean", "overhead", "load", "literal", "safe"), GUARDED)
def test_literal_and_guarded_shares(
    law: str, mean: float, overhead: float, load: float, literal: float | None, safe: float
) -> None:
    fit = fit_curve(uniform(512) if law == "uniform512" else LAWS[law])
    assert (literal is None) == (fit.base <= 0)  # where the paper has no answer
    if literal is not None:
        assert paper_share(overhead, fit, load, cap=inf) == pytest.approx(literal, abs=2e-6)
    assert paper_share(overhead, guarded(fit, mean), load) == pytest.approx(safe, abs=2e-6)


def test_the_papers_share_costs_12_per_cent() -> None:
    survival, overhead = LAWS["gamma2"], 5.0
    share = paper_share(overhead, fit_curve(survival), 1.0, cap=inf)
    phase = min(range(1, 600), key=lambda length: abs(phase_share(survival, length) - share))
    cost = (phase + overhead) / phase_share(survival, phase)
    assert cost / stationary_share(survival, overhead).cost == pytest.approx(1.12, abs=0.006)


def test_length_grouping_would_save_a_fifth() -> None:
    """Outputs of one length cost T + g, 271 against 346 to 353 at g = 15."""
    costs = [
        stationary_share(LAWS[law], 15.0).cost for law in ("geometric", "gamma2", "uniform", "lognormal")
    ]
    assert (round(min(costs)), round(max(costs))) == (346, 353)
    assert stationary_share(sample_survival([256]), 15.0).cost == 271


@pytest.mark.parametrize(
    "call",
    [
        lambda: sample_survival([]),
        lambda: sample_survival([3, 0]),
        lambda: sample_survival([2.5]),
    ],
)
def test_bad_input(call) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_curve_may_be_given() -> None:
    assert Survival(np.array([1, 0.5, 0.25, 0])).mean == 1.75
