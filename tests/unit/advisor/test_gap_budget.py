"""The budget that keeps a promise on gaps: near what searches found on the measured card."""

from __future__ import annotations

import pytest

from headgate.advisor.flags import FILLED, gap_budget
from headgate.cost.card import load_card
from headgate.cost.model import Shape
from headgate.workloads.traces import bundled

COST = load_card("cal-h200-qwen3-8b").cost


@pytest.mark.parametrize(
    ("gap", "rate", "searched"), [(0.05, 17.5, 1536), (0.1, 19.8, 3072), (0.2, 20.9, 5120)]
)
def test_near_what_searches_found_on_azure_conversations(gap, rate, searched):
    trace = bundled("azure-conv")
    found = gap_budget(COST, trace.prompt.mean(), trace.output.mean(), rate, gap, 1024, 16384)
    assert 0.75 * searched <= found <= 1.25 * searched


def test_a_full_step_fills_the_promise():
    found = gap_budget(COST, 1000, 200, 15.0, 0.1, 1024, 16384)
    decodes = round(15.0 * 200 * 0.1)
    took = COST.seconds(Shape(decodes, decodes * 1100, found - decodes))
    more = COST.seconds(Shape(decodes, decodes * 1100, found - decodes + 512))
    assert took <= FILLED * 0.1 < more


def test_a_promise_nobody_can_keep_still_gives_a_budget():
    assert gap_budget(COST, 1000, 200, 15.0, 0.001, 1024, 16384) == 256
