"""`headgate plan fluid`: what is printed, the JSON, the examples of --help, bad input in one line."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from headgate.advisor.fluid_plan import named_apart
from headgate.cli import app
from headgate.cli.plan import fluid
from headgate.methods.fluid.flows import Flow
from router_logs import written

COSTS = shlex.split("--mixed-fixed 17.4ms --mixed-per-token 6.2e-5 --solo-step 0.02200220022s")
CODE, PAPER = "code:prompt=300,output=1000,rate=10", "paper:prompt=3000,output=400,rate=10"
BASE = [*COSTS, "--engines", "20", "--patience", "10s", "--class", CODE, "--class", PAPER]
MONEY = ["--prompt-price", "0.1", "--output-price", "0.2"]


def run(*words: str) -> str:
    found = CliRunner().invoke(app, ["plan", "fluid", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def flat(text: str) -> str:
    return " ".join(text.split())


def document(*words: str) -> dict:
    return json.loads(run(*words, "--json", "-"))


def examples() -> list[list[str]]:
    lines = re.sub(r"\n {8,}", " ", fluid.__doc__).splitlines()
    return [shlex.split(line)[3:] for line in lines if line.strip().startswith("headgate plan fluid")]


@pytest.mark.parametrize("words", examples(), ids=lambda words: " ".join(words)[:30])
def test_examples_of_the_help_work_and_fit(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "router.jsonl", 300.0)
    out = run(*words)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out


def test_it_says_all_of_it():
    out = flat(run(*BASE, *MONEY))
    for part in (
        "step costs as given, classes as given, 20 engines",
        "a step with a chunk of 256 takes 33.27 ms, one without 22 ms",
        "code 300.0 1,000 10.00 9.365 93.7 %",
        "paper 3,000 400.0 10.00 10.00 100.0 % 0 264.5",
        "Engines: 5 take prompts and up to 15 decodes each, 15 only decode",
        "8 and 12",
        "Revenue: 5,954 /s, 297.7 per engine",
        "24.29 ms over slots",
        "The next engine adds 145.",
        "and should only decode; one fewer costs 165.5 /s",
        "20.88 engines serve all requests",
        "gate-and-route+ holds back code; the literal gate would over-serve code",
        "a decode slot alone 10.34, one beside prompts 6.839; an engine that prefills takes 62.89",
    ):
        assert part in out, part


def test_json_has_the_numbers_of_the_known_plan():
    found = document(*BASE, *MONEY)
    code, paper = found["classes"]
    assert found["revenue_per_engine"] == pytest.approx(297.703170, rel=1e-6)
    assert code["prefilling"] == pytest.approx(20 * 0.018258, rel=1e-4)
    assert code["waiting"] == pytest.approx(20 * 0.317253, rel=1e-4)
    assert paper["worth_of_one_more"] == pytest.approx(264.460564, rel=1e-5)
    assert (found["mixed_engines"], found["solo_engines"], found["mixed_engines_with_slack"]) == (5, 15, 8)
    assert found["one_more_engine"]["role"] == "solo"
    assert found["charging"] == "bundled" and found["notes"] == []
    assert found["levels"]["prefilling"] == 1


def test_classes_of_a_file(tmp_path):
    file = tmp_path / "mix.toml"
    file.write_text(
        "rate = 20.0\nslots = 16\n"
        '[[classes]]\nname = "code"\nshare = 1.0\nworkload = "fixed"\nprompt = 300\noutput = 1000\n'
        'patience = "10s"\n'
        '[[classes]]\nname = "paper"\nshare = 1.0\nworkload = "fixed"\nprompt = 3000\noutput = 400\n'
        'patience = "10s"\n'
    )
    found = document(str(file), *COSTS, *MONEY, "--engines", "20")
    assert [each["name"] for each in found["classes"]] == ["code", "paper"]
    assert [each["impatience"] for each in found["classes"]] == pytest.approx([0.1, 0.1])
    assert found["revenue_per_engine"] == pytest.approx(297.7, rel=0.01)
    whole = tmp_path / "fleet.toml"
    whole.write_text("engines = 20\nprompt_price = 0.1\noutput_price = 0.2\n" + file.read_text())
    again = document(str(whole), *COSTS)
    assert again["engines"] == 20 and again["revenue"] == pytest.approx(found["revenue"])
    assert document(str(whole), *COSTS, "--engines", "10")["engines"] == 10


def test_a_trace_is_cut_into_classes():
    found = document("--engines", "4", "--trace", "azure-conv", "--scale-rate", "30", "--clusters", "3")
    assert len(found["classes"]) == 3
    assert sum(each["arrivals"] for each in found["classes"]) == pytest.approx(156, rel=0.02)
    assert found["costs_from"] == "card cal-h200-qwen3-8b"
    assert all(each["turned_away"] for each in found["classes"] if each["waiting"] is None)
    one = document("--engines", "4", "--trace", "azure-conv", "--rate", "10", "--clusters", "1")
    assert [each["arrivals"] for each in one["classes"]] == pytest.approx([10.0])
    assert one["one_more_engine"]["adds"] == pytest.approx(0, abs=1e-6)


def test_a_light_load_needs_no_engine_more():
    out = flat(run(*COSTS, "--engines", "50", "--class", CODE))
    assert "The next engine adds nothing" in out
    assert "One engine fewer costs nothing" in out
    assert "Router: any; no class has to be held back" in out


def test_levels():
    out = flat(run(*BASE, *MONEY, "--tpot", "23ms", "--tpot-over", "slots"))
    assert "Revenue: 3,750 /s, 187.5 per engine" in out
    assert "Level: time per token costs 91.16 per engine and ms" in out
    assert "Router: token-bucket; a gate that fills every free slot would break the levels" in out
    fair = document(*BASE, *MONEY, "--decode-fairness", "1")
    assert fair["revenue_per_engine"] == pytest.approx(268.040143, rel=1e-6)
    assert "Router: service-level" in flat(run(*BASE, "--decode-fairness", "1"))
    bound = document(*BASE, *MONEY, "--prefill-fairness", "0.1", "--serve", "code=50%")
    assert bound["revenue_per_engine"] == pytest.approx(231.459325, rel=1e-6)
    assert bound["shadow_prices"]["levels"]["served.code"] == pytest.approx(0)


def test_the_order_for_engines_that_batch_prompts():
    """The plan ranks code first on this card; a full engine earns most with papers."""
    classes = ("chat:prompt=400,output=300,rate=42", "code:prompt=300,output=1000,rate=21")
    words = ["--engines", "8", "--card", "pub-rtx-pro-6000-qwen3-8b"]
    for text in (*classes, "paper:prompt=3000,output=400,rate=21"):
        words += ["--class", text]
    assert "density-deep:order=paper/chat/code" in flat(run(*words))
    earned = document(*words)["value_per_engine_second"]
    assert list(earned) == ["paper", "chat", "code"] and earned["code"] > 0
    assert document(*BASE)["value_per_engine_second"] == {}


def test_roles_as_the_user_wants():
    found = document(*BASE, *MONEY, "--mixed", "3")
    assert (found["mixed_engines"], found["solo_engines"]) == (3, 17)
    assert sum(each["prefilling"] for each in found["classes"]) <= 3 + 1e-6
    assert found["revenue"] < 5954
    assert document(*BASE, *MONEY, "--solo", "10")["mixed_engines"] == 10


def test_separate_charging_and_whole_chunks():
    separate = document(*BASE, *MONEY, "--separate")
    assert separate["revenue_per_engine"] == pytest.approx(298.586557, rel=1e-6)
    whole = document(*BASE, *MONEY, "--whole-chunks")
    assert whole["revenue_per_engine"] == pytest.approx(297.127225, rel=1e-6)
    assert "give up after their prompt" in flat(run(*BASE, *MONEY, "--separate"))


def test_notes():
    short = flat(run(*COSTS, "--class", "chat:prompt=50,output=200,rate=1"))
    assert "Prompts of chat are shorter than a chunk of 256" in short
    fast = flat(
        run("--mixed-fixed", "5ms", "--mixed-per-token", "1e-6", "--solo-step", "20ms", "--class", CODE)
    )
    assert "Mixed steps are so short" in fast
    full = flat(run("--slots", "1024", "--budget", "16384", "--class", "long:prompt=3000,output=400,rate=9"))
    assert "lower --slots" in full
    assert "No request is served" in flat(run(*BASE, "--mixed", "0"))


def test_names_are_numbered_when_they_read_the_same():
    flows = (Flow("100+10", 100.2, 10, 1), Flow("90+10", 90, 10, 1), Flow("100+10", 99.8, 10, 1))
    assert [flow.name for flow in named_apart(flows)] == ["100+10", "90+10", "100+10.2"]


def test_no_crumbs_where_every_engine_prefills():
    found = document("--engines", "8", "--trace", "azure-conv", "--scale-rate", "30", "--clusters", "50")
    assert {each["solo_decodes"] for each in found["classes"]} == {0.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no class has arrivals; give --rate"),
        (["--clients", "8"], "needs arrivals per second"),
        (
            ["--class", "code:prompt=300,output=1000,rate=0"],
            "rate is 0 requests/s: no request arrives; give more",
        ),
        ([*BASE, "--class", "idle:prompt=300,output=1000,rate=0"], "--class idle: rate is 0 requests/s"),
        (["--engines", "20", "--class", "code:prompt=300,output=9,rate=-1"], "rate is -1 requests/s: a rate"),
        (["--class", "code:prompt=0,output=1000,rate=1"], "prompt is 0 tokens; give more than 0"),
        (["--class", "code:prompt=300,rate=1"], "--class code: output is missing"),
        (["--class", "code:prompt=300,output=many,rate=1"], "output='many' is not a finite number"),
        (
            ["--class", "code:prompts=300"],
            "unknown setting of --class code 'prompts'; did you mean 'prompt'?",
        ),
        (["--class", "code:prompt"], "'prompt' is not NAME=VALUE"),
        (["--class", "code:rate=1,rate=2"], "rate is given twice"),
        (["--class", "code"], "is not NAME:prompt=TOKENS"),
        (["--class", CODE + ",patience=0s"], "patience is 0 s"),
        (["--class", CODE, "--class", CODE], "class 'code' is given twice"),
        (["--class", CODE, "--trace", "azure-conv"], "--class and --trace"),
        (["--class", CODE, "--rate", "5"], "--class and --rate"),
        ([*BASE, "--prompt-price", "-1"], "price of a prompt token is -1; give at least 0"),
        ([*BASE, "--prompt-price", "0", "--output-price", "0"], "both prices are 0"),
        ([*BASE, "--slots", "1"], "--slots 1; give at least 2 slots"),
        ([*BASE, "--engines", "0"], "--engines 0; give at least 1"),
        ([*BASE, "--engines", "1000000000"], "a plan is exact up to 1,000,000"),
        ([*BASE, "--clusters", "0"], "--clusters 0; give 1 to 50"),
        ([*BASE, "--mixed", "15", "--solo", "6"], "15 mixed and 6 solo engines are more roles than the 20"),
        ([*BASE, "--mixed", "21"], "more roles than the 20 engines"),
        ([*BASE, "--mixed", "5", "--solo", "5"], "leave 10 of 20 without a role"),
        ([*BASE, "--ttft", "500ms"], "--ttft is no level of a fluid plan"),
        ([*BASE, "--mixed", "-1"], "give at least 0 of each"),
        ([*BASE, "--tpot", "22ms"], "the fastest step takes 0.0220022 s; ask for at least that"),
        (
            [*BASE, "--serve", "code=100%", "--serve", "paper=100%"],
            "share served cannot be kept; lower all of",
        ),
        (
            [*BASE, "--prefill-fairness", "0.1", "--serve", "paper=80%"],
            "prefill fairness of 0.1 cannot be kept beside the rest; the nearest possible is 0.136467",
        ),
        ([*BASE, "--serve", "cod=90%"], "unknown class 'cod'; did you mean 'code'?"),
        ([*BASE, "--serve", "code"], "'code' is not CLASS=SHARE"),
        ([*BASE, "--tpot", "30ms", "--tpot-over", "requests"], "unknown average for TPOT 'requests'"),
        ([*BASE, "--decode-fairness", "-1"], "decode fairness is -1"),
        ([*BASE, "--chunk", "0"], "a chunk of 0 tokens"),
        ([*BASE[2:]], "--mixed-fixed is missing"),
        ([*BASE, "--card", "linear-h200-qwen3-8b"], "--card and step costs as numbers"),
        ([*COSTS[:4], "--solo-step", "0s", "--class", CODE], "--solo-step 0"),
        (["--class", CODE, "--chunk", "100000"], "does not fit the step's budget"),
        ([*BASE, "--json", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, refused):
    refused(["plan", "fluid", *words], said)
