"""Every policy on engines with a prefix cache: everybody is served, memory adds up, leases change nothing."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.policy import End
from headgate.sim.engine.simulator import Simulator
from worlds import POLICIES, Line, Log, engines, sharing


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
