"""WAIT and Nested WAIT at their limits: a block of memory, pauses of days, absurd thresholds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.policy import BatchPolicy
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Kind, Workload
from worlds import PRICES, TILES, Line, run

KINDS = [Kind(name) for name in ("a", "b", "c", "never seen")]
WAIT = ("", "1000", "0.001", "1", "a=5+never seen=0.2", "7.5")
NESTED = (
    ("", ""),
    ("0", "1000"),
    ("0/1/2/3", "1000/500/0.01/0.001"),
    ("3/1000", "0.3/40"),
    ("1/4", ""),
)


@st.composite
def bursts(draw: st.DrawFn) -> Workload:
    """Silence for up to days, then many at once, of one type or three; some prompts fit nowhere."""
    count, kinds = draw(st.integers(1, 30)), draw(st.sampled_from([1, 3]))

    def column(elements):
        return draw(st.lists(elements, min_size=count, max_size=count))

    gaps = column(st.sampled_from([0.0, 0.0, 0.0, 0.01, 5.0, 1e4, 1e6]))
    columns = {"arrival": np.cumsum(gaps), "kind": column(st.integers(0, kinds - 1)), "kinds": KINDS}
    if draw(st.booleans(), label="predicted"):
        columns["guess"] = column(st.sampled_from([-1, 1, 5, 200]))
    if draw(st.booleans(), label="impatient"):
        columns["patience"] = column(st.sampled_from([np.inf, 0.0, 0.5, 20.0]))
        columns["abort"] = column(st.sampled_from([np.inf, np.inf, 0.0, 3.5]))
    prompts, outputs = st.sampled_from([1, 2, 7, 40, 90, 500]), st.sampled_from([1, 2, 9, 40])
    return Workload.of(column(prompts), column(outputs), **columns)


@st.composite
def tight(draw: st.DrawFn) -> Engine:
    """From one block of memory on."""
    block, running = draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from([1, 2, 5, 40]))
    return Engine(
        draw(st.sampled_from([Line(), PRICES, TILES])),
        draw(st.sampled_from([block, 2 * block, 17, 33, 64, 130])),
        draw(st.sampled_from([20, 100, 10_000])),
        max(running, draw(st.integers(1, 64))),
        running,
        block,
    )


@st.composite
def waits(draw: st.DrawFn, name: str) -> BatchPolicy:
    """Patience of nothing, or of minutes; thresholds nobody will reach, or learned from a single request."""
    words = {
        "split": draw(st.sampled_from(["none", "kind", "prompt:3", "prompt:10/30", "output:4/9"])),
        "max_pause": draw(st.sampled_from([0.0, 1e-9, 0.3, 500.0])),
        "max_wait": draw(st.sampled_from([0.0, 1e-9, 2.0])),
        "window": draw(st.sampled_from([1, 3, 1000])),
        "warm": draw(st.sampled_from([1, 2, 5])),
        "review": draw(st.sampled_from([1, 3, 200])),
    }
    if name == "wait":
        words["thresholds"] = draw(st.sampled_from(WAIT))
    else:
        words["ends"], words["thresholds"] = draw(st.sampled_from(NESTED))
        words["segments"] = draw(st.sampled_from([1, 2, 50]))
        words["slack"] = draw(st.sampled_from([0.0, 0.05, 100.0]))
    return BATCH[name](slots=draw(st.sampled_from([1, 2, 50])), cost=PRICES, **words)


@pytest.mark.parametrize("name", ["wait", "nested-wait"])
@settings(max_examples=40)
@given(data=st.data(), engine=tight(), workload=bursts())
def test_everybody_is_served_and_leases_change_nothing(name, data, engine, workload):
    policy = data.draw(waits(name))
    leased = run(engine, copy.deepcopy(policy), workload)
    asked = run(engine, policy, workload, leases=False)
    assert (leased.steps, leased.events) == (asked.steps, asked.events)
    assert sum(event[0] == "finished" for event in leased.events) == len(workload)
