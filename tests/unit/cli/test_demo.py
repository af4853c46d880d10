"""The demo: its story, and that what it calls measured is what studies/h200 has."""

import csv
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from headgate.cli import demo
from studies.h200.promises.load import draw

RESULTS = Path(__file__).parents[3] / "studies" / "h200" / "results"
ARMS = {"mixed": "plain", "mixed:budget=2560": "mixed:budget=2560", "keep": "auto"}


def lines(file):
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def measured(arm):
    """Stairs of the demo's seed."""
    found = [line for line in lines("promises/h200-m.jsonl") if line.get("arm") == arm]
    return [line for line in found if line["seed"] == demo.SEED]


@pytest.mark.parametrize("policy", demo.KEPT)
def test_kept_on_the_h200(policy):
    found = measured(ARMS[policy])
    assert [line["rate"] for line in found] == list(demo.STAIRS)
    assert tuple(round(100 * line["kept"]) for line in found) == demo.KEPT[policy]


def test_other_seeds_on_the_h200():
    found = [line for part in "mno" for line in lines(f"promises/h200-{part}.jsonl") if "kept" in line]

    def others(policy, rate):
        mine = [line for line in found if line["arm"] == ARMS[policy] and line["rate"] == rate]
        kept = sorted(round(100 * line["kept"]) for line in mine if line["seed"] != demo.SEED)
        return f"{kept[0]} {'and' if len(kept) == 2 else 'to'} {kept[-1]}"

    budget = others("mixed:budget=2560", 24)
    assert (
        f"at 24 requests/s, the best budget kept {budget} %, headgate {others('keep', 24)} %" in demo.POLICIES
    )
    assert f"at 16, vLLM kept {others('mixed', 16)} %, headgate {others('keep', 16)} %" in demo.POLICIES


@pytest.mark.parametrize("policy", demo.FIRST)
def test_first_tokens_on_the_h200(policy):
    assert round(1000 * measured(ARMS[policy])[0]["ttft"]["p50"], 1) == demo.FIRST[policy]


def test_served_on_the_h200():
    found = lines("slots512-a.jsonl")
    for policy, rate in demo.SERVED.items():
        arm = "plain" if policy == "mixed" else policy
        own = [line for line in found if line.get("arm") == arm and line.get("workload") == "512/512"]
        assert round(statistics.mean(line["balanced_requests_per_s"] for line in own), 2) == rate


def test_the_requests_are_those_of_the_h200(tmp_path):
    count = demo.write_rising(tmp_path / "rising.csv")
    with (tmp_path / "rising.csv").open() as file:
        rows = list(csv.DictReader(file))
    rate = sum(demo.STAIRS) / len(demo.STAIRS)
    sent = draw("azure-conv", rate, demo.STAIR * len(demo.STAIRS), demo.SEED, stairs=demo.STAIRS)
    assert count == len(rows) == len(sent.arrival)
    for name in ("arrival", "prompt", "output"):
        assert np.array_equal([float(row[name]) for row in rows], getattr(sent, name))


def test_the_story(headgate, tmp_path):
    said = headgate("demo")
    assert said.code == 0, said
    rows = [line.split() for line in said.out.splitlines() if re.match(r"(16|18|20|22|24) +\d", line)]
    assert [row[0] for row in rows] == [str(rate) for rate in demo.STAIRS]
    vllm, budget, ours = ([int(row[place]) for row in rows] for place in (1, 3, 5))
    assert min(ours[:4]) >= 99 and ours[4] > 80 and vllm[2] < 20 and budget[4] < 20
    gain = re.search(r"eb\+ \(headgate\) +\S+ \(\+([\d.]+) %\)", said.out)
    assert float(gain[1]) == pytest.approx(5.6, abs=1)
    assert "advise --trace YOUR_TRACE.csv --slo ttft=500ms@p95,tbt=100ms@p99" in said.out
    assert "Light load: there is nothing to gain" in said.out
    assert (tmp_path / "runs/0001-demo/report.html").stat().st_size > 100_000
