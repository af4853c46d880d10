"""`headgate plan`: what is printed, the JSON, the examples of --help, exit codes."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from headgate.cli import app, main
from headgate.cli.plan import flags, threshold


def run(*words: str) -> str:
    found = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def flat(text: str) -> str:
    return " ".join(text.split())


def examples() -> list[list[str]]:
    lines = re.sub(r"\n {8,}", " ", threshold.__doc__ + flags.__doc__).splitlines()
    return [shlex.split(line)[2:] for line in lines if line.strip().startswith("headgate plan")]


@pytest.mark.parametrize("words", examples(), ids=lambda words: " ".join(words)[:40])
def test_examples_of_the_help_work_and_fit(words: list[str]) -> None:
    out = run(*words)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out


def test_help_shows_the_examples_whole() -> None:
    for command in ("threshold", "flags"):
        found = CliRunner().invoke(app, ["plan", command, "--help"], env={"COLUMNS": "80"})
        assert f"headgate plan {command} --" in found.stdout
        assert "Examples:" in found.stdout


def test_threshold_says_all_of_it() -> None:
    out = flat(run("threshold", "--prompt", "512", "--output", "256", "--slots", "512", "--clients", "1024"))
    for part in (
        "card cal-h200-qwen3-8b, uniform lengths",
        "Lengths prompt 51",
        "Prefill step 2.536 ms + 22.66 us per prompt token",
        "Decode step",
        "Mixed step",
        "812,144 KV tokens: safe for",
        "best in a steady state, θ*: use this",
        "base share θ0, equation (3)",
        "TPOT (ms)",
        "longest gap",
        "TTFT (s)",
        "At 1,024 clients exclusive batches serve 4.",
        "Exclusive batches win from",
        "below about 2 % are within the error",
    ):
        assert part in out, part


def test_threshold_of_equal_outputs() -> None:
    words = ["--workload", "fixed", "--prompt", "512", "--output", "257", "--max-gap", "100ms"]
    out = flat(run("threshold", *words))
    assert "base share θ0, equation (3): use this" in out and "Outputs are nearly equal" in out
    assert "Gaps within 100 ms: refill at most" in out


def test_verdicts() -> None:
    lengths = ["--prompt", "512", "--output", "256"]
    assert "With a queue that never empties exclusive" in flat(run("threshold", *lengths, "--slots", "512"))
    light = flat(run("threshold", *lengths, "--clients", "8"))
    assert "stay with --policy mixed" in light
    assert "more than either can serve" in flat(run("threshold", *lengths, "--rate", "500"))
    idle = flat(run("threshold", *lengths, "--rate", "5"))
    assert "(about" in idle and "both modes serve every request: no throughput to gain" in idle
    assert "Saturated, exclusive batches serve" in idle
    none = flat(run("threshold", *lengths, "--max-gap", "1ms"))
    assert "No refill keeps gaps within 1 ms" in none
    free = flat(run("threshold", *lengths, "--max-gap", "10s"))
    assert "That refill keeps gaps within 10 s" in free


def test_threshold_json(tmp_path) -> None:
    found = json.loads(
        run("threshold", "--prompt", "512", "--output", "256", "--clients", "64", "--json", "-")
    )
    assert set(found["thresholds"]) == {"stationary", "base"}
    assert found["chosen"]["refill"] == found["thresholds"]["stationary"]["refill"]
    assert found["load"] == {"clients": 64, "rate": None, "concurrent": 64}
    assert found["winner"] in ("exclusive", "mixed", "either")
    target = tmp_path / "plan.json"
    run("threshold", "--max-gap", "1ms", "--kv-tokens", "60000", "--json", str(target))
    assert json.loads(target.read_text())["engine"]["kv_tokens"] == 60_000


def test_flags_say_why_and_print_the_command() -> None:
    out = run("flags", "--trace", "azure-conv", "--tpot", "50ms", "--ttft", "500ms")
    # With its reason, in the command and in the answer; the last one also where its 503 is explained.
    for name, times in (
        ("--max-num-seqs", 3),
        ("--max-num-batched-tokens", 3),
        ("--max-num-queued-tokens", 4),
    ):
        assert out.count(name) == times
    assert "vllm serve Qwen/Qwen3-8B --max-model-len 17408 --max-num-seqs" in out
    assert "Known to vLLM from 0.29 on" in flat(out)
    without = run("flags", "--trace", "azure-conv")
    assert "--max-num-queued-tokens" not in without
    assert "vllm serve Qwen/Qwen3-8B --max-model-len 17408 --max-num-seqs" in without


def test_flags_check_and_json() -> None:
    words = ["flags", "--prompt", "128", "--output", "32", "--tpot", "30ms", "--ttft", "1s", "--rate", "5"]
    text = run(*words, "--requests", "200", "--check")
    assert "advised" in text and "headgate's" in text and "vLLM's" in text and "kept" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    found = json.loads(run(*words, "--requests", "200", "--check", "--json", "-"))
    assert found["check"]["load"].endswith("requests/s")
    assert [each["label"] for each in found["check"]["runs"]] == [
        "advised",
        "headgate's",
        "vLLM's",
    ]
    assert found["flags"]["--max-num-seqs"]["value"] == found["check"]["runs"][0]["slots"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["threshold", "--max-gap", "0s"], "--max-gap 0s: it must be above 0"),
        (["threshold", "--max-gap", "soon"], "'soon' is not a duration"),
        (["threshold", "--slots", "5000"], "is more than card"),
        (["threshold", "--kv-tokens", "200"], "no request fits"),
        (["threshold", "--trace", "azure-conv", "--prompt", "5"], "--trace brings its own"),
        (["flags", "--tpot", "1ms"], "one request alone needs"),
        (["flags", "--ttft", "5ms"], "at full load a mean prompt alone takes"),
        (["flags", "--json", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["headgate", "plan", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
