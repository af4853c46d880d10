"""Every policy on engines with a prefix cache: everybody is served, memory adds up, leases change nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.policy import End
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.contents import Contents
from headgate.workloads.workload import Workload
from worlds import POLICIES, Line, Log, engines


@st.composite
def sharing(draw: st.DrawFn) -> Workload:
    """Few system prompts and conversations, so that most requests share something."""
    count = draw(st.integers(2, 20), label="requests")
    row = st.tuples(st.integers(0, 2), st.sampled_from([0, 4, 17]), st.integers(3, 6), st.integers(1, 40))
    drawn = draw(st.lists(row, min_size=count, max_size=count))
    rows = [[(a, n), (-1 if b == 6 else b, m)] for a, n, b, m in drawn]
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 1.7, 30.0]), min_size=count, max_size=count))
    outputs = draw(st.lists(st.sampled_from([1, 2, 9, 40]), min_size=count, max_size=count))
    prompts = [n + m for _, n, _, m in drawn]
    return Workload.of(prompts, outputs, arrival=np.cumsum(gaps), contents=Contents.of(rows))


def served(engine, policy, workload, **options):
    simulator = Simulator(engine, policy, workload, (log := Log(),), **options)
    simulator.run()
    blocks = simulator.replica.blocks
    assert blocks.free == blocks.total
    return log


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), engine=engines(), workload=sharing())
def test_everybody_is_served_and_leases_change_nothing(name, data, engine, workload):
    engine = engine._replace(cost=Line())
    policy = POLICIES[name](data.draw, engine)
    fast = served(engine, copy.deepcopy(policy), workload)
    ends = {event[1] for event in fast.events if event[0] == "finished"}
    assert ends == set(range(len(workload)))
    assert all(event[3] is not End.ABORTED for event in fast.events if event[0] == "finished")
    slow = served(engine, copy.deepcopy(policy), workload, leases=False)
    assert fast.steps == slow.steps


@pytest.mark.parametrize("name", ["mixed", "keep", "eb"])
@given(data=st.data(), engine=engines(), workload=sharing())
def test_asynchronous_engines_serve_everybody(name, data, engine, workload):
    engine = engine._replace(cost=Line())
    log = served(engine, POLICIES[name](data.draw, engine), workload, asynchronous=True)
    assert {event[1] for event in log.events if event[0] == "finished"} == set(range(len(workload)))
