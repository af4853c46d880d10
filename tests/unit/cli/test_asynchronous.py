"""`--asynchronous` wherever something is simulated: it counts, and what it leaves out is said."""

from __future__ import annotations

import json

import pytest

SMALL = ["--requests", 60, "--prompt", 60, "--output", 20, "--slots", 16]
HOSTED, LINES = ["--card", "cal-h200-qwen3-8b"], ["--card", "linear-h200-qwen3-8b"]
FLEET, NO_HOST = "--asynchronous in a fleet is a part of it", "does not say how long the host takes"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--asynchronous", *LINES], NO_HOST),
        (["--asynchronous", *HOSTED], ""),
        (["--asynchronous", *HOSTED, "--engines", 1], FLEET),
        ([], ""),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "compare", "sweep"])
def test_what_it_leaves_out_is_said_once(headgate, command, words, said):
    more = {"compare": ["--policy", "v0"], "sweep": ["--over", "clients=4,8", "--jobs", 1]}.get(command, [])
    run = headgate(command, "--policy", "mixed", *more, *words, *SMALL)
    assert run.code == 0
    assert run.out.count("note: --asynchronous") == bool(said)
    assert said in " ".join(run.out.split())


def test_a_capacity_is_that_of_an_asynchronous_engine(headgate):
    """A first token takes a step more where steps are composed ahead, so fewer requests a second meet it."""
    words = ["plan", "capacity", "--slo", "ttft=60ms@p50", "--policy", "mixed", "--seeds", 1, "--jobs", 1]
    words += ["--requests", 150, "--prompt", 600, "--output", 100, "--precision", 0.1, *HOSTED, "--json", "-"]
    rates = []
    for more in (["--no-asynchronous"], []):
        found = json.loads(headgate(*words, *more).out)
        rates.append(found["policies"][0]["rate"]["value"])
    assert rates[1] < 0.98 * rates[0]


def test_the_fewest_engines_are_asynchronous_ones(headgate):
    words = ["plan", "capacity", "--find", "engines", "--slo", "ttft=30ms@p50", "--rate", 20, *HOSTED]
    words += ["--policy", "mixed", "--router", "round-robin", "--seeds", 1, "--jobs", 1, "--requests", 100]
    plain, ahead = (
        json.loads(headgate(*words, *more, "--json", "-").out)
        for more in (["--no-asynchronous"], ["--asynchronous"])
    )
    assert any(FLEET in note for note in ahead["notes"])
    assert not any(FLEET in note for note in plain["notes"])
    assert ahead["fleets"] != plain["fleets"]
