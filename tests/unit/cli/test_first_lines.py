"""What must be known before any figure stands in the first lines: long requests, overload."""

import json
from pathlib import Path

import pytest

LONG = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(
    f"{place * 0.2},{30000 if place % 4 == 0 else 100},20\n" for place in range(80)
)


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "long.csv").write_text(LONG)
    return "long.csv"


def test_requests_that_cannot_be_served_are_no_missed_promises(headgate, trace):
    said = headgate("simulate", "--trace", trace, "--ttft", "2s", "--json", "found.json")
    first = " ".join(said.out.split()).partition("Card cal")[0]
    assert "Cannot be served: 20 of 80 requests (25 %)" in first and "raise --model-len" in first
    found = json.loads(Path("found.json").read_text())["headgate"]
    assert found["goodput"]["share"]["value"] == 1.0 and found["counts"]["refused"] == 20


SEARCH = ("--slo", "ttft=2s@p95,tbt=100ms@p99", "--requests", 60, "--seeds", 1, "--jobs", 1)
PLANS = {
    "advise": ("advise", "--policy", "mixed", "--slots", 64, "--cache", "none", *SEARCH),
    "flags": ("plan", "flags"),
    "capacity": ("plan", "capacity", "--cache", "none", *SEARCH),
    "engines": ("plan", "capacity", "--find", "engines", "--cache", "none", *SEARCH),
    "threshold": ("plan", "threshold"),
    "wait": ("plan", "wait"),
    "fluid": ("plan", "fluid"),
}


@pytest.mark.parametrize("command", PLANS.values(), ids=PLANS)
def test_what_cannot_be_served_comes_first_everywhere(headgate, trace, command):
    said = headgate(*command, "--trace", trace, "--json", "found.json", "--report", "page.html")
    assert said.code == ("No answer: " in said.out), said.err
    _, first, *_ = said.out.split("\n\n")
    assert first.startswith("Cannot be served: 20 of 80 requests (25 %)")
    name, lost = next(iter(json.loads(Path("found.json").read_text()).items()))
    assert name == "cannot_be_served" and lost["requests"] == 20 and lost["of"] == 80
    article = Path("page.html").read_text().partition("<article>")[2]
    assert article.startswith('<p class="alarm" role="alert">Cannot be served: 20 of 80 requests')


def test_drawn_prompts_that_do_not_fit_are_said_too(headgate):
    lengths = ("--prompt", 12000, "--spread", 0.9, "--output", 20)
    said = headgate("advise", "--policy", "mixed", "--slots", 64, "--cache", "none", *SEARCH, *lengths)
    assert "\n\nCannot be served: " in said.out


def test_a_fluid_plan_has_no_class_of_them(headgate, trace):
    headgate("plan", "fluid", "--trace", trace, "--json", "found.json")
    classes = json.loads(Path("found.json").read_text())["classes"]
    assert sum(each["arrivals"] for each in classes) == pytest.approx(59 / (79 * 0.2 - 0.2))
    assert all(each["prompt"] == 100 for each in classes)


def test_a_capacity_search_leaves_them_out_and_says_so(headgate, trace):
    args = ("plan", "capacity", "--trace", trace, "--slo", "ttft=2s@p95", "--requests", 60, "--seeds", 1)
    said = headgate(*args, "--jobs", 1, "--json", "found.json")
    assert "Cannot be served: 20 of 80 requests" in " ".join(said.out.split())
    assert json.loads(Path("found.json").read_text())["policies"][0]["rate"]["value"] > 1


def test_overload_comes_first_with_its_numbers(headgate):
    args = ("--rate", 100, "--prompt", 1000, "--output", 100, "--requests", 600, "--ttft", "100ms")
    said = headgate("compare", "--policy", "mixed", "--policy", "v0", *args, "--report", "none")
    text = " ".join(said.out.split())
    first = text.partition("Card cal")[0]
    assert "Overloaded: 100.0 requests/s are offered; over the whole run mixed serves " in first
    assert "No policy serves more than" in first


def test_flags_for_more_than_an_engine_serves(headgate):
    said = headgate("plan", "flags", "--rate", 100, "--prompt", 1000, "--output", 100)
    assert "Overloaded: 99.54 requests/s are" in said.out and "so the backlog grows by" in " ".join(
        said.out.split()
    )


def test_promises_nobody_keeps_are_not_compared(headgate):
    args = ("--rate", 100, "--prompt", 1000, "--output", 100, "--requests", 600, "--ttft", "1us")
    said = headgate("compare", "--policy", "mixed", "--policy", "v0", *args, "--report", "none")
    assert said.code == 0 and "share of kept promises" not in " ".join(said.out.split())


def test_the_503_of_the_queue_limit_is_said(headgate):
    args = ("plan", "flags", "--rate", 60, "--prompt", 1000, "--output", 100, "--requests", 600)
    said = headgate(*args, "--tpot", "50ms", "--ttft", "500ms", "--check")
    text = " ".join(said.out.split())
    assert "vLLM answers 503 to requests that come while" in text
