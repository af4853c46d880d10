from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.core.plan import NONE, Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.cost.card import load_card
from headgate.experiment.library import simulate
from headgate.live.calibrate.steps import steps_of_bench, steps_of_trace
from headgate.live.engine.trace import Trace
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.mixed.mixed import Mixed
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.stats.vllm_bench import bench_result
from headgate.workloads import generate
from headgate.workloads.lengths import Uniform
from headgate.workloads.workload import Workload

BUDGET, SLOTS = 512, 16
ENGINE = Engine(load_card("linear-h200-qwen3-8b").cost, 20_000, 4096, BUDGET, SLOTS, 16)
POLICIES = [lambda: Mixed(SLOTS, BUDGET), lambda: Exclusive(SLOTS, 4)]


def load() -> Workload:
    return generate(80, seed=3, prompt=Uniform(300), output=Uniform(40), clients=24)


def traced(policy: BatchPolicy, file: Path) -> Run:
    """A run of the simulator, told to the trace of a live engine."""
    trace = Trace(file, {"model": "made-up", "kv_tokens": 20_000, "engine": {}}, background=False)
    run = simulate(ENGINE, policy, load(), leases=False, observers=(trace,))
    trace.close()
    return run


@pytest.mark.parametrize("policy", POLICIES, ids=["mixed", "eb"])
def test_a_trace_gives_back_its_steps(policy: Any, tmp_path: Path) -> None:
    run = traced(policy(), tmp_path / "live.jsonl")
    table, header = steps_of_trace(tmp_path / "live.jsonl")
    assert header["model"] == "made-up"
    steps, count = run.steps, run.steps["count"]
    assert len(table) == count.sum()
    assert table.seconds.sum() == pytest.approx(steps["seconds"].sum())
    assert table.decodes.sum() == (steps["decodes"] * count).sum()
    assert table.prefill.sum() == run.requests["prompt"].sum()
    assert not np.isnan(table.attention).any()
    whole = run.requests["prompt"].astype(float)
    assert table.attention.sum() == pytest.approx((whole * whole / 2).sum())  # pieces add up to whole prompts
    assert table.prompts.sum() >= len(whole)


class Pausing(Mixed):
    """Lets everybody stand for ten seconds, once."""

    def plan(self, view: Any) -> Any:
        if 1.0 <= view.now < 11.0 and view.decoding:
            return Plan(NONE, (), until=Until(time=11.0))
        return super().plan(view)


def test_a_pause_is_no_part_of_a_step(tmp_path: Path) -> None:
    run = traced(Pausing(SLOTS, BUDGET), tmp_path / "live.jsonl")
    table, _ = steps_of_trace(tmp_path / "live.jsonl")
    assert run.requests["finished"].max() > 11.0
    assert table.seconds.max() < 1.0
    assert table.seconds.sum() == pytest.approx(run.steps["seconds"].sum())


def test_a_trace_without_steps(tmp_path: Path) -> None:
    Trace(tmp_path / "empty.jsonl", {}, background=False).close()
    with pytest.raises(InputError, match="no step in it"):
        steps_of_trace(tmp_path / "empty.jsonl")


def benched(policy: BatchPolicy, file: Path) -> Run:
    run = simulate(ENGINE, policy, load())
    file.write_text(json.dumps(bench_result(run, detailed=True)))
    return run


def test_what_clients_saw_gives_back_most_steps(tmp_path: Path) -> None:
    run = benched(Mixed(SLOTS, BUDGET), tmp_path / "bench.json")
    table, words = steps_of_bench(tmp_path / "bench.json", BUDGET)
    assert words["completed"] == 80
    total = run.steps["seconds"].sum()
    assert table.seconds.sum() == pytest.approx(total, rel=0.05)
    assert table.prefill.sum() <= run.requests["prompt"].sum()
    assert (table.decodes + table.prefill).max() <= BUDGET
    mean = (run.steps["decodes"] * run.steps["seconds"]).sum() / total
    assert np.average(table.decodes, weights=table.seconds) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    "document, told",
    [
        ("nonsense", "not valid JSON"),
        ("{}", "has no input_lens"),
        ('{"input_lens": [1], "ttfts": [0.1], "itls": [[0.1]]}', "has no start_times"),
        ('{"input_lens": [1, 2], "ttfts": [0.1], "itls": [[0.1]], "start_times": [0.5]}', "of one length"),
        ('{"input_lens": [1], "ttfts": [0.1], "itls": 5, "start_times": [0.5]}', "of one length"),
        ('{"input_lens": [1], "ttfts": [0.1], "itls": [5], "start_times": [0.5]}', "request 0 has"),
        ('{"input_lens": [1], "ttfts": ["x"], "itls": [[1]], "start_times": [0.5]}', "request 0 has"),
        ('{"input_lens": [-1], "ttfts": [0.1], "itls": [[1]], "start_times": [0.5]}', "request 0 has"),
        ('{"input_lens": [1], "ttfts": [0], "itls": [[0.1]], "start_times": [0.5]}', "got a token"),
        ('{"input_lens": [1], "ttfts": [1], "itls": [[]], "start_times": [0.5]}', "one token"),
    ],
)
def test_bad_bench_results(document: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(document)
    with pytest.raises(InputError, match=told):
        steps_of_bench(tmp_path / "bench.json", BUDGET)


def test_no_bench_result(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        steps_of_bench(tmp_path / "none.json", BUDGET)
