"""The fast engine against one that touches every running request at every step."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plain import PlainEngine
from worlds import POLICIES, TESTING, Log, engines, run, workloads

MAKE = POLICIES | TESTING


@pytest.mark.parametrize("name", list(MAKE))
@given(data=st.data(), engine=engines(), workload=workloads())
def test_same_schedule_as_the_plain_engine(name, data, engine, workload):
    policy = MAKE[name](data.draw, engine)
    fast = run(engine, copy.deepcopy(policy), workload)
    plain = Log()
    PlainEngine(engine, copy.deepcopy(policy), workload, (plain,)).run()
    assert fast.steps == plain.steps
    assert fast.events == plain.events
    assert fast.kv[-1:] == plain.kv[-1:]
    assert max(fast.kv, default=0) == max(plain.kv, default=0)
