"""Every wrong flag is answered with one line that says what is wrong and the remedy; exit code 2."""

from __future__ import annotations

import sys

import pytest

WHOLE = (
    "slots",
    "budget",
    "kv-tokens",
    "block",
    "model-len",
    "cap-prompt",
    "cap-output",
    "clients",
    "requests",
)
REAL = ("prompt", "output", "shape", "sigma", "spread", "rate", "burstiness", "scale-rate")
TIMES = ("ttft", "tpot", "patience", "abort", "watchdog")
TWO = ["compare", "--policy", "mixed", "--policy", "v0"]


@pytest.mark.parametrize("flag", [*WHOLE, "seed"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1.5", "1e3", "x", ""])
def test_whole_numbers(refused, flag, value):
    wanted = "-1 is not allowed; give at least" if value == "-1" else f"--{flag}"
    refused(["simulate", f"--{flag}", value], wanted)


@pytest.mark.parametrize("flag", WHOLE)
def test_zero_of_a_count(refused, flag):
    refused(["simulate", f"--{flag}", "0"], flag.replace("-", "_"), "0 is not allowed; give at least 1")


@pytest.mark.parametrize("flag", REAL)
@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("0", "is not allowed; give"),
        ("-1", "is not allowed; give"),
        ("nan", "give a finite number"),
        ("inf", "give a finite number"),
        ("-inf", "is not allowed; give"),
        ("1e999", "give a finite number"),
        ("x", "valid number"),
        ("", "valid number"),
    ],
)
def test_real_numbers(refused, flag, value, wanted):
    refused(["simulate", f"--{flag}", value], flag.replace("-", "_") if "give" in wanted else flag, wanted)


@pytest.mark.parametrize("flag", TIMES)
@pytest.mark.parametrize(
    "value", ["0", "0ms", "-1", "-5ms", "nan", "inf", "x", "", "5 parsecs", "5MS", "1e999"]
)
def test_times(refused, flag, value):
    refused(["simulate", f"--{flag}", value], flag)


HUGE = "99999999999999999999999"
COMBINATIONS = [
    # numbers that are numbers, but not here
    (["--requests", HUGE], "too many for one run: they need about"),
    (["--slots", HUGE], "more than card cal-h200-qwen3-8b is meant for; choose at most 1024"),
    (["--slots", "1025"], "choose at most 1024"),
    (["--budget", "16385"], "choose at most 16384"),
    (["--budget", "100"], "raise --budget or lower --slots"),
    (["--block", "9999999"], "raise --kv-tokens"),
    (["--kv-tokens", "15"], "raise --kv-tokens"),
    (["--clients", HUGE], "clients are whole numbers"),
    (["--prompt", "1e300"], "give a number of tokens from 1 to 2147483647"),
    (["--prompt", "1.5", "--workload", "fixed"], "not whole; round it"),
    (["--prompt", "99999"], "no request fits", "raise --model-len or --kv-tokens"),
    (["--kv-tokens", "64", "--prompt", "512"], "no request fits", "cut prompts with --cap-prompt"),
    (["--model-len", "1"], "no request fits"),
    (["--workload", "lognormal", "--sigma", "1e300"], "sigma of a length law", "from 0 to 20"),
    (["--spread", "1.5"], "spread of a length law is 1.5", "from 0 to 1"),
    (["--rate", "1e-300"], "at most 10000000000"),
    (["--trace", "azure-conv", "--scale-rate", "1e-300"], "at most 10000000000"),
    # names
    (["--policy", "vllm"], "simulate mixed"),
    (["--policy", "auto"], "policy auto is keep with a promise and eb+ without, with step times learned"),
    (["--policy", "ebb"], "unknown policy 'ebb'; did you mean 'eb'?"),
    (["--policy", ""], "unknown policy ''"),
    (["--policy", "eb"], "policy eb needs refill; pass --set refill=VALUE"),
    (["--policy", "eb:refill"], "is not NAME=VALUE; write it as eb:refill=48"),
    (["--policy", "eb:=3"], "is not NAME=VALUE"),
    (["--policy", "eb:refill="], "is not a whole number"),
    (["--policy", "eb:refill=0"], "outside 1..256"),
    (["--policy", "eb:refill=257"], "refill=257 is outside 1..256; choose at most as many as slots"),
    (["--policy", "eb:refill=4,refill=5"], "refill is set twice"),
    (["--policy", "eb:slots=400,refill=3"], "exceeds the engine's 256; raise --slots"),
    (["--policy", "mixed:budget=9999"], "exceeds the engine's 8192; raise --budget"),
    (["--policy", "mixed:budget=1"], "a step must hold a token for each decode"),
    (["--policy", "v0:refill=3"], "unknown parameter of policy v0 'refill'"),
    (["--policy", "eb-online:cost=3"], "unknown parameter of policy eb-online 'cost'"),
    (["--policy", "eb-online:prior=nan"], "prior='nan' is not a finite number"),
    (["--policy", "mixed", "--policy", "v0"], "simulate runs one policy", "headgate compare"),
    (["--set", "refil=3", "--policy", "eb"], "did you mean 'refill'?"),
    (["--set", "refill"], "is not NAME=VALUE; write it as --set refill=48"),
    (["--set", "=3"], "is not NAME=VALUE"),
    (["--set", "slots=1e3"], "slots='1e3' is not a whole number"),
    (["--set", "slots=4", "--set", "slots=5"], "--set slots is given twice"),
    (["--card", "h200-qwen3-8b"], "did you mean 'pub-h200-qwen3-8b'? headgate card list shows all"),
    (["--card", ""], "unknown card ''; choose from: cal-h200-qwen3-30b-a3b, cal-h200"),
    (["--card", "nope.json"], "card file nope.json: No such file", "built-in names"),
    (["--card", "./"], "card file ./: Is a directory"),
    (["--trace", "azure-con"], "did you mean 'azure-conv'?"),
    (["--trace", ""], "unknown trace ''"),
    (["--trace", "nope.csv"], "nope.csv: no such file; check the path"),
    (["--trace", "."], ".: is a directory"),
    (["--trace", "/dev/null"], "/dev/null: the file is empty"),
    (["--workload", "nope"], "unknown length law 'nope'; choose from: fixed"),
    (["--prompt-law", "gama"], "did you mean 'gamma'?"),
    (["--workload", "lengths=nope.txt"], "nope.txt: no such file"),
    (["--workload", "lengths="], "write lengths=FILE"),
    (["--arrivals", "gama", "--rate", "3"], "did you mean 'gamma'?"),
    (["--trace", "azure-conv", "--slice", "x"], "write it as 10min..20min"),
    (["--trace", "azure-conv", "--slice", "2min..1min"], "write the earlier time first"),
    (["--trace", "azure-conv", "--slice", "20min..30min"], "no request arrives from 1200 s to 1800 s"),
    (["--trace", "azure-conv", "--requests", "99999"], "the trace has 3118; ask for fewer"),
    (["nope.toml"], "experiment file nope.toml: No such file"),
    (["."], "experiment file .: Is a directory"),
    ([""], "experiment file"),
    (["--mix", "nope.toml"], "mix file nope.toml: No such file"),
    (["--mix", ""], "mix file"),
    # words that would be ignored
    (["--clients", "3", "--rate", "5"], "--clients and --rate are two kinds of load; choose one"),
    (["--arrivals", "all-at-once", "--rate", "3"], "two kinds of load"),
    (["--arrivals", "all-at-once", "--clients", "3"], "two kinds of load"),
    (["--arrivals", "poisson"], "--arrivals needs --rate"),
    (["--burstiness", "2"], "--burstiness needs --rate"),
    (["--clients", "3", "--burstiness", "2"], "--burstiness needs --rate"),
    (["--arrivals", "all-at-once", "--burstiness", "2"], "all requests are there at the start"),
    (["--arrivals", "poisson", "--rate", "3", "--burstiness", "2"], "drop it or choose 'gamma'"),
    (["--arrivals", "constant", "--rate", "3", "--burstiness", "2"], "have no burstiness"),
    (["--shape", "2"], "--shape belongs to gamma lengths"),
    (["--sigma", "2"], "--sigma belongs to lognormal lengths"),
    (["--workload", "fixed", "--spread", "0.2"], "--spread belongs to uniform lengths"),
    (["--prompt-law", "fixed", "--output-law", "gamma", "--workload", "gamma"], "--workload is replaced by"),
    (["--trace", "azure-conv", "--prompt", "2"], "--prompt makes lengths"),
    (["--trace", "azure-conv", "--output", "2"], "--output makes lengths"),
    (["--trace", "azure-conv", "--shape", "2"], "--shape makes lengths"),
    (["--trace", "azure-conv", "--sigma", "2"], "--sigma makes lengths"),
    (["--trace", "azure-conv", "--spread", "0.2"], "--spread makes lengths"),
    (["--trace", "azure-conv", "--workload", "uniform"], "--workload makes lengths"),
    (["--trace", "azure-conv", "--prompt-law", "fixed"], "--prompt-law makes lengths"),
    (["--trace", "azure-conv", "--burstiness", "2"], "--burstiness needs --rate"),
    (["--trace", "azure-conv", "--scale-rate", "2", "--rate", "4"], "--scale-rate changes the trace's"),
    (["--trace", "azure-conv", "--scale-rate", "2", "--clients", "4"], "--scale-rate changes"),
    (["--trace", "azure-conv", "--scale-rate", "2", "--arrivals", "all-at-once"], "--scale-rate changes"),
    (["--trace", "azure-conv", "--format", "vidur"], "drop --format"),
    (["--format", "azure"], "--format is about traces"),
    (["--slice", "1..2"], "--slice is about traces"),
    (["--scale-rate", "2"], "--scale-rate is about traces"),
    (["--skip-bad-rows"], "--skip-bad-rows is about traces"),
    (["--detailed"], "--detailed is about --json"),
    (["--overwrite"], "--overwrite without --out"),
    # places
    (["--out", ""], "--out is empty"),
    (["--out", "/dev/null"], "--out /dev/null is a file; name a folder"),
    (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory; choose another"),
    (["--out", "/proc/x/y"], "--out /proc/x/y: No such file or directory; choose another"),
    (["--out", "a" * 300], "File name too long"),
    (["--json", ""], "is a folder; name a file"),
    (["--json", "."], "is a folder; name a file"),
    (["--json", "no/such.json"], "its folder does not exist; create it"),
    (["--json", "/dev/null/x"], "--json /dev/null/x"),
    (["--json", "a" * 300], "File name too long"),
    # the shape of the command
    (["--slot", "3"], "No such option: --slot", "--slots"),
    (["--slots"], "requires an argument"),
    (["a.toml", "b.toml"], "unexpected extra argument"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "fragments"), [(args, fragments) for args, *fragments in COMBINATIONS])
def test_flags_of_a_run(refused, args, fragments):
    refused(["simulate", *args], *fragments)


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["simulat"], "Did you mean 'simulate'"),
        (["--nope"], "No such option: --nope"),
        (["doctor", "--json", "/"], "is a folder"),
        (["doctor", "x"], "unexpected extra argument"),
        (["demo", "--out", "/dev/null"], "is a file"),
        (["demo", "--out", "/dev/null/x"], "Not a directory"),
        (["compare"], "at least two different policies; pass --policy mixed --policy v0"),
        (["compare", "--policy", "mixed"], "at least two"),
        (["compare", "--policy", "mixed", "--policy", "mixed"], "'mixed' is there twice"),
        (["compare", "--policy", "mixed", "--policy", "mixed:slots=256"], "'mixed:slots=256' is there twice"),
        (["compare", "--policy", "eb:refill=4", "--policy", "eb: refill=4"], "there twice"),
        (["compare", *("--policy", "eb:refill=4,slots=8", "--policy", "eb:slots=8,refill=4")], "there twice"),
        ([*TWO, "--policy", "eb"], "policy eb needs refill"),
        (["compare", "--policy", "mixed", "--policy", "../x"], "unknown policy '../x'"),
        ([*TWO, "--set", "slot=5"], "did you mean 'slots'?"),
        ([*TWO, "--seeds", "0"], "--seeds"),
        ([*TWO, "--seeds", HUGE], "--seeds"),
        ([*TWO, "--seeds", "2", "--trace", "azure-conv"], "drop --seeds"),
        ([*TWO, "--seeds", "2", "--workload", "fixed"], "drop --seeds"),
        ([*TWO, "--out", "/dev/null"], "is a file"),
        ([*TWO, "--json", "."], "is a folder"),
        ([*TWO, "--overwrite"], "--overwrite without --out"),
    ],
)  # fmt: skip
def test_other_commands(refused, args, fragment):
    refused(args, fragment)


@pytest.mark.parametrize("command", [[], ["simulate"], ["compare"], ["demo"], ["doctor"]])
def test_help(headgate, command):
    said = headgate(*command, "--help")
    assert said.code == 0 and "Usage: headgate" in said.out and said.err == ""


def test_no_command_shows_the_help(headgate):
    said = headgate()
    assert said.code == 2 and "Usage: headgate" in said.out and said.err == ""


def test_a_package_that_is_not_there_is_named(headgate, monkeypatch):
    """As in the environment of `make demo`, which has no servers."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in [name for name in sys.modules if name.startswith("headgate.live.")]:
        monkeypatch.delitem(sys.modules, name)
    said = headgate("watch", "--engine", "http://127.0.0.1:9")
    assert said.code == 2 and "needs package aiohttp; pip install headgate" in said.err, said
