"""`headgate trace`: the trace of a live engine becomes a run folder and the usual table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headgate.core.request import Slo
from headgate.experiment.library import card_engine
from headgate.live.engine.trace import Trace
from headgate.methods.eb.exclusive import Exclusive
from headgate.record.tables import Run
from headgate.sim.engine.simulator import Simulator
from headgate.workloads import Workload
from headgate.workloads.workload import Kind

HEADER = {"policy": "eb", "driver": "vllm", "kv_tokens": 50_000, "model": "m"}


@pytest.fixture
def trace(tmp_path):
    """A trace as a live engine would have written it, t.jsonl."""
    trace = Trace(tmp_path / "t.jsonl", HEADER, background=False)
    engine = card_engine("linear-h200-qwen3-8b", slots=8, budget=512)
    Simulator(engine, Exclusive(8, 3), Workload.of([300] * 30, [10, 40] * 15), (trace,)).run()
    trace.fell_back("it broke", 0.5)
    trace.renewed("v0", {}, 0.75)
    trace.close()
    return trace.path


def test_a_folder_and_a_table(headgate, trace, tmp_path):
    said = headgate("trace", "t.jsonl", "--out", "live", "--json", "t.json")
    assert said.code == 0 and "eb on vLLM, 30 requests" in said.out and "TTFT" in said.out
    assert "note: the policy was disabled at 0.5 s: it broke" in said.out
    assert "note: policy v0 took over at 0.8 s" in said.out
    assert json.loads((tmp_path / "t.json").read_text())["completed"] == 30
    run = Run.load(tmp_path / "live")
    assert run.meta["driver"] == "vllm" and len(run.requests["id"]) == 30
    assert (tmp_path / "live" / "bench.json").is_file()
    said = headgate("trace", "t.jsonl", "--json", "-")
    assert said.code == 0 and json.loads(said.out)["completed"] == 30
    assert "run folder: runs/0001-trace-t" in said.err


def test_promised_gaps_are_said_to_be_the_engines(headgate, trace, tmp_path):
    assert "promised gaps" not in headgate("trace", "t.jsonl").out
    trace = Trace(tmp_path / "p.jsonl", HEADER, background=False)
    engine, promised = card_engine("linear-h200-qwen3-8b", slots=8, budget=512), Kind("chat", Slo(1.0, 0.08))
    requests = replace(Workload.of([300] * 30, [10, 40] * 15), kinds=(promised,))
    Simulator(engine, Exclusive(8, 3), requests, (trace,)).run()
    trace.close()
    said = " ".join(headgate("trace", "p.jsonl").out.split())
    assert "note: promised gaps are the engine's: what clients are promised less --delivery (20 ms" in said


def test_one_that_was_cut_off(headgate, trace):
    text = trace.read_bytes()
    trace.write_bytes(text[: len(text) // 2])
    said = headgate("trace", "t.jsonl")
    assert said.code == 0 and "note: the trace is cut off with" in said.out


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["none.jsonl"], "trace none.jsonl: No such file or directory; give a readable file"),
        (["."], "trace .: Is a directory"),
        (["other.jsonl"], "is no trace of a live engine; give a file that headgate serve --trace wrote"),
        (["t.jsonl", "--detailed"], "--detailed is about --json"),
        (["t.jsonl", "--overwrite"], "--overwrite without --out"),
    ],
)
def test_refused(refused, trace, tmp_path, args, fragment):
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    refused(["trace", *args], fragment)


def test_a_trace_can_be_reported(headgate, trace, tmp_path):
    said = headgate("report", "t.jsonl", "--out", "live.html")
    assert said.code == 0, said
    assert "Phases over time" in (tmp_path / "live.html").read_text(encoding="utf-8")
