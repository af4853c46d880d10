"""`headgate advise`: the answer first, honest baselines beside it, lines that can be pasted."""

from __future__ import annotations

import json
import shlex

import pytest

from headgate.advisor.capacity.trials import Case

SMALL = ["--prompt", 600, "--output", 40, "--seeds", 2, "--jobs", 1, "--requests", 90, "--precision", 0.1]
PROMISE = ["--slo", "ttft=400ms@p95,tbt=60ms@p99"]
QUICK = ["advise", *SMALL, *PROMISE, "--policy", "keep", "--slots", 64]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_answer_first_then_plain_vllm_then_lines_to_paste(headgate, tmp_path):
    run = headgate(*QUICK, "--rate", 10, "--cache", "kept", "--report", "advice.html")
    assert run.code == 0, run.err
    said = flat(run.out)
    title, answer = run.out.split("\n\n")[:2]
    assert title == "Advice: card cal-h200-qwen3-8b, uniform lengths"
    assert answer.startswith("Run ") and "--max-num-seqs 64 --max-num-batched-tokens" in flat(answer)
    assert "requests/s" in answer and "Your load of 10.00 requests/s needs 1 engine; plain" in flat(answer)
    for part in (
        "asynchronous engine",
        "Plain vLLM at its own best flags",
        "plain, defaults",
        "gives way first",
    ):
        assert part in said
    page = (tmp_path / "advice.html").read_text()
    assert f"<strong>{flat(answer).split(' (95 %')[0].split('. Your')[0]}" in flat(page)


def test_lines_it_prints_are_taken(headgate):
    run = headgate(*QUICK, "--rate", 10, "--cache", "kept")
    text = run.out.replace("\\\n", " ")
    ours = next(line for line in text.splitlines() if line.startswith("headgate serve "))
    plain = next(line for line in text.splitlines() if line.startswith("vllm serve "))
    assert "--card cal-h200-qwen3-8b --ttft 400ms --tbt 60ms" in flat(ours)
    assert headgate(*shlex.split(ours)[1:], "--dry-run").code == 0
    assert shlex.split(plain)[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    flags = shlex.split(plain)[3:]
    assert flags[::2] == ["--max-num-seqs", "--max-num-batched-tokens", "--max-cudagraph-capture-size"]
    assert flags[5] == flags[3]  # graphs reach as far as steps


def test_a_second_question_is_answered_from_what_is_known(headgate, monkeypatch):
    first = json.loads(headgate(*QUICK, "--cache", "kept", "--json", "-").out)
    monkeypatch.setattr(Case, "run", lambda self, task: pytest.fail("simulated again"))
    again = json.loads(headgate(*QUICK, "--cache", "kept", "--json", "-").out)
    assert again["final"] == first["final"]
    with pytest.raises(pytest.fail.Exception, match="simulated again"):  # another question is another file
        headgate(*QUICK, "--cache", "kept", "--seed", 7)


def test_plain_vllm_is_tried_at_several_flags_and_at_its_defaults(headgate):
    found = json.loads(
        headgate("advise", *SMALL, *PROMISE, "--policy", "keep", "--cache", "none", "--json", "-").out
    )
    tried = {each["policy"] for each in found["first_round"]}
    assert "mixed, 1024 seats, 8192 tokens" in tried
    assert len([name for name in tried if name.startswith("mixed")]) >= 5
    final = {each["found"]["policy"]: each["found"]["rate"]["value"] for each in found["final"]}
    assert found["default"] == "mixed, 1024 seats, 8192 tokens" and found["default"] in final
    plain = [rate for name, rate in final.items() if name.startswith("mixed,")]
    assert final[found["plain"]] == max(plain)
    assert final[found["best"]] == max(final.values())


def test_a_load_beyond_one_engine_is_a_fleet(headgate):
    words = [*QUICK, "--cache", "none", "--engines-at-most", 8, "--json", "-"]
    one = json.loads(headgate(*words).out)
    assert one["load"] is None
    most = max(each["found"]["rate"]["value"] for each in one["final"])
    found = json.loads(headgate(*words, "--rate", round(2.5 * most, 1), "--requests", 200).out)
    best = next(each for each in found["final"] if each["found"]["policy"] == found["best"])
    assert best["engines"] >= 3 and best["fleet"]["router"] == "least-loaded"


def test_a_promise_is_needed(refused):
    refused(["advise", "--prompt", 100, "--output", 10], "advise needs a promise, such as --slo ttft=1s@p95")


def test_graphs_are_simulated_as_printed(headgate):
    words = [*QUICK, "--cache", "none", "--card", "cal-h200-qwen3-30b-a3b", "--requests", 40, "--seeds", 1]
    said = "Keep runs prompts in steps of at most"
    assert said not in flat(headgate(*words).out)
    small = flat(headgate(*words, "--graph", 256).out)
    assert "--max-cudagraph-capture-size 256" in small and f"{said} 256 tokens" in small
