"""The leaderboard, small and whole: a board with a policy of its own, its cache, its page, its refusals."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from math import inf

import numpy as np
import pytest

from headgate.advisor.capacity.traffic import parse_levels
from headgate.cli import main
from headgate.experiment.library import card_engine, simulate
from headgate.experiment.workers import Workers
from headgate.stats.gaps import Gaps
from headgate.stats.measured import Measured
from headgate.workloads.workload import Kind, Slo, Workload
from headgate_leaderboard.board import (
    HIGHEST,
    LOADS,
    LOWEST,
    RATIO,
    crossing,
    gain,
    judge,
    next_step,
    read_board,
    read_lines,
    run_board,
    standing,
    standings,
)
from headgate_leaderboard.page import RESULTS, bar, into_markdown, leaderboard_page

OWN = """
from headgate import Mixed, Plan


class Halved(Mixed):
    def plan(self, view):
        plan = super().plan(view)
        return Plan(plan.decode, plan.prefill, plan.budget, 256) if plan.prefill else plan
"""
BOARD = """
card = "linear-h200-qwen3-8b"
slots = 64
budget = 2048
requests = 120
seeds = 2
baseline = "mixed"

[promises]
gaps = "ttft=300ms@p90,tbt=60ms@p95"
envelope = "ttft=300ms,envelope=60ms@p90"

[traces.short]
prompt = 800
output = 20

[traces.sessions]
prompt = 400
output = 20
turns = 3
think = "20ms"

[policies]
mixed = "mixed"
own = "policies/own.py:Halved"
"""


@contextmanager
def quiet(label, total):
    yield lambda done: None


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "own.py").write_text(OWN)
    (tmp_path / "board.toml").write_text(BOARD)
    return tmp_path


def ran(board, *policies):
    return run_board(board, policies or ("mixed", "own"), list(board.settings.traces), Workers(), quiet)


def test_a_board_from_end_to_end(folder, monkeypatch):
    monkeypatch.chdir(folder)
    board = read_board(folder / "board.toml")
    assert ran(board) == 2 * 2 * 2  # policies, traces, seeds
    assert ran(read_board(folder / "board.toml")) == 0  # all is known
    lines = standings(board, board.settings.policies)
    assert set(lines) == {(policy, trace) for policy in ("mixed", "own") for trace in ("short", "sessions")}
    for rows in lines.values():
        assert {line["seed"] for line in rows} == {0, 1}
        assert all(set(LOADS) <= {line["load"] for line in rows if line["seed"] == seed} for seed in (0, 1))
        assert all(0 <= line["kept"][promise] <= 1 for line in rows for promise in board.promises)
    mixed, own = (standing(lines[name, "short"], "gaps") for name in ("mixed", "own"))
    assert 0 < mixed.capacity.value <= 1 and mixed.capacity.value != own.capacity.value
    assert gain(mixed, mixed).value == 0
    text = into_markdown(leaderboard_page(board, lines, ["mixed", "own"], []), f"# Words\n\n{RESULTS}\n\nold")
    assert text.startswith("# Words") and "old" not in text
    assert "| `own` |" in text and "█" in text and "## By gaps" in text and "## By envelope" in text
    assert into_markdown(leaderboard_page(board, lines, ["mixed", "own"], []), text) == text
    assert "percent of λ\\*, the rate" in text and "λ*" not in text


def test_only_what_changed_is_run_again(folder):
    board = read_board(folder / "board.toml")
    ran(board)
    before = read_lines(board.results, "mixed")
    (folder / "policies" / "own.py").write_text(OWN.replace("256", "128"))
    assert ran(read_board(folder / "board.toml")) == 4  # those of its own policy
    assert read_lines(board.results, "mixed") == before
    keys = {line["key"] for line in read_lines(board.results, "own")}
    assert len(keys) == 4  # none is left of the file as it was
    fewer = read_board(folder / "board.toml", seeds=1, requests=110)
    assert ran(fewer, "own") == 2
    assert {line["requests"] for line in read_lines(board.results, "own")} == {110}


def test_lines_do_not_depend_on_processes(folder):
    alone, together = (read_board(folder / "board.toml", folder / str(jobs)) for jobs in (1, 2))
    for board, jobs in ((alone, 1), (together, 2)):
        run_board(board, ("own",), ("short",), Workers(jobs), quiet)
    one, two = (
        [
            {key: value for key, value in line.items() if key != "cpu_seconds"}
            for line in read_lines(board.results, "own")
        ]
        for board in (alone, together)
    )
    assert one == two


@pytest.mark.parametrize("at", [0.95, 0.9, 0.61, 0.3, 1.5, 0.01])
def test_the_grid_is_searched_to_two_neighbours(at):
    ratios: dict[int, float] = {}
    while (step := next_step(ratios)) is not None:
        assert HIGHEST <= step <= LOWEST and step not in ratios
        ratios[step] = LOADS[0] * RATIO**step / at
    assert len(ratios) <= 12
    found = crossing({LOADS[0] * RATIO**step: ratio for step, ratio in ratios.items()})
    assert found == pytest.approx(min(at, 1.0) if at > 0.1 else 0.0, rel=1e-9)


def test_a_run_that_stopped_is_missed():
    assert next_step({0: None}) == 4
    assert crossing({0.9: None, 0.8: 0.5}) == pytest.approx(0.85)
    assert crossing({0.9: None}) == 0.0
    assert crossing({0.9: 1.2, 0.8: 1.1, 0.7: 0.9, 0.6: 1.3}) == 0.0  # below one that missed nothing counts


def test_requests_are_judged_one_by_one():
    """Against every token laid out."""
    engine = card_engine("linear-h200-qwen3-8b", slots=32)
    draw = np.random.default_rng(3)
    prompt, arrival = draw.integers(50, 3000, 200), np.sort(draw.uniform(0, 14, 200))
    kinds = (Kind("", Slo(0.25, 0.05)),)
    run = simulate(engine, "mixed", Workload.of(prompt, [30] * 200, arrival=arrival, kinds=kinds))
    found = Measured(run)
    window, ttft = found.window.keep, run.requests["first_token"] - run.requests["arrival"]
    gaps = [max(each, default=0.0) for each in Gaps(run).lists()]
    met = (ttft <= 0.25) & (np.array(gaps) <= 0.05)
    judged = judge(found, parse_levels(["ttft=250ms@p95,tbt=50ms@p99"]))
    assert judged.kept == pytest.approx(np.mean(met[window]))
    low, high = np.quantile(run.requests["prompt"][window], (0.25, 0.75))
    short, long = (window & (run.requests["prompt"] <= low)), (window & (run.requests["prompt"] >= high))
    assert judged.long_to_short == pytest.approx(np.mean(met[long]) / np.mean(met[short]))
    by_envelope = judge(found, parse_levels(["ttft=250ms,envelope=50ms@p95"]))
    assert by_envelope.kept >= judged.kept  # kept gaps and a first token in time keep the envelope
    assert 0 < judged.kept < 1 and judged.ratio > 1 and judged.ratio != inf


def test_bars_end_at_the_bound():
    assert bar(1.0) == "████████" and bar(0.5) == "████····" and bar(0.0) == "········"
    assert len(bar(0.47)) == 8


def refused(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["headgate", "leaderboard", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('baseline = "mixed"', 'baseline = "mixt"', "did you mean 'mixed'"),
        ('own = "policies', '"../own" = "policies', "letters, digits"),
        ("policies/own.py:Halved", "policies/none.py:Halved", "no file"),
        ("policies/own.py:Halved", "policies/own.py:Whole", "unknown policy"),
        ("tbt=60ms@p95", "tbt=60@p95", "promises"),
        ("turns = 3", "tunrs = 3", "traces.sessions"),
        ("requests = 120", "requests = -1", "requests"),
        ('[policies]\nmixed = "mixed"', "[policies]", "baseline"),
    ],
)
def test_a_wrong_board_is_refused_in_one_line(folder, monkeypatch, capsys, old, new, said):
    assert old in BOARD
    (folder / "board.toml").write_text(BOARD.replace(old, new))
    assert said in refused(monkeypatch, capsys, "--board", str(folder / "board.toml"), "--jobs", "1")


def test_wrong_words_are_refused_in_one_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    board = ("--board", "board.toml")
    assert "run this in a clone" in refused(monkeypatch, capsys)
    assert "unknown policy of board" in refused(monkeypatch, capsys, *board, "--policy", "ownn")
    assert "drop --known" in refused(monkeypatch, capsys, *board, "--known")
    (folder / "page.md").write_text("no such line")
    assert "add it where" in refused(monkeypatch, capsys, *board, "--page", "page.md")
    (folder / "results").mkdir()
    (folder / "results" / "own.jsonl").write_text("{}\n")
    assert "not a file of results" in refused(monkeypatch, capsys, *board, "--policy", "own", "--jobs", "1")


def test_the_command_shows_what_was_asked_for(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = [
        "--board",
        "board.toml",
        "--policy",
        "own",
        "--trace",
        "short",
        "--jobs",
        "1",
        "--page",
        "page.md",
    ]
    monkeypatch.setattr(sys, "argv", ["headgate", "leaderboard", *words, "--report", "board.html"])
    with pytest.raises(SystemExit) as left:
        main()
    out = capsys.readouterr().out
    assert left.value.code == 0 and "own" in out and "Capacity" in out
    assert "| `own` |" in (folder / "page.md").read_text()
    assert "<svg" in (folder / "board.html").read_text()
    first = json.loads((folder / "results" / "own.jsonl").read_text().splitlines()[0])
    assert (
        first["policy"] == "own"
        and first["trace"] == "short"
        and (folder / "results" / "mixed.jsonl").exists()  # what it is compared with
    )
