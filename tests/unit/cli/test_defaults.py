"""What is measured is what runs by default, and the first lines say what an answer rests on."""

from __future__ import annotations

import json

import pytest

import headgate as public
from headgate.cost.card import load_card
from headgate.experiment.settings import Experiment

SMALL = ["--requests", 60, "--prompt", 60, "--output", 20]
DEFAULT, LINES = "cal-h200-qwen3-8b", "linear-h200-qwen3-8b"


def flat(text: str) -> str:
    return " ".join(text.split())


def first_lines(text: str) -> str:
    """Up to the first empty line after the title."""
    return flat("\n".join(text.splitlines()[:8]))


def test_the_default_card_has_a_host_and_its_engine_composes_ahead(headgate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Experiment().card == DEFAULT and load_card(DEFAULT).host is not None
    assert headgate("simulate", "--rate", 5, *SMALL, "--out", "ahead").code == 0
    assert headgate("simulate", "--rate", 5, *SMALL, "--no-asynchronous", "--out", "plain").code == 0
    assert headgate("simulate", "--rate", 5, *SMALL, "--card", LINES, "--out", "lines").code == 0
    found = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("ahead", "plain", "lines")]
    assert [one["asynchronous"] for one in found] == [True, False, False]
    assert [one["card"] for one in found] == [DEFAULT, DEFAULT, LINES]


@pytest.mark.parametrize(
    ("words", "engine", "arrivals"),
    [
        (["simulate", "--rate", 12, *SMALL], "asynchronous engine", "Poisson arrivals, 12 requests/s"),
        (["simulate", "--clients", 4, *SMALL], "asynchronous engine", "4 clients in a closed loop"),
        (["simulate", "--no-asynchronous", *SMALL], "synchronous engine", "64 clients in a closed loop"),
        (
            ["simulate", "--engines", 2, "--rate", 9, *SMALL],
            "asynchronous engines (tokens seen at once)",
            "Poisson arrivals, 9 requests/s",
        ),
        (
            ["compare", "--policy", "mixed", "--policy", "v0", "--trace", "azure-conv", "--requests", 50],
            "asynchronous engine",
            "arrivals as recorded",
        ),
        (["sweep", "--over", "rate=4,8", "--jobs", 1, *SMALL], "asynchronous engine", "Poisson arrivals"),
        (
            ["plan", "threshold", "--prompt", 60, "--output", 20],
            "formulas of step times, no run",
            "a queue that never empties",
        ),
        (
            ["plan", "flags", "--trace", "azure-conv", "--scale-rate", 2],
            "formulas of step times, no run",
            "arrivals as recorded, 2 times as fast",
        ),
        (
            ["plan", "wait", "--rate", 5, "--prompt", 200, "--output", 100],
            "formulas of step times, no run",
            "Poisson arrivals, 5 requests/s",
        ),
        (
            ["plan", "fluid", "--engines", 4, "--trace", "azure-conv", "--rate", 20],
            "formulas of step times, no run",
            "Poisson arrivals, 20 requests/s",
        ),
    ],
    ids=lambda words: "-".join(map(str, words[:2])) if isinstance(words, list) else "",
)
def test_first_lines_say_card_engine_length_and_arrivals(headgate, words, engine, arrivals):
    run = headgate(*words)
    assert run.code == 0, run.err
    said = first_lines(run.out)
    for part in (f"Card {DEFAULT} (Qwen3-8B on NVIDIA H200), {engine}, ", "17,408 tokens a request at most"):
        assert part in said
    assert arrivals in said


def test_the_library_composes_ahead_where_the_card_knows_its_host():
    requests = public.generate(
        80, prompt=public.length_law("fixed", 400), output=public.length_law("fixed", 30)
    )
    engine = public.card_engine(DEFAULT, slots=16)
    times = [
        float(public.simulate(engine, "mixed", requests, **asked).requests["first_token"].mean())
        for asked in ({}, {"asynchronous": True}, {"asynchronous": False})
    ]
    assert times[0] == times[1] != times[2]
    plain = public.card_engine(LINES, slots=16)
    same = [
        float(public.simulate(plain, "mixed", requests, **asked).requests["first_token"].mean())
        for asked in ({}, {"asynchronous": False})
    ]
    assert same[0] == same[1]


def test_switches_are_swept(headgate):
    over = ["--over", "prefix-cache=true,false", "--turns", 3, "--jobs", 1]
    assert "prefix-cache false" in headgate("sweep", *over, "--rate", 5, "--requests", 40).out
    failed = headgate("sweep", "--over", "prefix-cache=maybe", "--rate", 5)
    assert failed.code == 2 and "prefix_cache: maybe is not allowed; give true or false" in failed.err
