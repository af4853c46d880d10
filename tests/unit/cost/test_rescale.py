"""A derived card fixed by traffic: what is found, what is left alone, and what the new card says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.cost.card import load_card, parse_card
from headgate.cost.derive.derived_card import shapes, table
from headgate.cost.derive.rescale import rescale
from headgate.cost.fit.solve import seconds
from headgate.cost.fit.steps import StepTable

GRID = Path(__file__).resolve().parents[3] / "studies" / "h200" / "results" / "grid"
CARD = load_card("derived:llama-3.1-8b@h100-sxm")


def traffic(card, change=None, noise=0.02, copies=6, seed=0) -> StepTable:
    """The steps of the grid several times over, on an engine whose prices are `change`d."""
    rng = np.random.default_rng(seed)
    steps = shapes(card.kv_tokens, 256, 8192)
    law = replace(card.work, **{name: f(getattr(card.work, name)) for name, f in (change or {}).items()})
    plain = table(steps, [1.0] * len(steps))
    times = seconds(law, plain)
    each = [table(steps, times * rng.lognormal(0, noise, len(steps))) for _ in range(copies)]
    columns = {
        name: np.concatenate([getattr(one, name) for one in each])
        for name in ("seconds", "decodes", "context", "prefill", "behind", "prompts", "attention")
    }
    part = np.repeat(np.arange(copies), len(steps))
    return StepTable.from_columns({**columns, "part": part}, [f"round {n}" for n in range(copies)])


def test_an_engine_as_derived_changes_nothing_much():
    found = rescale(CARD, traffic(CARD), "mine", "a test")
    assert all(abs(factor - 1) < 0.02 for factor in found.factors.values())
    assert found.after["all"]["median"] < 0.03


def test_a_slower_engine_is_found():
    change = dict.fromkeys(("constant", "per_token", "per_decode", "prompt_constant"), lambda x: 1.2 * x)
    found = rescale(CARD, traffic(CARD, change), "mine", "a test")
    assert found.before["all"]["median"] > 0.08
    assert found.after["all"]["median"] < 0.03
    assert found.factors["layers"] == pytest.approx(1.2, abs=0.05)
    assert found.card.work.per_token == pytest.approx(1.2 * CARD.work.per_token, rel=0.05)


def test_a_synchronous_host_is_found_as_what_is_added():
    change = {"constant": lambda x: x + 2e-3, "per_decode": lambda x: x + 50e-6}
    found = rescale(CARD, traffic(CARD, change, noise=0.01), "mine", "a test")
    assert found.after["decode"]["median"] < 0.25 * found.before["decode"]["median"]
    assert found.added["per_decode"] == pytest.approx(50e-6, rel=0.3)


def test_a_faster_host_than_the_prior_shows():
    change = dict.fromkeys(("host_constant", "host_per_request", "host_prompts"), lambda x: 0.1 * x)
    slow = load_card("derived:llama-3.2-1b@h100-sxm")
    found = rescale(slow, traffic(slow, change), "mine", "a test")
    assert found.card.work.host_constant < 0.9 * slow.work.host_constant
    assert found.card.host.constant < slow.host.constant


def test_the_new_card_says_where_it_comes_from():
    change = {"per_token": lambda x: 1.15 * x}
    found = rescale(CARD, traffic(CARD, change), "mine", "result.json")
    card = found.card
    assert parse_card(card.text(), "text") == card
    assert card.cost.terms == card.work != CARD.work
    assert card.name == "mine" and "rescaled" in card.description and "result.json" in card.provenance.source
    assert card.provenance.numbers["work.per_token"].origin == "measured"
    assert (
        card.provenance.residuals["decode after"]["median"]
        <= card.provenance.residuals["decode before"]["median"]
    )
    for kind in ("decode", "prefill", "mixed", "throughput"):
        assert 0.03 <= getattr(card.expected_error, kind) <= getattr(CARD.expected_error, kind)
    assert card.expected_error.throughput < CARD.expected_error.throughput
    lines = found.lines()
    assert "before" in lines[1] and any(line.strip().startswith("decode") for line in lines)


def test_a_kind_that_was_not_seen_keeps_its_bar():
    whole = traffic(CARD)
    found = rescale(CARD, whole.take(whole.prefill == 0), "mine", "a test")
    assert found.card.expected_error.prefill == CARD.expected_error.prefill
    assert found.card.expected_error.decode < CARD.expected_error.decode


@pytest.mark.parametrize(("gpu", "before", "after"), [("h100-sxm", 0.15, 0.10), ("a100-sxm", 1.0, 0.07)])
def test_real_steps_mend_a_card_of_the_wrong_gpu(gpu, before, after):
    steps = StepTable.load(GRID / "qwen3-8b.1.steps.npz")
    found = rescale(load_card(f"derived:qwen3-8b@{gpu}:graph1024"), steps, "mine", "a grid")
    assert found.before["all"]["median"] > before
    assert found.after["all"]["median"] < after
    assert abs(found.after["all"]["total"]) < 0.05


def test_only_derived_cards_are_rescaled():
    with pytest.raises(InputError, match="is not derived"):
        rescale(load_card("cal-h200-qwen3-8b"), traffic(CARD), "mine", "a test")


def test_too_few_steps_are_refused():
    few = traffic(CARD).take(np.arange(5))
    with pytest.raises(InputError, match="at least 30"):
        rescale(CARD, few, "mine", "a test")
