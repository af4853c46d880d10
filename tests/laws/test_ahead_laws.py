"""An engine that composes ahead serves everybody under every policy, and its books balance."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.cost.host import HostTerms
from headgate.cost.work import WorkCost, WorkTerms
from headgate.drivers.simulator import Simulator
from headgate.results.gaps import Gaps
from headgate.results.recorder import Recorder
from headgate.results.tables import Run
from worlds import POLICIES, Log, engines, workloads

GPU = WorkTerms(constant=0.4, per_token=0.01, per_decode=0.02, per_context=0.001, switch=0.1)
HOST = HostTerms(constant=0.2, per_request=0.05, prompts=0.5, ungraphed=2.0, graph=24)


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=15)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True), hosted=st.booleans())
def test_everybody_is_served_or_leaves(name, data, engine, workload, hosted):
    if hosted:
        engine = engine._replace(cost=WorkCost(GPU, HOST))
    policy = POLICIES[name](data.draw, engine)
    again = copy.deepcopy(policy)
    log, recorder = Log(), Recorder(len(workload), [kind.name for kind in workload.kinds])
    simulator = Simulator(engine, policy, workload, (log, recorder), asynchronous=True)
    simulator.run()
    assert sum(event[0] == "finished" for event in log.events) == len(workload)
    ends = [step[0] for step in log.steps]
    assert ends == sorted(ends)
    assert max(log.kv, default=0) <= engine.kv_tokens
    blocks = simulator.replica.blocks
    assert (blocks.free, sum(blocks.growers)) == (blocks.total, 0)
    _tokens_are_booked(Run({}, **recorder.tables()))
    second = Log()
    Simulator(engine, again, workload, (second,), asynchronous=True).run()
    assert (second.steps, second.events) == (log.steps, log.events)


def _tokens_are_booked(run):
    """A gap for every token but the first, none before it, the last when the request left."""
    requests = run.requests
    for place, gaps in enumerate(Gaps(run).lists()):
        output, first = requests["output"][place], requests["first_token"][place]
        assert len(gaps) == max(0, output - 1)
        assert all(gap >= 0 for gap in gaps)
        if output and requests["how"][place] in (0, 1):  # it had all its tokens
            assert np.isclose(first + sum(gaps), requests["finished"][place])
