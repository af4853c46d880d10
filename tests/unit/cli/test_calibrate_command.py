"""`headgate calibrate` from files; what starts an engine is tested with vLLM (tests/engine)."""

from __future__ import annotations

import json
from dataclasses import replace

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


def test_steps_with_drafts_beside_those_without(headgate, steps, tmp_path):
    table = StepTable.load(steps)
    decodes = table.take(table.prefill == 0)
    drafts = 3 * decodes.decodes
    replace(decodes, drafts=drafts, seconds=decodes.seconds + 2e-3 + 3e-5 * drafts).save(
        tmp_path / "k3.steps.npz"
    )
    about = {"name": "x", "gpu": "G", "model": "m", "kv_tokens": 9999, "max_model_len": 999, "max_running": 9}
    about |= {"max_batch_tokens": 99, "settings": {"speculative method": "mtp"}}
    (tmp_path / "k3.about.json").write_text(json.dumps(about))
    both = ("--from-steps", "s.steps.npz", "--from-steps", "k3.steps.npz")
    said = headgate("calibrate", *both, "--like", KNOWN, "--out", "both.json")
    assert said.code == 0, said.err
    card = load_card(tmp_path / "both.json")
    assert card.speculation and (card.speculation.method, card.speculation.drafts) == ("mtp", 3)
    assert card.kv_tokens == load_card(KNOWN).kv_tokens
    alone = headgate("calibrate", "--from-steps", "k3.steps.npz", "--out", "alone.json")
    assert alone.code == 2 and "--from-steps for each" in alone.err


OF_VLLM = {"max_num_seqs": 64, "block_size": 32, "max_model_len": 999, "max_num_batched_tokens": 2048}
OF_SGLANG = {"max_running_requests": 64, "page_size": 32, "context_length": 999, "chunked_prefill_size": 2048}


@pytest.mark.parametrize(("driver", "limits"), [("vllm", OF_VLLM), ("sglang", OF_SGLANG)])
def test_from_a_live_trace(headgate, tmp_path, driver, limits):
    header = {"policy": "mixed", "driver": driver, "kv_tokens": 50_000, "model": "m", "engine": limits}
    trace = Trace(tmp_path / "t.jsonl", header, background=False)
    load = generate(150, seed=1, prompt=Uniform(300), output=Uniform(60), clients=80)
    Simulator(card_engine(KNOWN, slots=64, budget=2048), Mixed(64, 2048), load, (trace,), leases=False).run()
    trace.close()
    said = headgate("calibrate", "--from-trace", "t.jsonl", "--out", "live.json")
    assert said.code == 0, said.err
    assert "shapes of its traffic only" in said.out
    card = load_card(tmp_path / "live.json")
    assert (card.model, card.kv_tokens, card.max_running) == ("m", 50_000, 64)
    assert (card.block, card.max_model_len, card.max_batch_tokens) == (32, 999, 2048)


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


def passes(count=300):
    """Messages as SGLang publishes them (tests/sglang has its own class make them); MIXED ones are slow."""
    rng = np.random.default_rng(5)
    for number in range(count):
        kind = number % 3  # EXTEND, DECODE, MIXED
        prompts = int(rng.integers(1, 4)) if kind != 1 else 0
        tokens, decodes = prompts * int(rng.integers(50, 900)), int(rng.integers(1, 200)) if kind else 0
        context = decodes * 600
        seconds = 5e-3 + 2e-5 * (tokens + decodes) + 1e-8 * context
        seconds += (4e-3 + 3e-5 * decodes) * (kind == 2)
        said = {
            "num_prefill_requests": prompts, "sum_prefill_tokens": tokens, "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": 0, "num_decode_requests": decodes, "sum_decode_kv_tokens": context,
            "var_decode_kv_tokens": 0.0,
        }  # fmt: skip
        yield {"version": 1, "wall_time": seconds, "scheduled_requests": said, "queued_requests": {}}


def test_from_sglangs_forward_passes(headgate, refused, tmp_path):
    """EXTEND, DECODE and MIXED passes have prices of their own, and idle heartbeats none."""
    lines = [json.dumps(message) for message in passes()]
    idle = json.loads(lines[0]) | {"wall_time": 0.0}
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, json.dumps(idle)]) + "\n")
    said = headgate("calibrate", "--from-passes", "p.jsonl", "--out", "sg.json", "--gpu", "H200")
    assert said.code == 0, said.err
    assert "300 steps (0 dropped)" in said.out and "host takes between two passes" in said.out
    cost = load_card(tmp_path / "sg.json").cost
    assert cost.seconds(Shape(0, 0, 1000)) == pytest.approx(5e-3 + 2e-2, rel=0.03)
    assert cost.seconds(Shape(100, 60_000)) == pytest.approx(5e-3 + 2e-3 + 6e-4, rel=0.03)
    mixed = 5e-3 + 2e-5 * 1100 + 6e-4 + 4e-3 + 3e-3
    assert cost.seconds(Shape(100, 60_000, 1000)) == pytest.approx(mixed, rel=0.03)
    command = ["calibrate", "--from-passes", "bad.jsonl"]
    for line, what in (
        ("[1]", "bad.jsonl:1: not a message"),
        (lines[0].replace('"version": 1', '"version": 9'), "version 9"),
        (lines[0].replace('"sum_prefill_kv_tokens": 0', '"sum_prefill_kv_tokens": -1'), "zero or more"),
        (json.dumps(idle), "no timed pass"),
    ):
        (tmp_path / "bad.jsonl").write_text(line + "\n")
        refused(command, what)
    refused(["calibrate", "--from-passes", "none.jsonl"], "none.jsonl", "record_passes")


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
