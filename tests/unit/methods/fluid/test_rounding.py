"""Rounding of the solver is not a loss: a class served in full is not throttled, whatever its rate."""

from __future__ import annotations

import numpy as np
import pytest

from fluid_worlds import instance
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.planner import plan_fluid

INSTANCES = 1000


def random_instance(seed: int) -> tuple[Instance, float]:
    """Two to six classes at a load far below or above capacity; and that load."""
    draw = np.random.default_rng(seed)
    classes = int(draw.integers(2, 7))
    sizes = tuple((float(p), float(o)) for p, o in draw.integers(20, 4000, (classes, 2)))
    rates = draw.dirichlet(np.ones(classes)) * 10 ** draw.uniform(-4, 0.5)
    prices = (float(draw.uniform(0.01, 1)), float(draw.uniform(0.01, 1)))
    impatience = tuple(draw.choice([0.0, 0.02, 0.1], classes).tolist())
    charging = str(draw.choice(["bundled", "separate"]))
    found = instance(*rates.tolist(), sizes=sizes, impatience=impatience, prices=prices, charging=charging)
    busy = sum(rate * seconds for rate, seconds in zip(rates, found.seconds(), strict=True))
    tokens = sum(rate * size[1] for rate, size in zip(rates, sizes, strict=True))
    return found, max(busy, tokens / (found.pace.slots / found.pace.mixed_step))


def test_classes_served_in_full_are_not_throttled():
    light = 0
    for seed in range(INSTANCES):
        made, load = random_instance(seed)
        plan = plan_fluid(made)
        for flow, served, loss, throttled in zip(
            made.flows, plan.prompts, plan.prefill_loss, plan.throttled, strict=True
        ):
            assert served + loss == pytest.approx(flow.rate, rel=1e-5), (seed, flow.name)
            assert throttled == (served < flow.rate * (1 - 2e-6)), (seed, flow.name)
        if load < 0.3:
            light += 1
            assert not any(plan.throttled), seed
            assert all(waiting == 0 for waiting in plan.waiting), seed
    assert light > INSTANCES / 3
