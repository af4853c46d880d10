"""EB's whole plan for a workload: both modes, what stays put, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.estimators.hazard import Survival, sample_survival
from headgate.methods.eb.costs import Lengths, PhaseCosts, phase_costs
from headgate.methods.eb.thresholds import SlotBounds, safe_slots, settle, stationary_plan, stationary_share
from headgate_papers.eb.policies import paper_plan
from headgate_papers.eb.theory import LinearHazard, paper_share, paper_slots

COSTS = PhaseCosts(0.05, 2.485255e-5, 0.01, 4.586468e-5)
LENGTHS = Lengths(512, 256, 512 / 12**0.5, 256)
LAW = Survival(np.ones(1), 1 / 256)


def test_stationary_plan() -> None:
    plan = stationary_plan(COSTS, LENGTHS, LAW, SlotBounds(400_000, 2048))
    assert plan.share == pytest.approx(0.174512, abs=6e-7)
    assert plan.slots == safe_slots(plan.share, 1 / 256, 512, LENGTHS.prompt_sd, 400_000) == 516
    assert plan.refill == 90
    assert stationary_plan(COSTS, LENGTHS, LAW, SlotBounds(400_000, 256)) == settle(plan.share, 256)
    assert stationary_plan(COSTS, LENGTHS, LAW, SlotBounds(400_000, 2048, least=600)).slots == 600


def test_paper_plan() -> None:
    hazard = LinearHazard(1 / 256, 1e-7)
    slots = SlotBounds(400_000, 1024)
    share = paper_share(5.0, hazard, COSTS.decode_per_request * 1024 / COSTS.decode_fixed)
    plan = paper_plan(COSTS, LENGTHS, hazard, slots)
    assert plan == settle(share, paper_slots(share, 1 / 256, 512, 400_000))
    again = paper_plan(COSTS, LENGTHS, hazard, slots, previous=plan.slots)
    assert again.share < plan.share  # fewer slots, smaller rho, smaller correction


def test_the_papers_bound_is_clamped() -> None:
    hazard = LinearHazard(1 / 384, 0.0)
    plan = paper_plan(COSTS, Lengths(1, 384), hazard, SlotBounds(400_000, 1024, least=102))
    assert plan.slots == 102  # (6) says -829


@given(st.floats(1, 4000), st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 600))
def test_the_share_depends_on_overhead_and_outputs_only(prompt: float, outputs: list[int], most: int) -> None:
    survival = sample_survival(outputs)
    lengths = Lengths(prompt, max(survival.mean, 1.5))
    plan = stationary_plan(COSTS, lengths, survival, SlotBounds(1e6, most))
    assert 1 <= plan.refill <= plan.slots <= most
    assert plan.share == settle(stationary_share(survival, COSTS.overhead).share, plan.slots).share


def test_on_the_measured_card() -> None:
    """The knee lies below the phase, so the lines at the most slots and at those planned are the same."""
    card = load_card("linear-h200-qwen3-8b")
    lengths = Lengths(512, 511, 148, 148)
    outputs = sample_survival(range(255, 768))
    costs = phase_costs(card.cost, lengths, card.max_running)
    plan = stationary_plan(
        costs, lengths, outputs, SlotBounds(card.kv_tokens, card.max_running, block=card.block)
    )
    near = phase_costs(card.cost, lengths, plan.slots)
    assert near.overhead == pytest.approx(costs.overhead)
    assert plan.slots > 512
    assert 0.05 < plan.share < 0.08


def test_bad_slots() -> None:
    with pytest.raises(InputError, match="one mean request"):
        stationary_plan(COSTS, LENGTHS, LAW, SlotBounds(500, 10))
    assert stationary_plan(COSTS, LENGTHS, LAW, SlotBounds(1e6, 1)) == (1.0, 1, 1)
    assert paper_plan(COSTS, LENGTHS, LinearHazard(1 / 256, 0.0), SlotBounds(1e6, 1)) == (1.0, 1, 1)


def test_importing_planners_stays_cheap() -> None:
    """No scipy before it is needed."""
    names = "costs hybrid prediction refill thresholds"
    code = "; ".join(f"import headgate.methods.eb.{name}" for name in names.split())
    code += "; import sys; assert not [m for m in sys.modules if m.startswith('scipy')]"
    subprocess.run([sys.executable, "-c", code], check=True)
