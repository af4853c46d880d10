"""The eight first tasks of a new user: what the answers must say, not how they look."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data"
SETUP = "Card cal-h200-qwen3-8b (Qwen3-8B on NVIDIA H200), asynchronous engine, 256 slots"
QUICK = ("--seeds", 1, "--jobs", 1, "--precision", 0.1)


@pytest.fixture
def told(headgate):
    """Runs a command; its output on one line, once it left with the expected code."""

    def run(*args: object, code: int = 0) -> str:
        said = headgate(*args)
        assert said.code == code, said
        return " ".join((said.out if code == 0 else said.err).split())

    return run


@pytest.fixture
def own_csv(tmp_path):
    """Columns of any name, milliseconds since 1970, two tenants."""
    draw, at, rows = random.Random(3), 1_763_300_000_000, ["when,tenant,in_tok,out_tok,region"]
    for place in range(240):
        at += int(draw.expovariate(1 / 150))
        tenant = "paid" if place % 3 else "free"
        rows.append(f"{at},{tenant},{draw.randint(50, 3000)},{draw.randint(5, 200)},eu")
    (tmp_path / "mine.csv").write_text("\n".join(rows) + "\n")
    return "mine.csv"


def test_own_csv(told, own_csv):
    refusal = told("compare", "--trace", own_csv, "--policy", "mixed", "--policy", "slai", code=2)
    assert (
        "which column is which with --columns arrival=when,prompt=in_tok,output=out_tok,tenant=tenant;"
        in refusal
    )
    assert "it has when, tenant, in_tok, out_tok, region" in refusal
    columns = "arrival=when,prompt=in_tok,output=out_tok,class=tenant"
    words = ("--trace", own_csv, "--columns", columns, "--tpot", "50ms")
    said = told("compare", *words, "--policy", "mixed", "--policy", "slai", "--ttft", "500ms")
    assert SETUP in said and "arrivals as recorded." in said
    assert "arrivals are read as dates, milliseconds since 1970" in said
    assert said.count("columns that are not read and change nothing: region") == 1
    assert "By class" in said and "free mixed" in said and "paid mixed" in said and "goodput" in said
    assert (
        "No policy is seen to serve more requests than mixed" in said and "report: runs/0001-compare" in said
    )
    assert "500ms or 500s" in told("compare", *words, "--ttft", "500", code=2)


def test_mooncake(told, tmp_path):
    trace = DATA / "mooncake_conversation_head.jsonl"
    said = told("simulate", "--trace", trace)
    assert "Cannot be served: 5 of 20 requests (25 %) have prompts of 17,408 tokens or more" in said
    assert "raise --model-len (vLLM: --max-model-len)" in said and "Prefix cache" in said
    longer = told("simulate", "--trace", trace, "--model-len", 131072, "--out", "longer")
    assert "Cannot be served" not in longer and "131,072 tokens a request at most" in longer
    rows = (
        json.dumps({"timestamp": 3000 * (place // 20), "input_length": 2000, "output_length": 50})
        for place in range(400)
    )
    (tmp_path / "ticks.jsonl").write_text("\n".join(rows))
    ticks = told("simulate", "--trace", "ticks.jsonl", "--out", "ticked")
    assert "arrivals come in ticks of 3 s, 20 at once; they are spread over their tick" in ticks


def test_fewest_engines(told):
    promise = ("--slo", "ttft=500ms@p95", *QUICK, "--requests", 500)
    load = ("--trace", "azure-conv", "--scale-rate", 8)
    said = told("plan", "capacity", "--find", "engines", *load, *promise)
    assert "41.59 requests/s" in said and "No fleet of fewer than 2 keeps up" in said
    assert "2 engines are enough with least-loaded + mixed, as few as any fleet can have." in said
    assert "(Qwen3-8B on NVIDIA H200), asynchronous engines (tokens seen at once)" in said
    few = told("plan", "capacity", "--find", "engines", *load, *promise, "--most-engines", 1, code=2)
    assert "need at least 2 engines, more than --most-engines 1" in few


def test_a_model_without_a_card(told):
    wrong = told("serve", "meta-llama/Llama-3.1-70B", "--card", "cal-h200-qwen3-8b", "--dry-run", code=2)
    assert (
        "is of another model (Qwen3-8B)" in wrong and "headgate calibrate meta-llama/Llama-3.1-70B" in wrong
    )
    said = told("serve", "meta-llama/Llama-3.1-70B", "--dry-run")
    assert "policy keep (auto), no card: it learns step times while it serves" in said
    assert "vllm serve meta-llama/Llama-3.1-70B --scheduler-cls headgate.vllm.scheduler" in said
    card = "derived:llama-3.1-70b@h100-sxm:tp4"
    load = ("--prompt", 800, "--output", 100, "--rate", 6, "--requests", 120, "--policy", "mixed")
    found = told("advise", "--card", card, *load, "--slo", "ttft=1s@p95", *QUICK, "--cache", "none")
    assert "derived, throughput ±15 %" in found and "load of 6.000 requests/s: 1 engine (4 GPUs)" in found
    line = "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4"
    assert line in found.replace("\\ ", "") and "--max-model-len 131072 --max-num-seqs" in found
    assert "headgate calibrate --from-bench FILE" in found


POLICY = """
from headgate import ALL, BatchPolicy, Plan, View


class Eager(BatchPolicy):
    def plan(self, view: View) -> Plan:
        slots = view.limits.running - len(view.decoding) - len(view.prefilling)
        return Plan(ALL, (*view.prefilling, *list(view.waiting)[: max(slots, 0)]))
"""


def test_own_policy(told, tmp_path):
    (tmp_path / "mine.py").write_text(POLICY)
    assert "mine.py:Eager: 6 of 6 laws kept in 5 worlds" in told("check", "mine.py:Eager", "--worlds", 5)
    said = told(
        "compare", "--policy", "mixed", "--policy", "mine.py:Eager", "--clients", 64, "--requests", 300
    )
    assert SETUP in said and "request throughput" in said and "mine.py:Eager" in said
    assert "unknown policy of mine.py 'Nobody'; choose from: Eager" in told("check", "mine.py:Nobody", code=2)


SWEEP = """
import headgate

engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
for rate in (5.0, 10.0):
    requests = headgate.generate(
        300,
        arrivals=headgate.arrival_process("poisson", rate),
        prompt=headgate.length_law("uniform", 512),
        output=headgate.length_law("uniform", 64),
    )
    runs = {name: headgate.simulate(engine, name, requests) for name in ("mixed", "eb+")}
    print(rate, headgate.summarise(runs["mixed"]).counts.completed, headgate.compare(runs).rows[0].metric)
"""


def test_python_sweep(told):
    done = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"{rate} 300 request throughput" for rate in (5.0, 10.0)], done.stderr
    load = ("--prompt", 512, "--output", 64, "--requests", 200, "--jobs", 1, "--ttft", "200ms")
    said = told("sweep", "--over", "rate=5,10", "--policy", "mixed", *load)
    assert "rate 5 mixed" in said and "rate 10 mixed" in said and SETUP in said
    assert "goodput" in said and "p95, p99, mean, p99," in said and "100.0 %" in said


def test_fleet(told, headgate):
    fleet = ("--engines", 3, "--rate", 30, "--requests", 600, "--prompt", 512, "--output", 64)
    routers = ("--router", "least-loaded", "--router", "round-robin")
    said = told("compare", *fleet, *routers, "--policy", "mixed")
    assert (
        "3 engines" in said and "round-robin" in said and "No router is seen to serve more requests" in said
    )
    checked = told("route", "--engine", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:2", "--check")
    assert "router least-loaded, no card, 256 slots an engine; 2 engines:" in checked
    assert "keys: none" in checked


def test_advice_is_pasted(told, own_csv, headgate):
    """From the trace and a promise to a command line that is taken."""
    columns = "arrival=when,prompt=in_tok,output=out_tok,class=tenant"
    promise = ("--slo", "ttft=1s@p95,tbt=100ms@p99", *QUICK, "--requests", 150, "--cache", "none")
    said = headgate("advise", "--trace", own_csv, "--columns", columns, "--policy", "keep", *promise)
    text = " ".join(said.out.split())
    assert "Plain vLLM at its defaults is enough for your load of" in text
    assert "Arrivals are read as dates, milliseconds since 1970" in text
    line = next(row for row in said.out.replace("\\\n", " ").splitlines() if row.startswith("headgate serve"))
    assert "--scheduler-cls headgate.vllm.scheduler" in told(*shlex.split(line)[1:], "--dry-run")
