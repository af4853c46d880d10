"""Sizes at the edge of sense, and odd files, are served; figures stay strict JSON."""

from __future__ import annotations

import json

import pytest

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,100,20\n"
POLICIES = ("mixed", "eb:refill=1")
TINY = ["--workload", "fixed", "--prompt", 5, "--output", 3]

SIZES = [
    ["--requests", 1],
    ["--requests", 1, "--rate", 1e-9],
    ["--requests", 30, "--slots", 1],
    ["--requests", 30, "--slots", 1, "--budget", 1, *TINY],
    ["--requests", 30, "--block", 1],
    ["--requests", 30, "--block", 1, "--kv-tokens", 9, *TINY],
    ["--requests", 30, "--block", 64, "--kv-tokens", 64, *TINY],
    ["--requests", 30, "--kv-tokens", 16, *TINY],
    ["--requests", 30, "--workload", "fixed", "--output", 1],
    ["--requests", 30, "--workload", "fixed", "--prompt", 1, "--output", 1],
    ["--requests", 30, "--clients", 1],
    ["--requests", 5, "--clients", 5000],
    ["--requests", 30, "--rate", 1e-6],
    ["--requests", 30, "--rate", 1e6],
    ["--requests", 30, "--rate", 5, "--burstiness", 1e-3],
    ["--requests", 30, "--rate", 5, "--burstiness", 1e9],
    ["--requests", 30, "--patience", "1e-9s"],
    ["--requests", 30, "--abort", "1e-9s"],
    ["--requests", 30, "--abort", "1ms", "--clients", 2],
    ["--requests", 30, "--patience", "1e300s", "--abort", "1e300s"],
    ["--requests", 30, "--cap-output", 10**30, "--cap-prompt", 10**30],
    ["--requests", 30, "--kv-tokens", 10**30, "--model-len", 10**30],
    ["--requests", 30, "--seed", 10**40],
    ["--requests", 30, "--ttft", "1e-300s", "--tpot", "1e300s"],
    ["--requests", 30, "--workload", "gamma", "--shape", 1e-300],
    ["--requests", 30, "--workload", "lognormal", "--sigma", 20],
    ["--trace", "azure-conv", "--requests", 30, "--scale-rate", 1e6],
    ["--trace", "azure-conv", "--requests", 1],
]


@pytest.mark.parametrize("args", SIZES, ids=lambda args: " ".join(map(str, args)))
def test_sizes(headgate, args):
    for policy in POLICIES:
        own = ["--policy", policy]
        if "--slots" not in args and "--budget" not in args:
            own += ["--slots", 8]
        said = headgate("simulate", *args, *own, "--json", "-")
        assert said.code == 0, said.err
        found = json.loads(said.out, parse_constant=pytest.fail)
        total = found["completed"] + found["failed"]
        assert total == found["num_prompts"] == found["headgate"]["counts"]["total"]
        assert found["headgate"]["counts"]["unfinished"] == 0


@pytest.mark.parametrize(
    "content",
    [
        (HEAD + ROW + ROW).replace("\n", "\r\n").encode(),
        (HEAD + ROW + ROW).replace("\n", "\r").encode(),
        b"\xef\xbb\xbf" + (HEAD + ROW + ROW).encode(),
        (HEAD + ROW + ROW).strip().encode(),
        (HEAD + "\n" + ROW + "\n\n" + ROW).encode(),
        b'\xef\xbb\xbf{"timestamp": 1, "input_length": 3, "output_length": 1}\r\n' * 1
        + b'{"timestamp": 2, "input_length": 3, "output_length": 1}\r\n',
    ],
    ids=["crlf", "cr", "bom", "no newline at the end", "blank lines", "json with bom and crlf"],
)
def test_line_ends_and_marks(headgate, tmp_path, content):
    (tmp_path / "ünï ☃.csv").write_bytes(content)
    said = headgate("simulate", "--trace", "ünï ☃.csv", "--json", "-")
    assert said.code == 0 and json.loads(said.out)["completed"] == 2


def test_bad_rows_are_told(headgate, tmp_path):
    (tmp_path / "t.csv").write_text(HEAD + "x,1,1\n" + ROW)
    said = headgate("simulate", "--trace", "t.csv", "--skip-bad-rows")
    assert said.code == 0 and said.out.startswith("note: left out 1 bad rows; the first, line 2: TIMESTAMP")


def test_requests_that_cannot_fit_are_told(headgate):
    said = headgate("simulate", "--requests", 40, "--workload", "geometric", "--prompt", 20000, "--json", "-")
    assert said.code == 0 and "requests cannot be served" in said.err
    assert json.loads(said.out)["headgate"]["counts"]["refused"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "[[stages]]\nrequests=30\nclients=50\n[[stages]]\nrequests=30\nclients=1\n",
        "rate=4\n[[stages]]\nrequests=30\nrate=50\n[[stages]]\nrequests=30\n",
        "arrivals='constant'\n[[stages]]\nrequests=30\nrate=5\n",
        "burstiness=0.5\n[[stages]]\nrequests=30\nrate=5\n",
        "requests=60\n[[stages]]\nrequests=30\nprompt=9\n[[stages]]\nrequests=30\n",
        "requests=30\n[[classes]]\nname='ü☃'\nshare=1\nprompt-law='fixed'\nprompt=9\noutput=9\n[[classes]]\nname='b'\nshare=1e300\nprompt=9\noutput=9\n",
        "\ufeffrequests=30\r\nkv-tokens=2000\r\narrivals='all-at-once'\r\n",
        "",
    ],
)
def test_experiment_files(headgate, tmp_path, text):
    (tmp_path / "e.toml").write_text(text, encoding="utf-8")
    said = headgate("simulate", "e.toml", "--cap-output", 8)
    assert said.code == 0 and said.err == ""


def test_a_file_and_flags_say_the_same(headgate, tmp_path):
    (tmp_path / "e.toml").write_text("policy='eb'\nrequests=60\nslots=8\nttft='1s'\n[set]\nrefill=4\n")
    flags = ["--policy", "eb:refill=4", "--requests", 60, "--slots", 8, "--ttft", "1s"]
    ours, theirs = (
        json.loads(headgate("simulate", *args, "--json", "-").out) for args in (["e.toml"], flags)
    )
    assert ours.pop("date") and theirs.pop("date") and ours == theirs
    over = json.loads(headgate("simulate", "e.toml", "--set", "refill=8", "--json", "-").out)
    assert over["mean_ttft_ms"] != ours["mean_ttft_ms"]


def test_a_small_watchdog_leaves_a_full_engine_alone(headgate):
    said = headgate("simulate", "--requests", 200, "--clients", 200, "--slots", 4, "--watchdog", "1us")
    assert said.code == 0, said.err
