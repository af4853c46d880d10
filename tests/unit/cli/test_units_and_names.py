"""Durations need a unit, the promise between tokens has three names, and sizes have an end."""

import pytest

from headgate.advisor.capacity.slo import parse_levels

SMALL = ("--requests", 30, "--rate", 4, "--prompt", 64, "--output", 16)


@pytest.mark.parametrize("command", [("simulate",), ("plan", "threshold"), ("sweep", "--over", "rate=1,2")])
def test_a_bare_number_is_no_duration(refused, command):
    refused([*command, "--ttft", "500"], "ttft: '500' has no unit; write 500ms or 500s")


def test_a_bare_number_in_a_service_level(refused):
    refused(["plan", "capacity", "--slo", "ttft=1@p95"], "'1' has no unit; write 1ms or 1s")


@pytest.mark.parametrize("flag", ["--tpot", "--tbt", "--itl"])
def test_one_promise_three_names(headgate, flag):
    said = headgate("simulate", *SMALL, flag, "50ms")
    assert said.code == 0 and "with every promise kept" in said.out


def test_two_names_at_once_are_refused(refused):
    refused(["simulate", "--tpot", "50ms", "--itl", "60ms"], "'itl' and 'tpot' are one setting")


def test_serve_takes_the_names_too(headgate):
    said = headgate("serve", "Qwen/Qwen3-8B", "--dry-run", "--card", "cal-h200-qwen3-8b", "--itl", "100ms")
    assert said.code == 0 and '"tbt": "100ms"' in said.out


def test_itl_in_a_service_level_is_tbt():
    assert parse_levels(["itl=100ms@p99"]) == parse_levels(["tbt=100ms@p99"])


def test_a_sweep_prints_goodput_and_percentiles(headgate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = headgate("sweep", "--over", "rate=2,4", *SMALL[:2], *SMALL[4:], "--ttft", "500ms", "--jobs", 1)
    assert said.code == 0 and all(word in said.out for word in ("goodput", "p50", "p95", "p99"))


def test_too_many_requests_for_memory(refused):
    refused(
        ["simulate", "--requests", "100000000"], "need about 100 GB of memory; ask for at most 10,000,000"
    )


def test_a_wrong_flag_names_the_help_to_read(refused):
    refused(["simulate", "--nope"], "see headgate simulate --help")
    refused(["plan", "flags", "--nope"], "see headgate plan flags --help")


def test_doctor_lists_optional_packages(headgate):
    said = headgate("doctor", "--no-seams")
    assert all(name in said.out for name in ("aiohttp", "tokenizers", "msgspec", "uvloop", "polars"))
