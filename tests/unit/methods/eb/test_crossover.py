"""Throughputs, crossover, EB+'s rule, latency: known answers and identities."""

from __future__ import annotations

from math import inf, log1p

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.methods.eb.costs import (
    Lengths,
    PhaseCosts,
    checked_costs,
    checked_lengths,
    phase_costs,
)
from headgate.methods.eb.prediction import wants_exclusive
from headgate.methods.eb.thresholds import base_share
from headgate_papers.eb.theory import ModeComparison, compare, exclusive_throughput, mixed_throughput
from oracles.exclusive_latency import exclusive_latency

TOY = PhaseCosts(0.005, 3e-5, 0.010, 5e-5, 0.011, (4.2e-5, 0.0, 0.0))
LENGTHS = Lengths(512, 256)


def published(card: str) -> PhaseCosts:
    """A published card whose mixed constant is that of prefill."""
    costs = phase_costs(load_card(card).cost, LENGTHS, 512)
    return costs._replace(mixed_fixed=costs.prefill_fixed)


CARD = published("pub-h200-qwen3-8b")
RTX = published("pub-rtx-pro-6000-qwen3-8b")
# The H200 polynomial is printed with four digits, (2.494, 5.193, 1.478)e-5; the numbers below
# come from more. They need its value at r = 1/3 only, which is printed with seven.
H200 = CARD._replace(mixed_by_share=(4.388825e-5, 0.0, 0.0))


@pytest.mark.parametrize(
    ("costs", "share", "mixed", "pure", "gap", "penalty", "batch"),
    [
        (H200, 0.032729, 4.388825e-5, 3.185659e-5, 1.203166e-5, 2.646484e-3, 219.960),
        (RTX, 0.057151, 1.296650e-4, 6.801327e-5, 6.165175e-5, 2.098482e-3, 34.038),
    ],
)
def test_crossover_of_the_published_cards(
    costs: PhaseCosts, share: float, mixed: float, pure: float, gap: float, penalty: float, batch: float
) -> None:
    found = compare(costs, LENGTHS)
    assert found.share == pytest.approx(share, abs=6e-7)
    assert costs.mixed_per_token(1 / 3) == pytest.approx(mixed, rel=1.2e-6)
    assert found.pure == pytest.approx(pure, rel=4e-7)  # what the digits of the printed cards allow
    assert found.gap == pytest.approx(gap, rel=4e-6)
    assert found.penalty == pytest.approx(penalty, rel=5e-7)
    assert found.exclusive_between == (pytest.approx(batch, abs=6e-4), inf)


def test_the_printed_polynomial_gives_the_same_within_its_digits() -> None:
    found = compare(CARD, LENGTHS)
    assert CARD.mixed_per_token(1 / 3) == pytest.approx(4.388825e-5, rel=1e-4)
    assert found.exclusive_between[0] == pytest.approx(219.960, rel=4e-4)
    assert mixed_throughput(CARD, LENGTHS, 512) == pytest.approx(29.113800, rel=1e-4)
    assert found.gain(512) == pytest.approx(6.8627e-6, rel=1e-3)


def test_gain_and_the_six_decisions_of_table_3() -> None:
    sizes = (32, 512, 2048)
    h200 = [compare(H200, LENGTHS).gain(n) for n in sizes]
    rtx = [compare(RTX, LENGTHS).gain(n) for n in sizes]
    assert h200 == pytest.approx([-7.0671e-5, 6.8627e-6, 1.0739e-5], rel=5e-5)
    assert rtx == pytest.approx([-3.9258e-6, 5.7553e-5, 6.0627e-5], rel=5e-5)
    assert [wants_exclusive(gain, 1e-5, exclusive=False) for gain in h200] == [False, False, True]
    assert [wants_exclusive(gain, 1e-5, exclusive=False) for gain in rtx] == [False, True, True]


def test_the_choice_of_the_mixed_constant_matters_more_than_the_margin() -> None:
    """With the decode constant RTX would choose EB at 32, and N_x falls to 7.4 and 3.2."""
    dear = [compare(costs._replace(mixed_fixed=costs.decode_fixed), LENGTHS) for costs in (H200, RTX)]
    assert dear[1].gain(32) > 1e-5
    assert [found.exclusive_between[0] for found in dear] == pytest.approx([7.4, 3.2], abs=0.06)


def test_model_against_table_3() -> None:
    for costs, at_512, at_1024, mixed in (
        (H200, 34.390990, 37.352983, 29.113800),
        (RTX, 17.320017, 18.186636, 9.809934),
    ):
        share = base_share(costs.overhead / 256)
        assert exclusive_throughput(costs, LENGTHS, 512, share * 512) == pytest.approx(at_512, rel=3e-7)
        assert exclusive_throughput(costs, LENGTHS, 1024, share * 1024) == pytest.approx(at_1024, rel=3e-7)
        assert mixed_throughput(costs, LENGTHS, 512) == pytest.approx(mixed, rel=1.1e-6)
    assert pytest.approx(26412, abs=1) == 768 * 34.390990


def test_toy_set() -> None:
    assert TOY.overhead / 256 == 0.001953125
    share = base_share(0.001953125)
    assert share == pytest.approx(0.059981463, abs=6e-10)
    assert exclusive_throughput(TOY, LENGTHS, 256, share * 256) == pytest.approx(25.774466, abs=6e-7)
    assert mixed_throughput(TOY, LENGTHS, 256) == pytest.approx(23.095238, abs=6e-7)
    found = compare(TOY, LENGTHS)
    assert found.pure == pytest.approx(3.666666667e-5, rel=1e-9)
    assert found.gap == pytest.approx(5.333333e-6, rel=1e-6)
    assert found.penalty / 256 == pytest.approx(-5.271884e-7, rel=2e-7)
    assert found.exclusive_between == (0.0, inf)


TOY_BY_REFILL = {  # k: requests per second, milliseconds per token
    1: (23.159094, 43.095192),
    8: (25.677512, 38.332855),
    32: (25.641840, 36.507110),
    64: (25.160139, 34.539351),
    128: (23.774425, 30.341324),
    192: (21.427056, 25.248948),
    255: (11.926223, 15.061972),
}


@pytest.mark.parametrize(("refill", "known"), TOY_BY_REFILL.items())
def test_toy_set_by_refill(refill: int, known: tuple[float, float]) -> None:
    assert exclusive_throughput(TOY, LENGTHS, 256, refill) == pytest.approx(known[0], abs=6e-7)
    latency = exclusive_latency(TOY, LENGTHS, 256, refill, clients=512)
    assert 1000 * latency.per_token == pytest.approx(known[1], abs=6e-7)
    assert refill / latency.cycle == pytest.approx(known[0], abs=6e-7)
    assert latency.longest_gap == pytest.approx(0.005 + 3e-5 * refill * 512)
    in_engine = known[0] * (latency.first_token + 256 * latency.per_token)  # Little
    assert in_engine == pytest.approx(512, rel=1e-6)


def test_latency_with_a_budget_pays_for_every_chunk() -> None:
    one = exclusive_latency(TOY, LENGTHS, 256, 64, clients=256)
    four = exclusive_latency(TOY, LENGTHS, 256, 64, clients=256, budget=8192)
    assert four.longest_gap - one.longest_gap == pytest.approx(3 * 0.005)
    assert four.cycle - one.cycle == pytest.approx(3 * 0.005)


prices = st.builds(
    PhaseCosts,
    prefill_fixed=st.floats(1e-4, 0.2),
    prefill_per_token=st.floats(1e-6, 1e-4),
    decode_fixed=st.floats(1e-3, 0.1),
    decode_per_request=st.floats(1e-6, 1e-3),
    mixed_fixed=st.floats(0, 0.2),
    mixed_by_share=st.tuples(st.floats(1e-6, 1e-4), st.floats(0, 1e-4), st.floats(0, 1e-4)),
)
workloads = st.builds(lambda prompt, output: Lengths(prompt, output), st.floats(1, 4000), st.floats(2, 4000))


@given(prices, workloads, st.floats(2, 3000))
def test_identities_at_the_optimum(costs: PhaseCosts, lengths: Lengths, slots: float) -> None:
    """3.6: equation (4) at theta_0 in its short form, and (8) as printed against the form we use."""
    share = base_share(costs.overhead / lengths.output)
    zeta = -log1p(-share)
    printed = (costs.prefill_fixed + costs.decode_fixed * zeta * lengths.output) / share
    assert printed == pytest.approx(costs.decode_fixed * lengths.output / (1 - share), rel=1e-9)
    per_token = costs.prefill_per_token * lengths.prompt + costs.decode_per_request * lengths.output
    short = 1 / (costs.decode_fixed * lengths.output / ((1 - share) * slots) + per_token)
    assert exclusive_throughput(costs, lengths, slots, share * slots) == pytest.approx(short, rel=1e-9)
    penalty = (printed - costs.mixed_fixed * (1 + lengths.output)) / lengths.total
    scale = printed / lengths.total
    assert compare(costs, lengths).penalty == pytest.approx(penalty, abs=1e-9 * scale)


@given(prices, workloads, st.floats(2, 3000))
def test_the_gain_has_the_sign_of_the_difference_in_throughput(
    costs: PhaseCosts, lengths: Lengths, slots: float
) -> None:
    found = compare(costs, lengths)
    exclusive = exclusive_throughput(costs, lengths, slots, found.share * slots)
    mixed = mixed_throughput(costs, lengths, slots)
    apart = 1 / mixed - 1 / exclusive
    assert found.gain(slots) * lengths.total == pytest.approx(apart, abs=1e-9 * (1 / mixed + 1 / exclusive))
    low, high = found.exclusive_between
    if abs(apart) > 1e-6 / mixed:
        assert (low < slots < high) == (apart > 0)


@given(prices, workloads, st.floats(2, 3000), st.floats(1e-3, 0.999))
def test_no_refill_beats_the_optimum(costs: PhaseCosts, lengths: Lengths, slots: float, share: float) -> None:
    best = base_share(costs.overhead / lengths.output)
    least = exclusive_throughput(costs, lengths, slots, best * slots)
    assert exclusive_throughput(costs, lengths, slots, share * slots) <= least * (1 + 1e-12)


@given(prices, workloads, st.floats(0.1, 10))
def test_the_unit_of_time_does_not_matter(costs: PhaseCosts, lengths: Lengths, unit: float) -> None:
    plain = [unit * x for x in costs[:5]]
    scaled = PhaseCosts(*plain, tuple(unit * x for x in costs.mixed_by_share))  # type: ignore[arg-type]
    one, other = compare(costs, lengths), compare(scaled, lengths)
    assert other.share == pytest.approx(one.share, rel=1e-12)
    assert other.gain(100) == pytest.approx(unit * one.gain(100), abs=1e-9 * unit * (one.pure + 1e-4))


def test_where_exclusive_batches_win() -> None:
    assert ModeComparison(1e-6, 2e-4, 1, 0).exclusive_between == (pytest.approx(200), inf)
    assert ModeComparison(-1e-6, 2e-4, 1, 0).exclusive_between == (inf, inf)
    assert ModeComparison(0.0, 2e-4, 1, 0).exclusive_between == (inf, inf)
    assert ModeComparison(0.0, 0.0, 1, 0).exclusive_between == (inf, inf)
    assert ModeComparison(1e-6, 0.0, 1, 0).exclusive_between == (0.0, inf)
    assert ModeComparison(0.0, -2e-4, 1, 0).exclusive_between == (0.0, inf)
    assert ModeComparison(-1e-6, -2e-4, 1, 0).exclusive_between == (0.0, pytest.approx(200))


def test_hysteresis() -> None:
    margin = 0.03
    assert [wants_exclusive(x, margin, exclusive=False) for x in (-0.04, -0.02, 0.02, 0.04)] == [
        False
    ] * 3 + [True]
    assert [wants_exclusive(x, margin, exclusive=True) for x in (-0.04, -0.02, 0.02, 0.04)] == [False] + [
        True
    ] * 3


def test_a_negative_margin_favours_exclusive_batches_and_keeps_its_hysteresis():
    losses = (-0.07, -0.05, -0.01, 0.01)
    assert [wants_exclusive(x, -0.02, exclusive=False) for x in losses] == [False, False, True, True]
    assert [wants_exclusive(x, -0.02, exclusive=True) for x in losses] == [False, True, True, True]


def test_running_to_completion_has_no_fluid_throughput() -> None:
    assert exclusive_throughput(TOY, LENGTHS, 256, 256) == 0.0


@pytest.mark.parametrize(
    ("call", "inequality"),
    [
        (
            lambda: checked_costs(TOY._replace(prefill_fixed=-0.1)),
            "prefill_fixed=-0.1; need a finite number >= 0",
        ),
        (lambda: checked_costs(TOY._replace(decode_fixed=0.0)), "> 0"),
        (lambda: checked_costs(TOY._replace(mixed_by_share=(0, inf, 0))), "finite"),
        (lambda: checked_lengths(Lengths(0, 10)), "> 0"),
        (lambda: checked_lengths(Lengths(10, 0.5)), ">= 1"),
        (lambda: checked_lengths(Lengths(10, 10, -1)), ">= 0"),
        (lambda: exclusive_latency(TOY, LENGTHS, 10, 10, 100), "1 <= refill < slots"),
        (lambda: exclusive_latency(TOY, LENGTHS, 10, 5, 9), "clients >= slots"),
    ],
)
def test_bad_input_names_the_inequality(call, inequality: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert inequality in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("card", "share"), [(RTX, 0.206), (CARD, 0.366)])
def test_where_a_mixed_token_becomes_dearer_than_a_decode(card: PhaseCosts, share: float) -> None:
    """The paper has about 20 % (RTX PRO 6000) and 80 % (H200) for Qwen3-4B; these are its prices of 8B."""
    below, above = card.mixed_per_token(share - 0.001), card.mixed_per_token(share + 0.001)
    assert below < card.decode_per_request < above


@pytest.mark.parametrize(("bend", "empty", "share"), [(-11.6, 0.0, 0.172), (-0.69, 0.724, 0.8)])
def test_where_a_batch_of_the_published_bend_is_as_dear_as_its_decodes(bend, empty, share):
    """(10), (11): K(r) = K(1) again at 2 (K(0)/K(1) - 1) / kappa. Of Qwen3-4B, kappa = -11.6 (RTX PRO 6000)
    puts it at 17 % at most, kappa = -0.69 (H200) at 80 % where a prompt token costs 0.72 of a decode."""
    price = PhaseCosts(0, 0, 1, 1, 0, (empty, 1 - empty - bend / 2, bend / 2))
    assert 2 * (empty - 1) / bend == pytest.approx(share, abs=6e-4)
    assert price.mixed_per_token(2 * (empty - 1) / bend) == pytest.approx(price.mixed_per_token(1.0)) == 1.0
