"""The simulator against recorded runs of a real engine, with a card that had not seen them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from studies.cards.step_logs import read_steps
from studies.fidelity import compare, launches

RESULTS = Path(__file__).parents[3] / "studies" / "fidelity" / "results"
CARD = "cal-h200-qwen3-8b"


def test_an_engine_short_of_memory(tmp_path, capsys):
    """384 preemptions in 24 s; composing ahead finds them, composing at the end of a step does not."""
    lines = (RESULTS / "scenes.jsonl").read_text().splitlines()
    wanted = [line for line in lines if "about" in line[:10] or "pressure_eb" in line]
    (tmp_path / "scenes.jsonl").write_text("\n".join(wanted))
    (tmp_path / "pressure_eb-refill-64.npz").symlink_to(RESULTS / "pressure_eb-refill-64.npz")
    out = tmp_path / "errors.json"
    compare.main([str(tmp_path), "--card", CARD, "--json", str(out)])
    at_its_end, ahead = json.loads(out.read_text())["rows"]
    assert (at_its_end["lag"], ahead["lag"]) == (False, True)
    for name, goal in compare.GOALS.items():
        assert abs(ahead["figures"][name]["error"]) < goal
    assert abs(at_its_end["figures"]["tokens/s"]["error"]) > compare.GOALS["tokens/s"]
    assert ahead["preempted"]["simulated"] == pytest.approx(ahead["preempted"]["real"], rel=0.02)
    assert "| pressure |" in capsys.readouterr().out


def test_what_the_host_keeps_waiting():
    """The host of the grid explains how late tokens were in a run the grid knows nothing of."""
    table = read_steps([RESULTS / "closed-64_eb-refill-64.steps.npz"])
    card = load_card(CARD)
    rows = [line.split(" | ") for line in launches.lines(table, card, 1024) if "beyond graphs" in line]
    assert len(rows) == 1
    gpu, host, seen = float(rows[0][3]), float(rows[0][4]), float(rows[0][5].split(", ")[1])
    assert gpu < seen / 3
    assert host == pytest.approx(seen, rel=0.15)
    with pytest.raises(InputError, match="has no host"):
        launches.lines(table, load_card("linear-h200-qwen3-8b"), 1024)


def test_hosts_scatter_about_their_law():
    table, card = read_steps([RESULTS / "closed-64_plain.steps.npz"]), load_card(CARD)
    ten, half, ninety = map(float, re.findall(r"\d\.\d+", launches.scatter(table, card, 1024)))
    assert 0.5 < ten < half < ninety < 1.5
    assert half == pytest.approx(1, abs=0.2)
