"""The host's law comes back from the steps it kept waiting, and only from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from made_up import table, timed

from headgate.core.errors import InputError
from headgate.cost.card import load_card, parse_card
from headgate.cost.fit.fit import fit_host
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.cost.model import Chunk, Shape


def test_a_host_is_found_where_it_kept_steps_waiting() -> None:
    """Decode steps of 6 ms before steps that keep the host for longer; one in twenty three times too long."""
    draw = np.random.default_rng(7)
    host = HostTerms(0.002, 2e-5, prompts=0.01, ungraphed=0.03, graph=1024)
    gpu = WorkCost(WorkTerms(constant=0.005, per_token=1e-5))
    rows = []
    for tokens, decodes in product((64, 500, 1000, 2000, 4000), (8, 64, 200, 512)):
        alone = Shape(decodes, decodes * 100)
        turn = [alone, alone, alone, alone._replace(prefill=tokens, chunks=(Chunk(0, tokens),))]
        for shape, following in pairwise([*turn, turn[0]]):
            seconds = max(gpu.seconds(shape), host.seconds(following)) * (1 + 0.02 * draw.standard_normal())
            rows.append((seconds * (3 if draw.random() < 0.05 else 1), shape))
    steps = table(rows, [0] * len(rows), ["all"])
    found = fit_host(steps, gpu.terms, 1024)
    assert found is not None
    assert found.graph == 1024
    assert found.prompts == pytest.approx(host.prompts, rel=0.15)
    assert found.ungraphed == pytest.approx(host.ungraphed, rel=0.1)
    without = fit_host(steps, gpu.terms)  # nobody said where graphs end
    assert without is not None
    assert host.prompts < without.prompts < host.ungraphed
    assert (without.ungraphed, without.graph) == (0.0, 0)


def test_a_kind_that_was_hardly_launched_is_no_kind() -> None:
    """Nothing beyond the largest graph: what such a step would take is not made up."""
    host, gpu = HostTerms(0.002, prompts=0.01), WorkCost(WorkTerms(constant=0.005, per_token=1e-5))
    rows = []
    for tokens, decodes in product((64, 200, 500), (8, 64, 200, 300)):
        alone = Shape(decodes, decodes * 100)
        turn = [alone, alone, alone, alone._replace(prefill=tokens, chunks=(Chunk(0, tokens),))]
        rows += [(max(gpu.seconds(a), host.seconds(b)), a) for a, b in pairwise([*turn, turn[0]])]
    found = fit_host(table(rows, [0] * len(rows), ["all"]), gpu.terms, 1024)
    assert found is not None
    assert found.constant + found.prompts == pytest.approx(0.012, rel=0.05)
    assert (found.ungraphed, found.graph) == (0.0, 0)


def test_no_host_where_nobody_was_ahead() -> None:
    steps = timed(WorkTerms(constant=0.005, per_token=1e-5))
    assert fit_host(replace(steps, busy=np.zeros(len(steps), bool)), WorkTerms(0.005, 1e-5)) is None
    assert fit_host(steps.take(steps.prefill == 0), WorkTerms(0.005, 1e-5)) is None


def test_shipped_cards_have_a_host_and_others_do_not() -> None:
    card = load_card("cal-h200-qwen3-8b")
    assert card.host is not None
    assert 0 < card.host.prompts < card.host.ungraphed
    assert parse_card(card.text(), "again") == card
    assert '"host"' not in load_card("linear-h200-qwen3-8b").text()


def test_a_host_stands_beside_work_only() -> None:
    text = (
        load_card("linear-h200-qwen3-8b").text().replace('"block"', '"host": {"constant": 0.001}, "block"', 1)
    )
    with pytest.raises(InputError, match="host is allowed beside work only"):
        parse_card(text, "mine.json")
