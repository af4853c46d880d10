"""The paper's rules by one name, and margins below zero."""

from __future__ import annotations

import pytest

from headgate.experiment.library import card_engine, simulate
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.make import make_policy
from headgate.workloads.lengths import Uniform
from headgate.workloads.synthetic import generate


def engine():
    return card_engine("linear-h200-qwen3-8b", slots=512, budget=16384)


@pytest.mark.parametrize("name", ["eb-online", "eb+"])
def test_the_modes_of_the_paper_have_one_name(name):
    policy, _ = make_policy(name, {"mode": "paper"}, engine())
    inner = getattr(policy, "exclusive", policy)
    assert (inner.gate, inner.slot_rule) == ("paper", "planned")
    if isinstance(policy, ExclusivePlus):
        assert (policy.rule, policy.margin) == ("paper", 1e-5)
    ours, _ = make_policy(name, {}, engine())
    inner = getattr(ours, "exclusive", ours)
    assert (inner.gate, inner.slot_rule) == ("forecast", "forecast")


@pytest.mark.parametrize("name", ["eb-online", "eb+"])
def test_told_otherwise_it_does_otherwise(name):
    policy, _ = make_policy(name, {"mode": "paper", "gate": "fit", "slot_rule": "fixed"}, engine())
    inner = getattr(policy, "exclusive", policy)
    assert (inner.gate, inner.slot_rule) == ("fit", "fixed")


def test_a_negative_margin_favours_exclusive_batches():
    requests = generate(600, seed=0, prompt=Uniform(256), output=Uniform(128), clients=48)
    shares = {}
    for margin in (0.2, -0.2):
        policy, _ = make_policy("eb+", {"margin": margin, "slot_rule": "fixed"}, engine())
        run = simulate(engine(), policy, requests)
        shares[margin] = run.plans["gauge.exclusive"].mean()
    assert shares[0.2] == 0
    assert shares[-0.2] > 0.5
