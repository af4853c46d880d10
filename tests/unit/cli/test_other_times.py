"""Searches say what the other arrival times would answer, where that is something else."""

import json
from pathlib import Path

import pytest

HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
PROMISE = ("--slo", "ttft=300ms@p95", "--seeds", 1, "--jobs", 1, "--precision", 0.1)


@pytest.fixture
def bursts(tmp_path):
    """Thirty requests at once, every ten seconds."""
    rows = (f"{10 * (place // 30) + 0.01 * (place % 30)},800,20\n" for place in range(240))
    (tmp_path / "bursts.csv").write_text(HEADER + "".join(rows))
    return "bursts.csv"


@pytest.fixture
def calm(tmp_path):
    (tmp_path / "calm.csv").write_text(HEADER + "".join(f"{0.3 * place},800,20\n" for place in range(240)))
    return "calm.csv"


def asked(headgate, *args):
    said = headgate("plan", "capacity", *args, *PROMISE, "--requests", 240, "--json", "found.json")
    assert said.code == 0, said.err
    return " ".join(said.out.split()), json.loads(Path("found.json").read_text()).get("other_times")


def test_bursts_hold_less_than_poisson_says(headgate, bursts):
    said, other = asked(headgate, "--trace", bursts)
    assert other["recorded"] and other["other"] < 0.8 * other["answer"]
    assert "Arrival times decide: mixed sustains" in said and "ask again with --as-recorded" in said


def test_the_other_way_round(headgate, bursts):
    said, other = asked(headgate, "--trace", bursts, "--as-recorded")
    assert not other["recorded"] and other["other"] > 1.2 * other["answer"]
    assert "ask again without --as-recorded" in said


def test_fleets_too(headgate, bursts):
    said, other = asked(headgate, "--trace", bursts, "--find", "engines", "--rate", 20)
    assert other["recorded"] and other["other"] > other["answer"]
    assert f"needs {other['answer']} engines with Poisson arrivals and {other['other']} with" in said


def test_alike_answers_are_not_said(headgate, calm):
    said, other = asked(headgate, "--trace", calm)
    assert abs(other["other"] / other["answer"] - 1) < 0.2 and "Arrival times decide" not in said


def test_nothing_to_compare_with(headgate, tmp_path):
    (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "800,20\n" * 60)
    assert asked(headgate, "--prompt", 800, "--output", 20)[1] is None
    assert asked(headgate, "--trace", "lengths.csv")[1] is None


def test_advice_counts_engines_for_both(headgate, bursts):
    args = ("advise", "--trace", bursts, "--policy", "mixed", "--rate", 20, *PROMISE, "--requests", 240)
    said = headgate(*args, "--cache", "none", "--json", "found.json")
    other = json.loads(Path("found.json").read_text())["other_times"]
    assert other["other"] < 0.8 * other["answer"] and other["engines"] > 1
    assert f"Your load then needs {other['engines']} engines: plan for the larger number, " in " ".join(
        said.out.split()
    )


def test_the_larger_number_is_not_the_smaller_one(headgate, bursts):
    """One engine is enough with either; or the bursts need more than may be, and Poisson arrivals one."""
    args = ("advise", "--trace", bursts, "--policy", "mixed", *PROMISE, "--requests", 240, "--cache", "none")
    said = " ".join(headgate(*args, "--rate", 2).out.split())
    assert "Arrival times decide" in said and "Your load needs 1 engine with either." in said
    run = headgate(*args, "--rate", 20, "--as-recorded", "--engines-at-most", 1)
    said = " ".join(run.out.split())
    assert "needs more than 1 engine" in said and "then needs 1 engine: plan for more than 1." in said


def test_what_only_recorded_times_share_is_said(headgate, bursts):
    """One session all along: as recorded a prefix cache finds nearly everything, in drawn rows nothing."""
    lines = Path(bursts).read_text().splitlines()
    rows = ["arrival,prompt,output,session", *(f"{line},chat" for line in lines[1:])]
    Path("chat.csv").write_text("\n".join(rows))
    said, other = asked(headgate, "--trace", "chat.csv")
    assert other["shared"] and "Poisson arrivals, at the rates tried, which share no prefix" in said
    assert "with Poisson arrivals, which share no prefix" in said
