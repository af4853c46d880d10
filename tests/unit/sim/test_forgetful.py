"""An engine that forgets: what is lost is brought again, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.experiment.library import simulate
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import EVERYTHING
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.workload import Workload
from headgate_papers.kv_linear import kv_linear
from worlds import POLICIES, Evicting, Log, engines, workloads

ENGINE = Engine(kv_linear(1.0, 0.0, 0.0), 1000, 1000, 100, 8, 1)


@pytest.mark.parametrize(("lost", "steps"), [(0, 6), (1, 7), (2, 8), (EVERYTHING, 9)])
def test_what_is_lost_is_brought_again(lost, steps):
    """One request of six tokens, thrown out after its third: a step for each token that is lost."""
    work = Workload.of([4], [6], arrival=np.zeros(1))
    run = simulate(ENGINE, Evicting(), work, lost=lost)
    assert run.requests["finished"][0] == steps
    assert run.requests["output"][0] == 6
    assert run.requests["evictions"][0] == 1
    assert run.requests["wasted"][0] == 6  # the KV of four and two tokens, whatever is lost
    assert run.requests["first_token"][0] == 1  # what its user has seen stays seen


def test_a_prompt_that_is_evicted_half_way_loses_nothing_more():
    """Four slots grow into 26 tokens: whoever is thrown out in the middle of its prompt has no new token."""
    work = Workload.of([3] * 6, [9] * 6, arrival=np.zeros(6))
    engine = ENGINE._replace(kv_tokens=26, batch_tokens=4, running=4)
    runs = [simulate(engine, Mixed(4, 4), work, lost=lost) for lost in (0, 1, EVERYTHING)]
    assert all((run.requests["output"] == 9).all() for run in runs)
    ends = [run.requests["finished"].max() for run in runs]
    assert ends == sorted(ends) and ends[0] < ends[2]


@pytest.mark.parametrize(
    ("words", "says"), [({"lost": -1}, "0 or more"), ({"lost": 1, "asynchronous": True}, "one of")]
)
def test_what_no_engine_can_lose(words, says):
    with pytest.raises(InputError, match=says):
        simulate(ENGINE, Mixed(4, 4), Workload.of([4], [6]), **words)


@pytest.mark.parametrize("name", ["mixed", "nested-wait"])
@given(data=st.data(), engine=engines(), workload=workloads(), lost=st.sampled_from([1, 2, EVERYTHING]))
@settings(max_examples=30)
def test_everybody_has_its_whole_output_in_the_end(name, data, engine, workload, lost):
    """As long as one fits alone, which the engine sees to; books of KV add up again."""
    simulator = Simulator(engine, POLICIES[name](data.draw, engine), workload, (log := Log(),), lost=lost)
    simulator.run()
    finished = [event for event in log.events if event[0] == "finished"]
    assert len(finished) == len(workload)
    for _, id, _, how, generated, _ in finished:
        if how is not End.REFUSED:
            room = engine.longest - int(workload.prompt[id])
            assert generated == min(int(workload.output[id]), int(workload.limit[id]), room)
    assert simulator.replica.blocks.free == simulator.replica.blocks.total
