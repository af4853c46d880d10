"""Straight lines from cost cards: the knee, the context, and what a refill's fixed cost is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.cost.card import load_card
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.cost.model import Shape
from headgate.methods.eb.costs import Lengths, phase_costs


def test_costs_of_the_measured_card() -> None:
    """Above its knee of 64 decodes the h200 card is a line; its constant less the credit of the free ones."""
    cost = load_card("linear-h200-qwen3-8b").cost
    lengths = Lengths(512, 511, output_sd=148)
    costs = phase_costs(cost, lengths, 512)
    context = 512 + (148**2 + 511**2) / (2 * 511)
    assert lengths.context == pytest.approx(context)
    assert costs.decode_fixed == pytest.approx(0.00544601 - 64 * 2.55827e-05)
    assert costs.decode_per_request == pytest.approx(2.55827e-05 + 3.34086e-08 * context)
    for decodes in (512, 450, 422):
        step = cost.seconds(Shape(decodes, round(decodes * context)))
        assert costs.decode_fixed + costs.decode_per_request * decodes == pytest.approx(step, rel=1e-4)
    tokens = cost.seconds(Shape(400, round(400 * context), 1600))
    assert costs.mixed_fixed + costs.mixed_per_token(0.2) * 2000 == pytest.approx(tokens, rel=1e-4)


@given(st.floats(1e-3, 0.02), st.floats(0, 1e-3), st.integers(0, 600), st.integers(1, 600))
def test_the_line_meets_the_card_where_a_phase_begins(
    constant: float, each: float, free: int, slots: int
) -> None:
    terms = DecodeTerms(constant, each, 1e-8, free)
    cost = LinearCost(terms, PrefillTerms(0.001, 1e-5), MixedTerms())
    lengths = Lengths(100, 100, output_sd=100)
    costs = phase_costs(cost, lengths, slots)
    assert costs.decode_fixed > 0
    for decodes in (slots - 1, slots):
        true = constant + each * max(decodes - free, 0) + 1e-8 * 200 * decodes
        assert costs.decode_fixed + costs.decode_per_request * decodes >= true * (1 - 1e-9)
    true = constant + each * max(slots - free, 0) + 1e-8 * 200 * slots
    assert costs.decode_fixed + costs.decode_per_request * slots == pytest.approx(true, rel=1e-9)
