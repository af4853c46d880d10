"""Fleets on the command line: what runs, what is printed, and what is refused in one line."""

from __future__ import annotations

import json

import pytest

from fleet_worlds import ROUTERS
from headgate.record.tables import Run

SMALL = ["--requests", "60", "--prompt", "64", "--output", "16", "--rate", "40", "--report", "none"]
MIX = """
[[classes]]
name = "code"
share = 0.5
prompt = 60
output = 30
[[classes]]
name = "paper"
share = 0.5
prompt = 200
output = 10
"""


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_runs(headgate, router):
    said = headgate("simulate", "--engines", 3, "--router", router, *SMALL, "--json", "found.json")
    assert said.code == 0, said.err
    assert f", router {router}\n" in said.out and "per engine" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    with open("found.json") as file:
        found = json.load(file)
    assert found["fleet"]["engines"] == 3 and len(found["fleet"]["busy"]) == 3
    served = found["completed"]
    assert sum(found["fleet"]["requests"]) == served > 0
    assert found["headgate"]["engine"]["replicas"] == 3


def test_a_run_says_how_it_was_made(headgate):
    words = ["--engines", 2, "--router", "split:prefill=1", "--kv-bytes", 1e6, "--bandwidth", 10]
    assert headgate("simulate", *words, *SMALL, "--out", "made").code == 0
    run = Run.load("made")
    assert run.meta["driver"] == "fleet" and run.meta["router"] == "split"
    assert run.meta["roles"] == ["prefill", "decode"] and run.meta["router_parameters"] == {"prefill": 1}
    assert run.meta["transfer"] == {"fixed": 0.002, "per_token": 1e-4, "busy": 0.0}
    assert set(run.requests["replica"].tolist()) == {1}
    assert set(run.stays["replica"].tolist()) == {0, 1}


def test_routers_are_compared_on_the_same_requests(headgate):
    words = ["--engines", 2, "--router", "round-robin", "--router", "split", "--policy", "mixed"]
    said = headgate("compare", *words, *SMALL, "--json", "found.json")
    assert said.code == 0, said.err
    assert "1 prefill" in said.out and "2 any" in said.out
    heads = [line.split()[0] for line in said.out.splitlines() if "per s ↑" in line or "verdict" in line]
    assert heads == ["router", "router"]
    assert "busy" in said.out and "decodes at once" in said.out
    (prefill,) = (line for line in said.out.splitlines() if "1 prefill" in line)
    assert "prompts only" in prefill
    assert "Revenue: 1 per prompt token, 2 per output token.\n" in said.out
    with open("found.json") as file:
        found = json.load(file)
    assert found["policies"] == ["round-robin", "split"]
    makers, users = found["fleets"]["split"]["pools"]
    assert makers["role"] == "prefill" and makers["decodes"]["most"] == 0 < users["decodes"]["least"]


def test_routers_and_policies_together(headgate):
    words = ["--engines", 2, "--router", "random", "--router", "split", "--policy", "mixed", "--policy", "v0"]
    said = headgate("compare", *words, *SMALL, "--json", "found.json")
    assert said.code == 0, said.err
    assert "\nrouter, policy " in said.out
    with open("found.json") as file:
        assert json.load(file)["policies"] == ["random mixed", "random v0", "split mixed", "split v0"]


def test_words_of_a_file(headgate, tmp_path):
    (tmp_path / "fleet.toml").write_text(
        'engines = 3\nrouter = "affinity"\nrequests = 60\nrate = 20.0\ntransfer-delay = "5ms"\n'
        "[set-router]\nbound = 2.0\n" + MIX
    )
    said = headgate("simulate", "fleet.toml", "--out", "made", "--prompt-price", 3, "--report", "none")
    assert said.code == 0, said.err
    meta = Run.load("made").meta
    assert meta["router"] == "affinity" and meta["router_parameters"] == {"bound": 2.0}
    assert meta["transfer"]["fixed"] == 0.005 and meta["prices"] == {"prompt": 3.0, "output": 2.0}
    assert "code" in said.out and "Revenue" in said.out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--router", "random"], "needs engines to choose from; give --engines"),
        (["--outages", "0:1s:2s"], "is about fleets; give --engines"),
        (["--engines", 2, "--outages", "0:1s"], "write ENGINE:START:END"),
        (["--engines", 2, "--outages", "5:1s:2s"], "there are 2, numbered from 0"),
        (["--bandwidth", 3], "is about fleets; give --engines"),
        (["--engines", 0], "give at least 1"),
        (["--engines", 10_001], "give at most 10000"),
        (["--engines", 2, "--router", "roundrobin"], "did you mean 'round-robin'?"),
        (["--engines", 2, "--router", "split:prefill=2"], "both pools need an engine, give 1 to 1"),
        (["--engines", 1, "--router", "split"], "1 engine cannot be split"),
        (["--engines", 4, "--router", "split:prefill=two"], "is not a whole number"),
        (["--engines", 4, "--router", "split:prefill"], "write it as split:prefill=2"),
        (["--engines", 4, "--router", "random:x=1"], "has no parameters; drop x"),
        (["--engines", 4, "--router", "affinity", "--set-router", "bnd=2"], "did you mean 'bound'?"),
        (["--engines", 4, "--set-router", "bound"], "write it as --set-router prefill=2"),
        (["--engines", 4, "--router", "gate-and-route"], "give --rate, or choose another router"),
        (
            ["--engines", 4, "--router", "gate-and-route", "--rate", 1, "--requests", 1],
            "two requests or more",
        ),
        (["--engines", 4, "--rate", 9, "--router", "density-deep:order=a/b"], "none exist, drop it"),
        (["--engines", 4, "--bandwidth", 0], "give a number above 0"),
        (["--engines", 4, "--output-price", -1], "give at least 0"),
        (["--engines", 4, "--router", "random", "--router", "split"], "use headgate compare"),
        (["--engines", 2, "--rate", 9, "--slots", 1, "--router", "fi-wsp"], "raise --slots"),
    ],
)
def test_what_is_refused(refused, words, answer):
    refused(["simulate", *words], answer)


def test_what_compare_refuses(refused):
    refused(["compare", "--engines", 2, "--router", "random"], "at least two different policies")
    refused(["compare", "--engines", 2, "--router", "random", "--router", "random"], "is there twice")
