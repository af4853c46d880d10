"""The fluid path: it starts empty, keeps its books, and ends at the plan."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.fluid.path import fluid_path, mean
from headgate_papers.fluid.published import two_classes


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_it_ends_at_the_plan(rate):
    plan = plan_fluid(two_classes(rate))
    path = fluid_path(plan, 400.0, step=0.02)
    last = [getattr(path, name)[-1] for name in ("waiting", "decoding")]
    assert last[0].sum() == pytest.approx(sum(plan.waiting), abs=0.02)
    assert last[1] == pytest.approx(np.add(plan.mixed, plan.solo), rel=0.01)
    assert path.prefilling[-1] == pytest.approx(plan.prefill, rel=0.03)


def test_it_never_takes_more_than_there_is():
    plan = plan_fluid(two_classes(0.9))
    path = fluid_path(plan, 60.0, step=0.02)
    pace = plan.instance.pace
    slots = pace.slots * (1 - sum(plan.prefill)) + (pace.slots - 1) * sum(plan.prefill)
    assert (path.prefilling <= np.array(plan.prefill) + 1e-9).all()
    assert (path.decoding.sum(axis=1) <= slots + 1e-9).all()
    assert (np.diff(path.decoding.sum(axis=1)[:500]) > 0).all()  # it fills from nothing
    assert mean(path, "decoding", 0.0, 1.0).sum() < mean(path, "decoding", 30.0, 31.0).sum()


def test_half_the_step_is_the_same_path():
    plan = plan_fluid(two_classes())
    coarse, fine = (fluid_path(plan, 30.0, step) for step in (0.02, 0.01))
    for name in ("waiting", "decoding"):
        found, wanted = (mean(each, name, 20.0, 30.0) for each in (coarse, fine))
        assert found == pytest.approx(wanted, rel=0.01, abs=1e-3)


def test_steps_longer_than_a_prompt_prefill_no_less():
    plan = plan_fluid(two_classes())
    long = 2 * min(plan.instance.seconds())
    coarse, fine = (fluid_path(plan, 60.0, step) for step in (long, 0.01))
    for name in ("prefilling", "decoding"):
        found, wanted = (mean(each, name, 40.0, 60.0) for each in (coarse, fine))
        assert found == pytest.approx(wanted, rel=0.02)
