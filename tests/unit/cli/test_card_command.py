"""`headgate card`, and derived cards in the other commands: error bars, verdicts, rescaling by traffic."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headgate.cost.card import load_card
from headgate.cost.laws.work import WorkCost
from headgate.experiment.library import simulate
from headgate.live.engine.trace import Trace
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import engine_of_card
from headgate.sim.engine.simulator import Simulator
from headgate.stats.vllm_bench import bench_result
from headgate.workloads import generate
from headgate.workloads.lengths import Uniform

CARD = "derived:llama-3.1-70b@h100-sxm:tp4"
SAYS = "derived, not measured"


def test_derive_writes_a_card_like_the_named_one(headgate, tmp_path):
    said = headgate(
        "card", "derive", "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", 4, "--out", "my.json"
    )
    assert said.code == 0, said.err
    assert "499,296 KV tokens" in said.out and "±15 %" in said.out and "card: my.json" in said.out
    mine, named = load_card(tmp_path / "my.json"), load_card(CARD)
    assert mine.name == "my" and mine.work == named.work and mine.expected_error == named.expected_error


def test_derive_without_a_file_names_the_card(headgate):
    said = headgate("card", "derive", "--model", "Qwen/Qwen3-14B", "--gpu", "h200", "--dtype", "fp8")
    assert said.code == 0 and "by name: --card derived:qwen3-14b@h200:fp8" in said.out
    assert "measured" in said.out and "published" in said.out and "assumed" in said.out


CONFIG = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 9000}


@pytest.mark.parametrize(
    ("file", "more", "model"),
    [
        ("my-llama-70b.json", [], "my-llama-70b"),
        ("llama-70b/config.json", [], "llama-70b"),
        ("work/config.json", ["--model", "meta-llama/Llama-3.1-70B"], "meta-llama/Llama-3.1-70B"),
    ],
)
def test_the_model_of_a_config_is_called_as_told_or_as_the_file(headgate, tmp_path, file, more, model):
    """And `advise` prints no line that `serve` would refuse: it says at once which name differs."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(CONFIG))
    said = headgate("card", "derive", "--config", file, "--gpu", "h100", *more, "--out", "my.json")
    assert said.code == 0, said.err
    assert load_card(tmp_path / "my.json").model == model
    other = "Qwen/Qwen3-8B"
    assert "is of another model" in headgate("serve", other, "--card", "my.json", "--dry-run").err
    advice = headgate("advise", "--card", "my.json", "--model", other, "--rate", 1, "--slo", "ttft=1s@p95")
    assert advice.code == 2 and f"card my is of another model ({model}), not of {other}; give" in advice.err


def test_derive_as_json(headgate):
    said = headgate("card", "derive", "--model", "qwen3-8b", "--gpu", "a100-sxm", "--json", "-")
    document = json.loads(said.out)
    assert document["expected_error"]["throughput"] == 0.15 and SAYS in said.err
    assert document["provenance"]["numbers"]["gpu.bandwidth"] == {
        "value": 2.04e12,
        "origin": "published",
        "source": "data sheet, bytes/s",
    }


def test_list_and_show(headgate):
    listed = headgate("card", "list")
    assert listed.code == 0
    for word in ("cal-h200-qwen3-8b", "mixtral-8x7b", "rtx-pro-6000", "data sheet only"):
        assert word in listed.out
    shown = headgate("card", "show", "cal-h200-qwen3-8b")
    assert shown.code == 0 and "812,144 KV tokens" in shown.out and SAYS not in shown.out
    assert SAYS in headgate("card", "show", CARD).out


def test_refused(refused, tmp_path):
    derive = ["card", "derive", "--gpu", "h200"]
    refused(derive, "needs --model NAME or --config")
    refused([*derive, "--config", "c.json"], "c.json", "No such file")
    refused([*derive, "--config", "nowhere"], "nowhere/config.json")
    refused([*derive, "--model", "qwen3-9b"], "unknown model")
    refused(["card", "derive", "--gpu", "h300", "--model", "qwen3-8b"], "unknown GPU")
    near = "did you mean h100-sxm or h100-nvl or h100-pcie?"
    refused(["card", "derive", "--gpu", "h1000", "--model", "qwen3-8b"], near)
    (tmp_path / "wrong.txt").write_text("hello")
    refused(["card", "derive", "--gpu", "h200", "--config", "wrong.txt"], "wrong.txt is no .json file")
    refused([*derive, "--model", "qwen3-8b", "--pp", 2], "pipeline parallelism", "--approximate")
    refused([*derive, "--model", "qwen3-8b", "--dtype", "int4"], "data type")
    refused([*derive, "--model", "qwen3-8b", "--out", "card.txt"], "a card is a JSON file")
    refused([*derive, "--model", "qwen3-8b", "--correct", CARD], "not a calibrated card")
    refused(["card", "show", "nobody"], "unknown card")
    refused(["simulate", "--card", "derived:qwen3-8b@h200:warp"], "'warp' is not known")


def test_simulations_say_how_far_off_they_may_be(headgate, tmp_path):
    said = headgate("simulate", "--card", CARD, "--requests", 60, "--clients", 8, "--out", "one")
    assert said.code == 0, said.err
    assert f"note: card {CARD} is {SAYS}" in said.out
    assert "derived, throughput ±15 %" in said.out
    meta = json.loads((tmp_path / "one" / "run.json").read_text())
    assert meta["expected_error"]["throughput"] == 0.15


def test_a_small_difference_cannot_be_told(headgate):
    load = ("--requests", 3500, "--clients", 512, "--slots", 512, "--prompt", 320, "--output", 256)
    settings = ("--policy", "mixed", "--policy", "eb:refill=32", *load, "--json", "-")
    derived = headgate("compare", "--card", "derived:qwen3-8b@h200", *settings)
    assert derived.code == 0, derived.err
    verdicts = {
        row["metric"]: (row["others"]["eb:refill=32"]["verdict"], row["others"]["eb:refill=32"]["percent"])
        for row in json.loads(derived.out)["rows"]
    }
    for verdict, percent in verdicts.values():
        if verdict in ("better", "worse"):
            assert abs(percent["value"]) > 8
        if verdict == "cannot tell":
            assert abs(percent["value"]) <= 10
    assert verdicts["request throughput"][0] == "cannot tell"
    assert "Cannot tell: eb:refill=32 serves" in " ".join(derived.err.split())
    assert "The card was derived, not measured" in " ".join(json.loads(derived.out)["notes"])
    measured = headgate("compare", "--card", "cal-h200-qwen3-8b", *settings)
    assert "cannot tell" not in measured.out


def test_plans_say_it_too(headgate):
    flags = headgate("plan", "flags", "--card", CARD, "--prompt", 1024, "--output", 256, "--tpot", "50ms")
    assert flags.code == 0, flags.err
    assert "±15 % (derived card)" in " ".join(flags.out.split()) and "--tensor-parallel-size 4" in flags.out
    threshold = headgate("plan", "threshold", "--card", CARD, "--prompt", 512, "--output", 256)
    assert "cannot tell: exclusive batches" in " ".join(threshold.out.split())
    for plan in (("fluid", "--engines", 2, "--rate", 4), ("wait", "--rate", 2)):
        said = headgate("plan", *plan, "--card", CARD, "--prompt", 512, "--output", 128)
        assert said.code == 0 and SAYS in " ".join(said.out.split()), said


def test_capacity_cannot_tell_policies_within_the_error(headgate):
    levels = ("--slo", "ttft=200ms@p95", "--policy", "mixed", "--policy", "sarathi", "--jobs", 1)
    load = ("--prompt", 512, "--output", 32, "--requests", 300, "--seeds", 1)
    said = headgate("plan", "capacity", "--card", CARD, *levels, *load, "--json", "c.json")
    assert said.code == 0, said.err
    assert "Cannot tell which policy sustains most" in said.out
    with open("c.json") as file:
        assert json.load(file)["expected_error"] == 0.15
    said = headgate("plan", "capacity", "--card", "cal-h200-qwen3-8b", *levels, *load)
    assert "sustains most" in said.out and "Cannot tell" not in said.out


def test_engines_come_as_a_range(headgate):
    levels = ("--find", "engines", "--slo", "ttft=5s@p95", "--rate", 40, "--seeds", 1, "--jobs", 1)
    load = ("--prompt", 512, "--output", 64, "--requests", 300, "--policy", "mixed")
    said = headgate("plan", "capacity", "--card", CARD, *levels, *load)
    assert said.code == 0, said.err
    assert "with the error of ±15 % of a derived card" in " ".join(said.out.split())


@pytest.fixture
def slower(tmp_path):
    """What clients saw of an engine whose layers are 15 % slower than derived, b.json."""
    card = load_card(CARD)
    terms = replace(card.work, constant=1.15 * card.work.constant, per_token=1.15 * card.work.per_token)
    engine = engine_of_card(card, slots=64, budget=2048)._replace(cost=WorkCost(terms, card.host))
    load = generate(400, seed=1, prompt=Uniform(600), output=Uniform(80), clients=64)
    run = simulate(engine, "mixed", load, asynchronous=False)
    (tmp_path / "b.json").write_text(json.dumps(bench_result(run, detailed=True)))
    return terms


def test_a_minute_of_traffic_fixes_it(headgate, slower, tmp_path):
    fix = ("calibrate", "--from-bench", "b.json", "--like", CARD, "--budget", 2048)
    said = headgate(*fix, "--out", "mine.json", "--json", "f.json")
    assert said.code == 0, said.err
    assert "before" in said.out and "after" in said.out
    figures = json.loads((tmp_path / "f.json").read_text())
    assert abs(figures["after"]["all"]["total"]) < 0.03 < abs(figures["before"]["all"]["total"])
    mine = load_card(tmp_path / "mine.json")
    assert mine.work.per_token == pytest.approx(slower.per_token, rel=0.06)
    assert mine.expected_error.throughput < load_card(CARD).expected_error.throughput
    assert mine.kv_tokens == load_card(CARD).kv_tokens


def test_a_live_trace_fixes_it_and_says_how_much_memory_there_is(headgate, slower, tmp_path):
    header = {"policy": "mixed", "kv_tokens": 480_000, "model": "m", "engine": {"max_num_seqs": 64}}
    trace = Trace(tmp_path / "t.jsonl", header, background=False)
    engine = engine_of_card(load_card(CARD), slots=64, budget=2048)._replace(cost=WorkCost(slower))
    load = generate(300, seed=2, prompt=Uniform(600), output=Uniform(80), clients=64)
    Simulator(engine, Mixed(64, 2048), load, (trace,), leases=False).run()
    trace.close()
    said = headgate("calibrate", "--from-trace", "t.jsonl", "--like", CARD, "--out", "live.json")
    assert said.code == 0, said.err
    assert "before" in said.out and "shapes of its traffic only" in said.out
    card = load_card(tmp_path / "live.json")
    assert card.kv_tokens == 480_000 and card.provenance.numbers["kv_tokens"].origin == "measured"
    assert card.max_running == load_card(CARD).max_running
    assert card.work.per_token == pytest.approx(slower.per_token, rel=0.08)


def test_rescaling_needs_a_derived_card(refused, slower):
    refused(
        ["calibrate", "--from-bench", "b.json", "--like", "cal-h200-qwen3-8b", "--rescale"],
        "--rescale needs --like with a derived card",
    )


def test_advice_on_a_derived_card(headgate):
    load = ("--prompt", 512, "--output", 32, "--requests", 150, "--seeds", 1, "--jobs", 1, "--rate", 8)
    levels = ("--slo", "ttft=1s@p95", "--policy", "mixed", "--policy", "keep", "--cache", "none")
    said = headgate("advise", "--card", CARD, *levels, *load)
    assert said.code == 0, said.err
    text = " ".join(said.out.split())
    assert "(±15 %, derived card)" in text and "--tensor-parallel-size 4" in text
    assert "with the error of ±15 % of a derived card" in text and SAYS in text
