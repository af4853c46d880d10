"""EB(k̂*) and EB+ as printed: found by name, with the paper's defaults, and they keep the laws."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.library import card_engine, simulate
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from headgate_leaderboard.laws import try_laws
from headgate_papers.eb.policies import PaperExclusive, PaperPlus

SLOTS, BUDGET, PROMPT = 256, 2048, 100


def test_they_are_found_by_name():
    engine = card_engine("linear-h200-qwen3-8b", slots=512, budget=16384)
    online, _ = make_policy("eb-paper", {}, engine)
    plus, _ = make_policy("eb-paper+", {}, engine)
    assert type(online) is PaperExclusive and type(plus) is PaperPlus
    assert type(plus.exclusive) is PaperExclusive
    assert plus.exclusive.slot_rule == "planned" and plus.margin == 1e-5
    other, _ = make_policy("eb-paper+", {"gate": "forecast", "slot_rule": "fixed"}, engine)
    assert (other.exclusive.gate, other.exclusive.slot_rule) == ("forecast", "fixed")


@pytest.mark.parametrize("name", ["eb-paper", "eb-paper+"])
def test_they_keep_the_laws(name):
    trial = try_laws(name, settings={"review": 3}, worlds=15, seed=0)
    assert trial.kept, trial


@pytest.mark.parametrize(
    ("mixed", "exclusive"),
    [(MixedTerms(0.020, 12e-5, 20e-5), True), (MixedTerms(0.010, 3e-5, 5e-5), False)],
)
def test_rule_8_agrees_at_both_ends(mixed, exclusive):
    """With a price of prompts beside decodes it refills at once; without one it mixes."""
    cost = LinearCost(DecodeTerms(0.010, 5e-5), PrefillTerms(0.001, 3e-5), mixed)
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 151, 3000), rng.integers(25, 77, 3000)
    work = Workload.of(*lengths, clients=np.full(3000, 200))
    engine = Engine(cost, 10**6, 10**6, BUDGET, SLOTS, 16)
    run = simulate(engine, PaperPlus(SLOTS, BUDGET, cost), work)
    assert bool(run.plans["gauge.exclusive"][-1]) is exclusive
