"""Equations (3) and (5), the exact restart model: known answers, identities, laws."""

from __future__ import annotations

from math import exp, expm1, inf, log1p, sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import lambertw

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.methods.eb.thresholds import base_share, settle
from headgate_papers.eb.theory import LinearHazard, paper_share, share_correction
from oracles.restart import highest_share, restart_phase, restart_share

BASE = {  # gamma: theta_0, zeta_0
    1e-6: (0.001412881, 0.001413880),
    1e-5: (0.004458835, 0.004468805),
    1e-4: (0.014009817, 0.014108881),
    1e-3: (0.043419656, 0.044390496),
    0.002: (0.060667587, 0.062585855),
    0.005: (0.093678105, 0.098360743),
    0.01: (0.129045134, 0.138165122),
    0.02: (0.175971125, 0.193549707),
    0.05: (0.259480458, 0.300403256),
    0.1: (0.340465609, 0.416221161),
    0.2: (0.435745467, 0.572249830),
    0.5: (0.575853631, 0.857676674),
    1.0: (0.682155567, 1.146193221),
    2.0: (0.778036316, 1.505241496),
    5.0: (0.876401566, 2.090717405),
    10.0: (0.926529303, 2.610868638),
}
OUTPUTS = (11, 64, 128, 256, 280, 512, 1024)
CARDS = {
    "pub-h200-qwen3-8b": (0.145465, 0.064043, 0.045867, 0.032729, 0.031325, 0.023293, 0.016546),
    "pub-rtx-pro-6000-qwen3-8b": (0.239395, 0.110019, 0.079546, 0.057151, 0.054740, 0.040874, 0.029137),
    "pub-h200-qwen3-30b-a3b": (0.288847, 0.135992, 0.098867, 0.071317, 0.068337, 0.051152, 0.036539),
    "pub-rtx-pro-6000-qwen3-30b-a3b": (0.371067, 0.182370, 0.133926, 0.097322, 0.093330, 0.070180, 0.050325),
}
ratios = st.floats(1e-8, 1e4)


@pytest.mark.parametrize(("ratio", "known"), BASE.items())
def test_base_share_known_answers(ratio: float, known: tuple[float, float]) -> None:
    share = base_share(ratio)
    assert share == pytest.approx(known[0], abs=6e-10)
    assert -log1p(-share) == pytest.approx(known[1], abs=6e-10)


@pytest.mark.parametrize("card", CARDS)
def test_base_share_of_the_published_cards(card: str) -> None:
    terms = load_card(card).coefficients
    overhead = terms.prefill.constant / terms.decode.constant
    shares = [base_share(overhead / output) for output in OUTPUTS]
    assert shares == pytest.approx(CARDS[card], abs=6e-7)


@pytest.mark.parametrize(
    ("ending", "smooth", "ticking"),
    [(1 / 64, 0.309867, 0.310812), (1 / 256, 0.174149, 0.174299), (1 / 11, 0.560965, 0.568350)],
)
def test_discrete_time(ending: float, smooth: float, ticking: float) -> None:
    assert base_share(5 * ending) == pytest.approx(smooth, abs=6e-7)
    assert base_share(5 * -log1p(-ending)) == pytest.approx(ticking, abs=6e-7)


@given(st.floats(1e-5, 600))
def test_newton_and_lambert_agree(ratio: float) -> None:
    # Near the branch point W keeps half the digits: the error of 1 + e z is one rounding, its root counts.
    lambert = float(1 + 1 / lambertw(-exp(-1 - ratio), -1).real)
    assert base_share(ratio) == pytest.approx(lambert, rel=1e-14 + 1e-15 / ratio)


@given(ratios)
def test_base_share_solves_its_equation(ratio: float) -> None:
    share = base_share(ratio)
    zeta = -log1p(-share)
    assert expm1(zeta) - zeta == pytest.approx(ratio, rel=1e-6)


@given(ratios, ratios)
def test_base_share_rises_with_the_ratio(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assume(high > low * (1 + 1e-9))
    assert base_share(low) < base_share(high)


@given(st.floats(1e-6, 1e4))
def test_base_share_lies_in_its_bracket(ratio: float) -> None:
    times = 1 / (1 - base_share(ratio))
    assert 1 + sqrt(2 * ratio) + 2 * ratio / 3 < times < 1 + sqrt(2 * ratio) + ratio


def test_small_ratios_go_as_a_root_and_zero_is_zero() -> None:
    assert base_share(1e-12) == pytest.approx(sqrt(2e-12), rel=1e-5)
    assert base_share(0.0) == 0.0
    assert paper_share(0.0, LinearHazard(0.01, 1e-6), 1.0) == 0.0


PHASES = [  # theta, p0, eta, T, J
    (0.3, 0.004, 0.0, 89.168736, 75.000000),
    (0.3, 0.004, 1e-6, 88.196410, 74.230178),
    (0.3, 0.004, 1e-5, 80.972961, 68.479073),
    (0.3, 0.004, -1e-6, 90.185412, 75.803844),
    (0.6, 0.001, 1e-5, 339.611358, 244.722614),
]


@pytest.mark.parametrize(("share", "base", "slope", "iterations", "decoded"), PHASES)
def test_restart_phase_known_answers(
    share: float, base: float, slope: float, iterations: float, decoded: float
) -> None:
    phase = restart_phase(share, LinearHazard(base, slope))
    assert phase == pytest.approx((iterations, decoded), abs=6e-7)


CORRECTIONS = [  # p0, eta, g, rho, theta_0, correction, sum, exact
    (0.004, 1e-8, 5, 1, 0.175971, 0.000097, 0.176068, 0.176068),
    (0.004, 1e-7, 5, 1, 0.175971, 0.000969, 0.176940, 0.176946),
    (0.004, 1e-6, 5, 1, 0.175971, 0.009690, 0.185661, 0.186311),
    (0.004, 5e-6, 5, 1, 0.175971, 0.048451, 0.224423, 0.244876),
    (0.004, 2e-5, 5, 1, 0.175971, 0.193806, 0.369777, 0.547123),
    (0.004, 1e-6, 5, 5.25, 0.175971, 0.027708, 0.203679, 0.210964),
    (0.004, 5e-6, 5, 5.25, 0.175971, 0.138539, 0.314510, 0.566888),
    (0.002, 1e-6, 15, 0.5, 0.209701, 0.035424, 0.245126, 0.251606),
    (0.001, 1e-6, 15, 2, 0.154939, 0.200543, 0.355482, 0.625136),
    (1 / 256, 1 / 131072, 0.143321, 2.632, 0.032729, 0.028780, 0.061508, 0.459754),
    (1 / 256, 1 / 131072, 0.452117, 5.126, 0.057151, 0.081974, 0.139125, 0.692275),
]


@pytest.mark.parametrize(
    ("base", "slope", "overhead", "load", "theta", "delta", "total", "exact"), CORRECTIONS
)
def test_correction_and_exact_root_known_answers(
    base: float,
    slope: float,
    overhead: float,
    load: float,
    theta: float,
    delta: float,
    total: float,
    exact: float,
) -> None:
    hazard = LinearHazard(base, slope)
    start = base_share(base * overhead)
    assert start == pytest.approx(theta, abs=6e-7)
    assert share_correction(hazard, start, load) == pytest.approx(delta, abs=6e-7)
    assert paper_share(overhead, hazard, load, cap=inf) == pytest.approx(total, abs=1.1e-6)
    assert restart_share(overhead, hazard, load) == pytest.approx(exact, abs=6e-7)


costs_of_phases = {
    "base": st.floats(1e-4, 0.1),
    "overhead": st.floats(0.1, 50),
    "load": st.floats(0, 10),
}


@given(**costs_of_phases)
def test_flat_hazard_gives_equation_3(base: float, overhead: float, load: float) -> None:
    exact = restart_share(overhead, LinearHazard(base, 0.0), load)
    assert exact == pytest.approx(base_share(base * overhead), rel=1e-6)


@given(**costs_of_phases, small=st.floats(1e-6, 1e-4))
def test_the_correction_is_right_to_first_order(
    base: float, overhead: float, load: float, small: float
) -> None:
    """What is left of the error after the correction is of second order in eta (1 + rho) / p0^2."""
    hazard = LinearHazard(base, small * base**2 / (1 + load))
    start = base_share(base * overhead)
    exact = restart_share(overhead, hazard, load)
    delta = share_correction(hazard, start, load)
    assert delta > 0
    assert exact - start == pytest.approx(delta, rel=100 * small, abs=1e-9)


@given(**costs_of_phases, slope=st.floats(-1, 3), unit=st.floats(0.05, 1))
def test_scale_invariance(base: float, overhead: float, load: float, slope: float, unit: float) -> None:
    """A unit of time that is longer changes hazards and overhead together, and no share."""
    one = LinearHazard(base, slope * base**2)
    other = LinearHazard(base * unit, slope * base**2 * unit**2)
    assert restart_share(overhead, one, load) == pytest.approx(
        restart_share(overhead / unit, other, load), rel=1e-7
    )
    assert paper_share(overhead, one, load, inf) == pytest.approx(
        paper_share(overhead / unit, other, load, inf), rel=1e-9
    )


@given(**costs_of_phases, slope=st.floats(-3, 20))
def test_the_exact_root_is_a_minimum(base: float, overhead: float, load: float, slope: float) -> None:
    hazard = LinearHazard(base, slope * base**2)
    best = restart_share(overhead, hazard, load)

    def cost(share: float) -> float:
        phase = restart_phase(share, hazard)
        return (overhead + phase.iterations + load * phase.decoded) / share

    top = highest_share(hazard)
    for share in (best * 0.99, best * 0.5, best + 0.01 * (top - best), best + 0.5 * (top - best)):
        assert cost(best) <= cost(share) * (1 + 1e-9)


def test_falling_hazard_never_empties_a_batch() -> None:
    hazard = LinearHazard(0.004, -1e-5)
    assert highest_share(hazard) == pytest.approx(1 - 2.718281828 ** (-0.8))
    assert 0 < restart_share(5, hazard, 1.0) < highest_share(hazard)
    with pytest.raises(InputError, match="never reached"):
        restart_phase(0.9, hazard)


def test_settle_clips_and_rounds() -> None:
    assert settle(0.059981463, 256) == (0.059981463, 15, 256)
    assert settle(0.17, 10).refill == 2  # the floor would be 1
    assert settle(0.95, 100) == (0.80, 80, 100)
    assert settle(0.001, 1000) == (0.01, 10, 1000)
    assert settle(0.001, 20) == (0.05, 1, 20)
    assert settle(0.5, 1) == (1.0, 1, 1)


@given(st.floats(0, 2), st.integers(1, 5000))
def test_settle_stays_in_range(share: float, slots: int) -> None:
    threshold = settle(share, slots)
    assert 1 <= threshold.refill <= slots
    assert threshold.refill == 1 or threshold.share <= 0.8


def test_the_correction_is_capped() -> None:
    hazard = LinearHazard(1 / 256, 1e-3)
    assert paper_share(5.0, hazard, 1.0) == pytest.approx(6 * base_share(5 / 256))
    assert paper_share(5.0, hazard, 1.0, cap=2) == pytest.approx(3 * base_share(5 / 256))


@pytest.mark.parametrize(
    ("call", "inequality"),
    [
        (lambda: restart_phase(1.0, LinearHazard(0.01, 0)), "0 <= share < 1"),
        (lambda: restart_phase(0.5, LinearHazard(0.0, 0)), "p0 > 0"),
        (lambda: restart_share(0.0, LinearHazard(0.01, 0), 1), "> 0"),
    ],
)
def test_bad_input_names_the_inequality(call, inequality: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert inequality in message
    assert "\n" not in message


def test_cost_of_a_wrong_rate() -> None:
    """6.6: the fixed cost lost when the rate is off by a factor, at gamma = 0.01 and 0.2."""

    def loss(gamma: float, factor: float) -> float:
        cost = [(gamma - log1p(-share)) / share for share in (base_share(gamma * factor), base_share(gamma))]
        return 100 * (cost[0] / cost[1] - 1)

    assert max(loss(0.01, 0.5), loss(0.01, 2)) == pytest.approx(0.75, abs=0.03)
    assert loss(0.01, 0.75) == pytest.approx(0.13, abs=0.006)
    assert loss(0.01, 1.5) == pytest.approx(0.25, abs=0.006)
    assert max(loss(0.01, 0.25), loss(0.01, 4)) == pytest.approx(3.1, abs=0.1)
    assert max(loss(0.2, 0.5), loss(0.2, 2)) == pytest.approx(2.1, abs=0.1)
    assert loss(0.2, 0.75) == pytest.approx(0.36, abs=0.006)
    assert loss(0.2, 1.5) == pytest.approx(0.71, abs=0.03)
    assert sorted((loss(0.2, 0.25), loss(0.2, 4))) == pytest.approx([8.4, 8.8], abs=0.1)
