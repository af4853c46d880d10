"""Time linear in resident KV: equation (1) of WAIT, with and without the price of new tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.cost.card import load_card
from headgate.cost.model import Shape
from headgate_papers.kv_linear import kv_linear


@given(
    st.lists(st.integers(1, 500), max_size=6),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=4),
    st.sampled_from([0.0, 3e-5]),
)
def test_a_batch_costs_the_kv_of_its_members(contexts, chunks, per_new):
    """Decodes cost all they read, prompts what they process and what lies behind; new tokens d2 more."""
    cost = kv_linear(0.008, 3e-7, per_new)
    prefill, behind = (sum(chunk[place] for chunk in chunks) for place in (0, 1))
    shape = Shape(len(contexts), sum(contexts), prefill, behind)
    kv, new = sum(contexts) + prefill + behind, len(contexts) + prefill
    expected = 0.008 + 3e-7 * kv + per_new * new if new else 0.0
    assert cost.seconds(shape) == pytest.approx(expected, abs=1e-12)


def test_the_cards_are_the_reference_values():
    plain, compute = load_card("pub-a100-llama-7b"), load_card("pub-a100-llama-7b-compute")
    assert plain.cost == kv_linear(0.008, 3e-7)
    assert compute.cost == kv_linear(0.008, 3e-7, 30e-6)
    assert plain.kv_tokens == compute.kv_tokens == 100_000
    assert plain.cost.seconds(Shape(500, 100_000)) == pytest.approx(0.038)
    for card in (plain, compute):
        assert any("d0 = 8 ms" in line for line in card.provenance.assumptions)
