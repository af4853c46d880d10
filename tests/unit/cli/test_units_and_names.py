"""Durations need a unit, the names of promises mean one thing everywhere, and sizes have an end."""

import json
from pathlib import Path

import pytest

from headgate.advisor.capacity.traffic import parse_levels

SMALL = ("--requests", 30, "--rate", 4, "--prompt", 64, "--output", 16)


@pytest.mark.parametrize("command", [("simulate",), ("plan", "threshold"), ("sweep", "--over", "rate=1,2")])
def test_a_bare_number_is_no_duration(refused, command):
    refused([*command, "--ttft", "500"], "ttft: '500' has no unit; write 500ms or 500s")


def test_a_parameter_in_seconds_takes_a_unit(headgate, refused):
    for policy in ("keep:ttft=500ms,tbt=0.1s", "keep:ttft=0.5,tbt=0.1"):
        assert headgate("simulate", *SMALL, "--policy", policy, "--out", "r", "--overwrite").code == 0
        assert json.loads(Path("r/run.json").read_text())["parameters"]["ttft"] == 0.5
    refused(
        ["simulate", "--policy", "keep:ttft=1x"], "ttft='1x' is not a duration such as 500ms, or a number"
    )
    refused(["simulate", "--policy", "keep:watermark=1s"], "watermark='1s' is not a finite number")


def test_a_rate_has_an_end(refused):
    refused(["simulate", "--rate", "1e12"], "rate: 1000000000000.0 is not allowed; give at most 1000000")
    refused(["simulate", "--trace", "azure-conv", "--scale-rate", "1e12"], "give at most 1000000")


def test_a_bare_number_in_a_service_level(refused):
    refused(["plan", "capacity", "--slo", "ttft=1@p95"], "'1' has no unit; write 1ms or 1s")


def test_conversations_too_many_at_a_time(refused):
    talks = ("--turns", "5", "--think", "1h", "--rate", 8, "--requests", 300)
    refused(["simulate", *talks], "conversations of 14400 s at 8 requests/s are too many at a time")


@pytest.mark.parametrize("flag", ["--tpot", "--tbt", "--itl", "--gap"])
def test_tbt_is_every_gap_and_tpot_their_mean(headgate, flag):
    load = ("--trace", "azure-conv", "--requests", 300, "--rate", 16, "--seed", 1)
    said = headgate("simulate", *load, flag, "40ms", "--json", "-", "--detailed")
    found = json.loads(said.out)
    figure = max if flag != "--tpot" else lambda gaps: sum(gaps) / len(gaps)
    kept = [not gaps or figure(gaps) <= 0.04 for gaps in found["itls"]]
    assert found["request_goodput"] * found["duration"] == pytest.approx(sum(kept))
    assert 0 < sum(kept) < 300
    assert "promises every gap" not in said.err


def test_no_promise_is_called_kept_that_a_gap_breaks(headgate):
    said = headgate("compare", "--policy", "mixed", "--policy", "eb+", *SMALL, "--tbt", "1ms", "--json", "-")
    rows = {row["metric"]: row for row in json.loads(said.out)["rows"]}
    assert rows["p99 ITL"]["baseline"]["value"] > 0.001 and rows["goodput"]["baseline"]["value"] == 0


def test_two_names_at_once_are_refused(refused):
    refused(["simulate", "--tbt", "50ms", "--itl", "60ms"], "'itl' and 'tbt' are one setting")
    refused(["simulate", "--tpot", "50ms", "--itl", "60ms"], "--tbt promises every gap, --tpot the mean of a")


def test_a_plan_of_means_does_not_drop_a_promise_of_every_gap(refused):
    refused(
        ["plan", "flags", "--trace", "azure-conv", "--tbt", "50ms"],
        "give the mean, --tpot, or ask headgate advise",
    )


def test_serve_takes_the_names_too(headgate):
    said = headgate("serve", "Qwen/Qwen3-8B", "--dry-run", "--card", "cal-h200-qwen3-8b", "--itl", "100ms")
    assert said.code == 0 and '"tbt": "100ms"' in said.out


def test_an_envelope_is_judged_token_by_token(headgate):
    load = ("--trace", "azure-conv", "--requests", 300, "--rate", 16, "--seed", 1)
    said = headgate("simulate", *load, "--ttft", "300ms", "--envelope", "25ms", "--json", "-", "--detailed")
    found = json.loads(said.out)
    kept = 0
    for first, gaps in zip(found["ttfts"], found["itls"], strict=True):
        times = [first + sum(gaps[:number]) for number in range(len(gaps) + 1)]
        kept += all(time <= 0.3 + 0.025 * number for number, time in enumerate(times))
    assert found["request_goodput"] * found["duration"] == pytest.approx(kept)
    assert 0 < kept < 300 and "--tbt promises" not in said.err


def test_an_envelope_needs_a_first_token_and_no_other_promise(refused):
    refused(["simulate", "--envelope", "50ms"], "--envelope begins where the first token is due; give --ttft")
    refused(
        ["simulate", "--ttft", "1s", "--envelope", "50ms", "--gap", "60ms"],
        "--tbt promises every gap, --envelope the moment each token is due; drop one of the two",
    )
    refused(["plan", "flags", "--ttft", "1s", "--envelope", "50ms"], "plans do not know it; give the mean")
    serve = ["serve", "Qwen/Qwen3-8B", "--dry-run", "--card", "cal-h200-qwen3-8b"]
    refused([*serve, "--envelope", "50ms"], "envelope begins where the first token is due; give ttft too")


def test_itl_in_a_service_level_is_tbt():
    assert parse_levels(["itl=100ms@p99"]) == parse_levels(["tbt=100ms@p99"])


def test_a_sweep_prints_goodput_and_percentiles(headgate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = headgate("sweep", "--over", "rate=2,4", *SMALL[:2], *SMALL[4:], "--ttft", "500ms", "--jobs", 1)
    assert said.code == 0 and all(word in said.out for word in ("goodput", "p50", "p95", "p99"))


def test_too_many_requests_for_memory(refused):
    refused(
        ["simulate", "--requests", "100000000"], "need about 200 GB of memory; ask for at most 10,000,000"
    )


def test_a_wrong_flag_names_the_help_to_read(refused):
    refused(["simulate", "--nope"], "see headgate simulate --help")
    refused(["plan", "flags", "--nope"], "see headgate plan flags --help")


def test_doctor_lists_optional_packages(headgate):
    said = headgate("doctor", "--no-seams")
    assert all(name in said.out for name in ("aiohttp", "tokenizers", "msgspec", "uvloop", "polars"))
