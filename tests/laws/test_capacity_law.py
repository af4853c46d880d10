"""No policy serves faster than the bound: the law that makes λ* worth drawing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headgate.methods.bounds import Requests, engine_bound, ideal_bound
from worlds import POLICIES, PRICES, TILES, engines, run, workloads

COSTS = {"lines": PRICES, "tiles": TILES}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=12)
@given(data=st.data(), engine=engines(), workload=workloads())
def test_no_policy_beats_the_bound(name, cost, data, engine, workload):
    engine = engine._replace(cost=COSTS[cost])
    workload = workload if workload.closed else workload.all_at_once()  # never idle
    fits = workload.prompt < engine.longest
    assume(fits.any())
    outputs = np.minimum(np.minimum(workload.output, workload.limit), engine.longest - workload.prompt)[fits]
    log = run(engine, POLICIES[name](data.draw, engine), workload)
    lengths = Requests.of(workload.prompt[fits], outputs - 1)
    limits = engine.running, engine.batch_tokens, engine.kv_tokens
    least = len(outputs) * engine_bound(engine.cost, lengths, *limits).seconds
    ends = [step[0] for step in log.steps]
    assert ends[-1] >= least * (1 - 1e-9)
    assert len(outputs) * ideal_bound(engine.cost, lengths, *limits).seconds <= least * (1 + 1e-9)
