"""`headgate calibrate` from files; what starts an engine is tested with vLLM (tests/engine)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headgate.cost.card import load_card
from headgate.cost.fit.steps import StepTable
from headgate.cost.model import Shape
from headgate.experiment.library import card_engine, simulate
from headgate.live.engine.trace import Trace
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.simulator import Simulator
from headgate.stats.vllm_bench import bench_result
from headgate.workloads import generate
from headgate.workloads.lengths import Uniform

KNOWN = "linear-h200-qwen3-8b"


@pytest.fixture
def steps(tmp_path):
    """Steps as long as a known card says, s.steps.npz."""
    rng, cost = np.random.default_rng(0), load_card(KNOWN).cost
    decodes = rng.integers(0, 500, 200)
    prefill = np.where(rng.random(200) < 0.5, rng.integers(16, 8000, 200), 0)
    decodes[(decodes == 0) & (prefill == 0)] = 1
    context = decodes * 700
    times = [cost.seconds(Shape(*map(int, row))) for row in zip(decodes, context, prefill, strict=True)]
    columns = {"seconds": times, "decodes": decodes, "context": context, "prefill": prefill}
    columns |= {"prompts": prefill > 0, "attention": prefill**2 / 2, "part": np.arange(200) // 20}
    StepTable.from_columns(columns, [f"part {number}" for number in range(10)]).save(tmp_path / "s.steps.npz")
    return tmp_path / "s.steps.npz"


def test_from_saved_steps(headgate, steps, tmp_path):
    said = headgate(
        "calibrate", "--from-steps", "s.steps.npz", "--out", "mine.json", "--json", "f.json", "--gpu", "X"
    )
    assert said.code == 0, said.err
    assert "card: mine.json" in said.out
    card = load_card(tmp_path / "mine.json")
    assert (card.name, card.gpu) == ("mine", "X")
    shape = Shape(decodes=300, context=210_000)
    assert card.cost.seconds(shape) == pytest.approx(load_card(KNOWN).cost.seconds(shape), rel=0.1)
    assert json.loads((tmp_path / "f.json").read_text())["steps"] == 200


def test_the_engine_as_another_card_has_it(headgate, steps, tmp_path):
    assert headgate("calibrate", "--from-steps", "s.steps.npz", "--like", KNOWN, "--out", "c.json").code == 0
    card, known = load_card(tmp_path / "c.json"), load_card(KNOWN)
    assert (card.model, card.kv_tokens, card.max_running) == (known.model, known.kv_tokens, known.max_running)
    told = ("calibrate", "--from-steps", "s.steps.npz", "--like", "cal-h200-qwen3-4b", "--out", "d.json")
    assert headgate(*told).code == 0
    ours, theirs = (load_card(c).provenance for c in (tmp_path / "d.json", "cal-h200-qwen3-4b"))
    assert theirs.model_shape and (ours.model_shape, ours.settings) == (theirs.model_shape, theirs.settings)
    assert ours.versions == theirs.versions


def test_from_a_live_trace(headgate, tmp_path):
    header = {"policy": "mixed", "kv_tokens": 50_000, "model": "m", "engine": {"max_num_seqs": 64}}
    trace = Trace(tmp_path / "t.jsonl", header, background=False)
    load = generate(150, seed=1, prompt=Uniform(300), output=Uniform(60), clients=80)
    Simulator(card_engine(KNOWN, slots=64, budget=2048), Mixed(64, 2048), load, (trace,), leases=False).run()
    trace.close()
    said = headgate("calibrate", "--from-trace", "t.jsonl", "--out", "live.json")
    assert said.code == 0, said.err
    assert "shapes of its traffic only" in said.out
    card = load_card(tmp_path / "live.json")
    assert (card.model, card.kv_tokens, card.max_running) == ("m", 50_000, 64)


def test_from_a_benchmark(headgate, tmp_path):
    load = generate(150, seed=1, prompt=Uniform(300), output=Uniform(60), clients=80)
    run = simulate(card_engine(KNOWN, slots=64, budget=2048), Mixed(64, 2048), load)
    (tmp_path / "b.json").write_text(json.dumps(bench_result(run, detailed=True)))
    said = headgate(
        "calibrate", "--from-bench", "b.json", "--like", KNOWN, "--budget", 2048, "--out", "c.json"
    )
    assert said.code == 0, said.err
    assert "prefix caching, preemption and speculation cannot be told" in said.out
    assert load_card(tmp_path / "c.json").max_running


def test_refused(refused, steps, tmp_path):
    calibrate = "calibrate"
    refused([calibrate], "nothing to measure", "--from-trace")
    refused([calibrate, "model", "--from-bench", "b.json"], "MODEL and --from-bench")
    refused([calibrate, "--from-steps", "none.npz"], "none.npz")
    refused([calibrate, "--from-trace", "s.steps.npz"], "no trace")
    refused([calibrate, "--from-bench", "s.steps.npz"], "bench result")
    refused([calibrate, "--from-steps", "s.steps.npz", "--out", "card.txt"], "a card is a JSON file")
    refused([calibrate, "--from-steps", "s.steps.npz", "--out", "no/card.json"], "does not exist")
    (tmp_path / "there.json").write_text("mine")
    refused([calibrate, "--from-steps", "s.steps.npz", "--out", "there.json"], "exists", "--overwrite")
    refused([calibrate, "--from-steps", "s.steps.npz", "--like", "nobody"], "unknown card")
    refused([calibrate, "model", "--grid", "huge"], "full, quick")
    refused([calibrate, "model", "--engine", "tp"], "NAME=VALUE")
    refused([calibrate, "model", "--slots", "1"], "too few to measure")
    refused([calibrate, "model", "--budget", "100"], "too small to measure")


def test_too_few_steps_or_one_shape(refused, tmp_path):
    rows = {"decodes": np.full(10, 4), "context": np.full(10, 400), "prefill": np.zeros(10)}
    StepTable.from_columns({"seconds": np.full(10, 0.01), **rows}).save(tmp_path / "few.npz")
    refused(["calibrate", "--from-steps", "few.npz"], "10 timed steps", "at least 30")
    many = {name: np.tile(column, 10) for name, column in rows.items()}
    StepTable.from_columns({"seconds": np.full(100, 0.01), **many}).save(tmp_path / "one.npz")
    refused(["calibrate", "--from-steps", "one.npz"], "one shape")


def test_as_the_paper_has_it(headgate, refused, steps, tmp_path):
    told = ("calibrate", "--from-steps", "s.steps.npz", "--out", "p.json")
    refused([*told, "--as", "papr"], "unknown form for --as 'papr'; did you mean 'paper'?")
    said = headgate(*told, "--as", "paper", "--json", "found.json")
    assert said.code == 0 and "  decode: alpha " in said.out and "kappa" in said.out
    found = json.loads((tmp_path / "found.json").read_text())["paper"]
    assert found["decode"]["r2"] > 0.99 and len(found["mixed"]["by_share"]) == 3
    assert found["prefill"] is None  # the fixture has no step of prompts alone
