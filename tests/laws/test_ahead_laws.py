"""An engine that composes ahead serves everybody under every policy, and its books balance."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.record.recorder import Recorder
from headgate.record.tables import Run
from headgate.sim.engine.asynchronous import Ahead
from headgate.sim.engine.engine import NEWEST, SHORTEST
from headgate.sim.engine.simulator import Simulator
from headgate.stats.gaps import Gaps
from worlds import POLICIES, TESTING, Log, engines, workloads

GPU = WorkTerms(constant=0.4, per_token=0.01, per_decode=0.02, per_context=0.001, switch=0.1)
HOST = HostTerms(constant=0.2, per_request=0.05, prompts=0.5, ungraphed=2.0, graph=24)
ALL_OF_THEM = POLICIES | TESTING


@pytest.mark.parametrize("name", list(ALL_OF_THEM))
@settings(max_examples=15)
@given(
    data=st.data(),
    engine=engines(),
    workload=workloads(impatient=True, promised=True),
    hosted=st.booleans(),
    retraction=st.sampled_from([NEWEST, SHORTEST]),
)
def test_everybody_is_served_or_leaves(name, data, engine, workload, hosted, retraction):
    engine = engine._replace(retraction=retraction)
    if hosted:
        engine = engine._replace(cost=WorkCost(GPU, HOST))
    policy = ALL_OF_THEM[name](data.draw, engine)
    again = copy.deepcopy(policy)
    log, recorder = Log(), Recorder([kind.name for kind in workload.kinds])
    simulator = Simulator(engine, policy, workload, (log, recorder), kind=Dated)
    simulator.run()
    assert sum(event[0] == "finished" for event in log.events) == len(workload)
    ends = [step[0] for step in log.steps]
    assert ends == sorted(ends)
    assert max(log.kv, default=0) <= engine.kv_tokens
    blocks = simulator.replica.blocks
    assert (blocks.free, sum(blocks.growers)) == (blocks.total, 0)
    run = Run({}, **recorder.tables())
    _tokens_are_booked(run)
    _steps_do_not_overlap(run)
    second = Log()
    Simulator(engine, again, workload, (second,), asynchronous=True).run()
    assert (second.steps, second.events) == (log.steps, log.events)


@pytest.mark.parametrize("name", list(ALL_OF_THEM))
@settings(max_examples=25)
@given(
    data=st.data(),
    engine=engines(),
    workload=workloads(impatient=True, promised=True),
    hosted=st.booleans(),
    retraction=st.sampled_from([NEWEST, SHORTEST]),
)
def test_leases_and_asking_at_every_step_agree(name, data, engine, workload, hosted, retraction):
    engine = engine._replace(retraction=retraction)
    if hosted:
        engine = engine._replace(cost=WorkCost(GPU, HOST))
    policy = ALL_OF_THEM[name](data.draw, engine)
    logs = []
    for leases in (True, False):
        log = Log()
        each = copy.deepcopy(policy)
        Simulator(engine, each, workload, (log,), leases=leases, asynchronous=True).run()
        logs.append(log)
    leased, asked = logs
    assert leased.steps == asked.steps
    assert leased.events == asked.events
    assert len(leased.plans) <= len(asked.plans)


def _tokens_are_booked(run):
    """A gap for every token but the first, none before it, the last when the request left."""
    requests = run.requests
    for place, gaps in enumerate(Gaps(run).lists()):
        output, first = requests["output"][place], requests["first_token"][place]
        assert len(gaps) == max(0, output - 1)
        assert all(gap >= 0 for gap in gaps)
        if output and requests["how"][place] in (0, 1):  # it had all its tokens
            assert np.isclose(first + sum(gaps), requests["finished"][place])


def _steps_do_not_overlap(run):
    """Each is seen from the end of the one before it, or from its composing, to its own end."""
    start, seconds = run.steps["start"], run.steps["seconds"]
    assert (seconds >= 0).all()
    assert (start[1:] >= (start + seconds)[:-1] - 1e-9).all()


class Dated(Ahead):
    """After every step: a newest token has the time at which it was seen, or is of the step on its way."""

    def settle(self):
        super().settle()
        ledger, air = self.ledger, self._air
        if not hasattr(self, "dates"):
            self.dates = set()
        self.dates.add(self.now)
        for entry in (*ledger.waiting.values(), *ledger.decoding.values(), *ledger.prefilling.values()):
            last = entry.last_token
            assert last is None or last <= self.now
            assert last is None or last in self.dates or (air is not None and last == air.date)
