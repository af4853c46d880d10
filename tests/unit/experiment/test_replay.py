"""A live trace replays with the hits its engine had, though it does not say what requests share."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headgate
from headgate.advisor.capacity.traffic import make_traffic
from headgate.core.errors import InputError
from headgate.experiment.build import make_workload
from headgate.experiment.settings import experiment
from headgate.live.engine.trace import Trace
from headgate.workloads.sessions import SharedPrefix, as_sessions
from headgate.workloads.workload import Contents, Workload

ENGINE = headgate.card_engine("cal-h200-qwen3-8b", slots=16)
HEADER = {"headgate": "0", "policy": "mixed", "parameters": {}, "card": None, "kv_tokens": 100}


def traced(workload: Workload, path, **options):
    trace = Trace(path, HEADER, background=False)
    run = headgate.simulate(ENGINE, "mixed", workload, observers=(trace,), **options)
    trace.close()
    return run


def test_more_requests_than_rows_are_drawn_from_them_as_searches_draw():
    own = {"trace": "azure-conv", "requests": 6000, "seed": 3}
    words = experiment({**own, "rate": 8.4})
    workload, _ = make_workload(words)
    (said,) = (remark for remark in workload.remarks if "drawn" in remark)
    assert said == "6,000 requests are drawn from 3,118 rows with replacement; prompts share nothing"
    traffic = make_traffic(experiment(own), (), None, 1, False, ENGINE)
    assert workload == traffic.at(8.4, 3)
    assert len(make_workload(words.model_copy(update={"rate": None, "clients": 9}))[0]) == 6000
    with pytest.raises(InputError, match="has 3118; ask for fewer, drop it, or give --rate"):
        make_workload(experiment(own))


def test_a_live_trace_replays_with_its_hits(tmp_path):
    drawn = headgate.Workload.of([150] * 60, [40] * 60, arrival=np.arange(60) / 4.0)
    chat = as_sessions(drawn, seed=1, turns=3.0, think=5.0, prefixes=[SharedPrefix(512, 2)])
    first = traced(chat, tmp_path / "live.jsonl", asynchronous=False)
    words = experiment({"trace": str(tmp_path / "live.jsonl")})
    again, bad = make_workload(words)
    assert bad.count == 0 and again.contents is None
    assert again.cached.sum() == first.requests["cached"].sum() > 0
    second = headgate.simulate(ENGINE, "mixed", again, asynchronous=False)
    for column in ("prompt", "output", "cached"):
        assert np.array_equal(first.requests[column], second.requests[column])
    for column in ("prefill", "behind", "decodes"):
        assert np.array_equal(first.steps[column], second.steps[column])
    start = first.requests["arrival"][0]
    assert second.requests["finished"] == pytest.approx(first.requests["finished"] - start)
    without = headgate.simulate(ENGINE._replace(prefix_cache=False), "mixed", again, asynchronous=False)
    assert not without.requests["cached"].any()


def test_recorded_hits_take_memory_and_are_lost_with_an_eviction(tmp_path):
    """Two prompts of 64 tokens with 32 found, outputs of 40, 9 blocks of 16: only one can stay to its end."""
    engine = ENGINE._replace(kv_tokens=9 * 16, max_model_len=128)
    workload = headgate.Workload.of([64, 64], [40, 40], cached=[32, 32])
    run = headgate.simulate(engine, "mixed", workload, asynchronous=False)
    assert run.requests["cached"].tolist() == [32, 32]
    assert run.requests["evictions"].sum() == 1
    assert run.steps["kv"].max() <= 9 * 16
    computed = int((run.steps["prefill"] * run.steps["count"]).sum())
    lost = run.requests["wasted"].sum()
    assert computed == 32 + 32 + lost + 1  # all that was held, and the token that was not yet computed


def test_contents_win_over_recorded_hits():
    pieces = Contents.of([[(1, 64)], [(1, 64)]])
    workload = headgate.Workload.of([64, 64], [2, 2], arrival=[0, 9], cached=[32, 16], contents=pieces)
    assert headgate.simulate(ENGINE, "mixed", workload).requests["cached"].tolist() == [0, 48]


@pytest.mark.parametrize("cached", [64, -1])
def test_a_hit_leaves_a_token_to_compute(cached):
    with pytest.raises(InputError, match="cached at row 0"):
        headgate.Workload.of([64], [2], cached=[cached])


def test_a_routers_trace_brings_its_hits(tmp_path):
    row = {"route": 1, "class": "", "arrival": 0.0, "prompt": 100, "replay_output": 5, "cached": 64}
    path = tmp_path / "route.jsonl"
    rows = ({**row, "class": "a"}, {**row, "class": "a", "arrival": 1.0, "cached": 0})
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found, _ = make_workload(experiment({"trace": str(path)}))
    assert found.cached.tolist() == [64, 0]
    path.write_text(json.dumps({**row, "class": "a", "cached": "many"}) + "\n")
    with pytest.raises(InputError, match=r"route.jsonl:1: cached is"):
        make_workload(experiment({"trace": str(path)}))


def test_conversations_are_under_way_when_a_run_begins():
    """Each lasts 120 s, the whole run 100 s: drawn from nothing, a third of the turns would come later."""
    words = {"rate": 10.0, "requests": 1000, "turns": 5.0, "think": "30s", "prompt": 50, "output": 50}
    found, _ = make_workload(experiment(words))
    assert len(found) == 1000 and found.arrival[0] == 0
    tenths = np.histogram(found.arrival, 10)[0]
    assert found.arrival[-1] == pytest.approx(100, rel=0.15) and tenths.min() > 60 and tenths.max() < 140
    first, last = found.prompt[:200].mean(), found.prompt[-200:].mean()
    assert first == pytest.approx(last, rel=0.3) and first > 150  # what was said before the run counts
