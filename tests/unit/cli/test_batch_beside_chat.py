"""Chat at a rate beside clients of batch, through the commands: runs, comparisons, plans and advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MIX = """
[[classes]]
name = "chat"
share = 1
prompt = 400
output = 40
ttft = "500ms"
tbt = "100ms"
weight = 3
tenant = "us"
[[classes]]
name = "batch"
clients = 16
prompt = 800
output = 60
background = true
tenant = "them"
"""
RUN = ("--mix", "m.toml", "--rate", 8, "--requests", 80, "--slots", 64)
FIND = ("plan", "capacity", "--find", "batch", *RUN, "--seeds", 1, "--jobs", 1, "--cache", "none")


@pytest.fixture(autouse=True)
def _mix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.toml").write_text(MIX)


def read(name):
    return json.loads(Path(name).read_text())


def flat(said):
    assert said.code == 0, said.err
    return " ".join(said.out.split())


def test_a_run_shows_worth_value_and_tenants(headgate):
    said = headgate("simulate", *RUN, "--policy", "keep", "--out", "r", "--json", "r.json")
    shown = flat(said)
    assert "8 requests/s offered beside 16 clients of batch" in shown
    assert "Poisson arrivals, 8 requests/s, beside 16 clients of batch." in shown
    assert "batch background - " in shown and "Value kept: 100.0 %" in shown and "By tenant" in shown
    found = read("r.json")["headgate"]
    assert found["value_kept"] == 1.0 and found["kinds"][1]["standing"]["background"] is True
    assert {each["name"] for each in found["tenants"]["tenants"]} == {"us", "them"}
    assert read("r/run.json")["clients_beside"] == {"batch": 16}


def test_policies_are_compared_although_batch_sends_more_under_one(headgate):
    said = headgate(
        "compare", *RUN, "--policy", "mixed", "--policy", "keep", "--out", "c", "--json", "c.json"
    )
    assert "keep" in flat(said)
    assert read("c.json")["policies"] == ["mixed", "keep"]
    report = headgate("report", "c", "--out", "c.html")
    assert report.code == 0, report.err


def test_how_much_batch_fits(headgate):
    shown = flat(headgate(*FIND, "--json", "b.json"))
    assert "8 requests/s with a promise, beside 16 clients of batch." in shown
    assert "Levels p95 TTFT of chat <= 500 ms; p99 TBT of chat <= 100 ms" in shown
    document = read("b.json")
    assert document["class"] == "batch" and [each["policy"] for each in document["policies"]] == [
        "keep",
        "mixed",
    ]
    assert all(each["tokens"]["value"] > 0 for each in document["policies"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--slo", "ttft=1s@p95:batch"), "class 'batch', which is background work: drop one of the two"),
        (("--router", "least-loaded"), "--find batch takes one --router, with --engines"),
        (("--engines", 0), "--engines"),
    ],
)
def test_questions_that_make_no_sense(refused, flags, message):
    refused([*FIND, *flags], message)


def test_other_plans_leave_clients_out_and_say_so(headgate, refused):
    shown = flat(headgate("plan", "threshold", "--mix", "m.toml", "--rate", 8))
    assert "lasses with clients of their own are left out: batch" in shown
    refused(["plan", "capacity", "--engines", 2, "--slo", "ttft=1s@p50"], "--engines is about --find batch")
    refused(["simulate", "--mix", "m.toml", "--clients", 3], "classes.batch: clients send beside classes")
    fleet = ("--engines", 2, "--router", "gate-and-route", "--out", "f")
    refused(["simulate", *RUN, *fleet], "routers that plan need arrivals per second")


def test_advice_says_what_is_left(headgate):
    asks = ("--policy", "keep", "--slo", "ttft=1s@p90", "--budget", 2048, "--seeds", 1, "--precision", 0.4)
    said = headgate("advise", *RUN, *asks, "--jobs", 1, "--cache", "none", "--json", "a.json")
    shown = flat(said)
    document = read("a.json")
    assert document["beside"]["class"] == "batch" and document["beside"]["policies"][0]["missed"] == ""
    assert "tokens/s of batch (16 clients) fit beside 8.000" in shown


def test_advice_tries_keep_beside_background_work_of_a_share(headgate):
    Path("m.toml").write_text(MIX.replace("clients = 16", "share = 3"))
    asks = ("--policy", "mixed", "--slo", "ttft=1s@p90", "--budget", 2048, "--seeds", 1, "--precision", 0.4)
    said = headgate("advise", *RUN, *asks, "--jobs", 1, "--cache", "none", "--json", "a.json")
    beside = (flat(said), read("a.json")["beside"])[1]
    assert "keep" in [each["policy"] for each in beside["policies"]] and beside["rate"] == 2.0
