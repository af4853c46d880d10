"""vLLM's real scheduler under a policy takes the simulator's steps, one by one, at the same times."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual import Step, Virtual

from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from worlds import POLICIES, TESTING, Batch, Line, batches, engines, workloads

# Not `timed`: it names prompts that get no slot. The simulator lets decodes wait for them, as the plan says;
# a live engine rescues them.
MAKE = POLICIES | {name: TESTING[name] for name in ("every-other", "evicting")}
# Binary fractions: sums of times are exact, so that equal means equal.
PRICES = Line(fixed=1.0, prefill=1 / 64, decode=1 / 16, context=1 / 1024, behind=1 / 2048)


@st.composite
def worlds(draw: st.DrawFn, roomy: bool) -> tuple[Engine, Workload]:
    """A world whose requests all fit; with room enough that nobody is ever evicted, or as it comes."""
    engine: Engine = draw(engines())
    engine = engine._replace(cost=PRICES, max_model_len=min(200, engine.longest))
    workload: Workload = draw(workloads(promised=True))
    if roomy:
        engine = engine._replace(kv_tokens=engine.running * 256, max_model_len=256)
    columns = {"limit": np.minimum(workload.limit, engine.longest)}  # vLLM knows no more
    columns |= {"kind": workload.kind, "kinds": workload.kinds, "priority": np.zeros(len(workload), int)}
    if workload.closed:
        columns["clients"] = workload.clients
    else:
        columns["arrival"] = np.round(workload.arrival * 64) / 64
    return engine, Workload.of(np.minimum(workload.prompt, engine.longest - 1), workload.output, **columns)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("roomy", [True, False], ids=["room for all", "memory short"])
@given(data=st.data())
def test_same_steps_at_the_same_times(name, roomy, data):
    engine, workload = data.draw(worlds(roomy=roomy))
    policy = MAKE[name](data.draw, engine)
    theirs = Virtual(engine, copy.deepcopy(policy), workload).run()
    ours = simulated(batches(engine, policy, workload))
    assert theirs == ours


def simulated(found: list[Batch]) -> list[Step]:
    """The simulator's batches, step by step."""
    steps = []
    for batch in found:
        start, decodes = batch.start, tuple(sorted(id for id, _ in batch.decodes))
        for end in batch.ends:
            steps.append(Step(start, float(end), decodes, batch.chunks))
            start = float(end)
    return steps
