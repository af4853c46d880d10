"""`headgate plan capacity`: what is printed, the JSON, and mistakes in one line."""

from __future__ import annotations

import json

import pytest

from headgate.advisor.capacity.trials import Case
from headgate.advisor.fewest_engines import FleetCase

WORDS = ("plan", "capacity", "--requests", 60, "--prompt", 200, "--output", 20, "--slots", 16, "--jobs", 1)


def shows(said, *parts):
    """All of these, in whatever lines of at most 80 characters."""
    assert said.code == 0, said.err
    assert max(len(line) for line in said.out.splitlines()) <= 80
    flat = " ".join(said.out.split())
    for part in parts:
        assert part in flat, part


def test_a_table_and_a_verdict(headgate):
    runs = ("--requests", 150, "--seeds", 4)
    said = headgate(*WORDS, "--slo", "ttft=200ms@p50", "--policy", "mixed", "--policy", "v0", *runs)
    shows(
        said,
        "Capacity: card cal-h200-qwen3-8b, uniform lengths",
        "Levels p50 TTFT <= 200 ms",
        "Engine 16 slots, 8,192 tokens a step",
        "No policy above λ* =",
        "policy per s 95 % interval of λ* limited by runs",
        "sustains most:",
    )


def test_json_and_classes(headgate):
    levels = "ttft=200ms@p50,tbt=1s@p99:paying,tbt=2s:free"
    said = headgate(*WORDS, "--slo", levels, "--classes", "paying=30%,free=70%", "--seeds", 1, "--json", "-")
    found = json.loads(said.out)
    assert found["declined"]["requests"] > 60 and said.code == 1  # two of 100 requests decide a p99
    assert found["classes"] == {"paying": 30.0, "free": 70.0}
    assert [level["statistic"] for level in found["levels"]] == ["p50", "p99", ""]
    (mixed,) = found["policies"]
    assert mixed["policy"] == "mixed"
    assert 0 < mixed["rate"]["value"] <= found["bound"]["rate"]
    assert "told to policies, not checked" in said.err


def test_a_second_question_is_answered_from_what_is_known(headgate, monkeypatch):
    words = (*WORDS, "--slo", "ttft=200ms@p50", "--seeds", 2, "--cache", "kept", "--json", "-")
    first = json.loads(headgate(*words).out)
    monkeypatch.setattr(Case, "run", lambda self, task: pytest.fail("simulated again"))
    assert json.loads(headgate(*words).out) == first
    with pytest.raises(pytest.fail.Exception, match="simulated again"):  # --cache none looks nowhere
        headgate(*words, "--cache", "none")


def test_tile_cards_show_both_bounds(headgate):
    card = ("--card", "pub-rtx-ada-6000-mistral-7b", "--budget", 512)
    said = headgate(*WORDS, *card, "--slo", "ttft=2s@p50", "--seeds", 1, "--precision", 0.3)
    assert said.code == ("No answer: " in said.out), said.err
    assert "in steps of at most 512 tokens" in " ".join(said.out.split())


def test_the_help_has_examples(headgate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = headgate("plan", "capacity", "--help")
    assert said.code == 0
    assert "headgate plan capacity --slo ttft=500ms@p50,tbt=100ms@p99" in said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "plan capacity needs a promise, such as --slo"),
        (("--slo", "ttft500ms"), "is not a service level; write METRIC=TIME@STATISTIC:CLASS"),
        (("--slo", "ttft=1s@p50:gold"), "class 'gold', which no request belongs to"),
        (("--slo", "ttft=1s@p50", "--rate", 3), "--rate is what is searched for"),
        (("--slo", "ttft=1s@p50", "--policy", "eb"), "policy eb needs refill"),
        (("--slo", "ttft=1s@p50", "--seeds", 0), "seeds"),
        (("--slo", "ttft=1s@p50", "--json", "nowhere/x.json"), "its folder does not exist"),
    ],
)
def test_mistakes(refused, words, says):
    refused([*WORDS, *words], says)


FLEET = (
    "plan",
    "capacity",
    "--find",
    "engines",
    "--requests",
    300,
    "--prompt",
    200,
    "--output",
    20,
    "--slots",
    16,
)
FLEET += ("--rate", 300, "--jobs", 1, "--seeds", 2)


def test_how_few_engines(headgate):
    levels = ("--slo", "ttft=100ms@p90,e2e=5s@p50")
    said = headgate(
        *FLEET, *levels, "--router", "round-robin", "--policy", "mixed", "--policy", "eb:refill=4"
    )
    shows(
        said,
        "Engines: card cal-h200-qwen3-8b, uniform lengths, 300.0 requests/s",
        "Levels p90 TTFT <= 100 ms; p50 E2E <= 5 s",
        "Runs 300 requests each, 2 seeds",
        "No fleet of fewer than",
        "enough with round-robin + ",
    )


def test_fleets_are_known_from_before_too(headgate, monkeypatch):
    words = (*FLEET, "--slo", "ttft=100ms@p90", "--cache", "kept", "--json", "-")
    first = json.loads(headgate(*words).out)
    monkeypatch.setattr(FleetCase, "run", lambda self, trial: pytest.fail("simulated again"))
    assert json.loads(headgate(*words).out) == first
    with pytest.raises(pytest.fail.Exception, match="simulated again"):  # another fleet is not known
        headgate(*words, "--router", "round-robin")


def test_engines_as_json_and_with_any_router(headgate, tmp_path):
    page = tmp_path / "page.html"
    words = ("--slo", "ttft=300ms@p50", "--router", "split", "--router", "density-deep", "--json", "-")
    said = headgate(*FLEET, *words, "--report", page)
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [each["router"] for each in found["fleets"]] == ["split", "density-deep"]
    assert all(each["engines"] >= found["least_engines"] for each in found["fleets"])
    assert found["fleets"][0]["engines"] >= 2  # a split needs two
    assert any(line.startswith("density-deep ") for line in said.err.splitlines())  # no name is broken
    assert "Every number of engines tried" in page.read_text()


def test_levels_that_no_fleet_keeps(headgate):
    said = headgate(*FLEET, "--slo", "ttft=20ms@p90", "--most-engines", 12, "--json", "-")
    assert said.code == 2
    assert json.loads(said.out)["fleets"][0]["engines"] is None  # nothing is lost
    assert "12 engines with least-loaded + mixed cannot keep p90 TTFT <= 20" in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    "policies",
    [("--policy", "eb:refill=4"), ("--policy", "mixed", "--policy", "eb", "--set", "refill=4")],
)
def test_settings_of_one_policy(headgate, policies):
    """The look at what the card measured is of the answer with its own settings, and with no others."""
    said = headgate(*FLEET, "--slo", "ttft=1s@p90", *policies, "--json", "-")
    assert said.code == 0, said.err
    assert all(each["engines"] for each in json.loads(said.out)["fleets"])


@pytest.mark.parametrize("command", [FLEET, ("plan", "capacity"), ("advise", "--rate", 5)])
def test_a_setting_that_no_policy_has(refused, command):
    words = [*command, "--slo", "ttft=1s@p90", "--policy", "keep", "--set", "turst=0.5"]
    refused(words, "unknown parameter of any of these policies 'turst'; did you mean 'trust'?")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--slo", "ttft=1s@p50", "--find", "gpus"), "unknown thing to --find 'gpus'"),
        (("--slo", "ttft=1s@p50", "--router", "round-robi"), "did you mean 'round-robin'"),
        (("--slo", "ttft=1s@p50", "--router", "split:prefil=1"), "did you mean 'prefill'"),
        (("--slo", "ttft=1s@p50", "--policy", "mixd"), "did you mean 'mixed'"),
        (("--slo", "ttft=1s@p50", "--policy", "mixed", "--policy", "mixed"), "is there twice"),
        (("--slo", "ttft=1s@p50", "--most-engines", 1), "more than --most-engines 1"),
        (("--slo", "ttft=1s@p50", "--policy", "all"), "name the policies to try"),
        (("--slo", "ttft=1s@p50", "--scale-rate", 2), "scale-rate"),
    ],
)
def test_mistakes_about_fleets(refused, words, says):
    refused([*FLEET, *words], says)


def test_routers_are_for_engines(refused):
    refused([*WORDS, "--slo", "ttft=1s@p50", "--router", "round-robin"], "say --find engines, or drop it")


def test_more_requests_than_memory_holds_are_refused_for_traces_too(refused):
    args = ["plan", "capacity", "--trace", "azure-conv", "--slo", "ttft=1s@p50", "--requests", 100_000_000]
    refused(args, "are too many for one run", "ask for at most 10,000,000")
