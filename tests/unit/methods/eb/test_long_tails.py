"""Outputs with a long tail: EB's estimates see how long the running ones are, and EB+ chooses by it."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from headgate.estimators.hazard import Survival, sample_survival
from headgate.experiment.library import card_engine, simulate
from headgate.methods.names import BATCH
from headgate.stats.metrics import summarise
from headgate.workloads.lengths import LogNormal, Uniform
from headgate.workloads.synthetic import generate

SLOTS, BUDGET = 128, 8192

GEOMETRIC = Survival(np.ones(1), 0.25)


def test_moments_of_known_laws():
    assert GEOMETRIC.square == pytest.approx((2 - 0.25) / 0.25**2)
    assert GEOMETRIC.spread == pytest.approx(sqrt(0.75))
    assert sample_survival([1, 2, 3, 10]).square == pytest.approx((1 + 4 + 9 + 100) / 4)
    assert sample_survival([7, 7, 7]).spread == 0
    half = Survival(GEOMETRIC.curve.repeat(3) * [1, 0.75, 0.75**2], 0.25)
    assert half.square == pytest.approx(GEOMETRIC.square)


@pytest.mark.parametrize("name", ["eb-online", "eb+"])
def test_the_context_believed_is_that_of_the_running_requests(name):
    engine = card_engine("cal-h200-qwen3-8b", slots=SLOTS, budget=BUDGET)
    requests = generate(1500, seed=0, prompt=Uniform(512), output=LogNormal(1024, 1.2), clients=160)
    given = {"cost": engine.cost} | ({"budget": BUDGET} if name == "eb+" else {})
    policy = BATCH[name](slots=SLOTS, **given)
    run = simulate(engine, policy, requests)
    output = requests.output.astype(float)
    true = 512 + (output**2).mean() / (2 * output.mean())
    lengths = getattr(policy, "exclusive", policy).lengths
    assert lengths.context == pytest.approx(true, rel=0.25)
    assert run.completed().all()


def test_eb_plus_is_near_its_better_half():
    engine = card_engine("cal-h200-qwen3-8b", slots=SLOTS, budget=BUDGET)
    for prompt, sigma in ((512, 1.2), (256, 1.5), (1024, 0.8)):
        requests = generate(1500, seed=1, prompt=Uniform(prompt), output=LogNormal(700, sigma), clients=160)
        rates = {}
        for name in ("mixed", "eb-online", "eb+"):
            given = {} if name == "mixed" else {"cost": engine.cost}
            given |= {} if name == "eb-online" else {"budget": BUDGET}
            run = simulate(engine, BATCH[name](slots=SLOTS, **given), requests)
            rates[name] = summarise(run).request_rate.value
        assert rates["eb+"] >= 0.985 * max(rates.values()), (prompt, sigma, rates)
