"""The studies of step logs: a known interference is found, logs of both kinds are read, figures are whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up import ABOUT, timed

from headgate.core.errors import InputError
from headgate.cost.fit.fit import fit
from headgate.cost.fit.steps import StepTable
from headgate.cost.laws.work import WorkTerms
from studies.cards import held_out, interference, mixed_cells
from studies.cards.step_logs import prompts_of, read_steps

PLAIN = WorkTerms(2e-3, 2.2e-5, 6e-6, 3.3e-8)
COLUMNS = ["began", "scheduling", "decodes", "context", "prefill", "behind", "ended"]


def steps(path: Path, terms: WorkTerms, seed: int = 0) -> Path:
    timed(terms, noise=0.005, late=0.01, seed=seed).save(path)
    return path


def test_a_known_interference_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = replace(PLAIN, mixed_constant=8e-3)
    logs = [steps(tmp_path / f"grid{seed}.npz", slower, seed) for seed in range(3)]
    figure, points = tmp_path / "figure.svg", tmp_path / "points.json"
    interference.main([*map(str, logs), "--out", str(figure), "--json", str(points)])
    table = read_steps(logs)
    found = interference.bursts(table, interference.WorkCost(PLAIN))
    saved = PLAIN.constant  # one step instead of two
    assert np.median(found.excess) == pytest.approx(8e-3 - saved, rel=0.1)
    assert ElementTree.fromstring(figure.read_text()).tag.endswith("svg")
    assert "36 bursts" in capsys.readouterr().out
    assert '"label"' in points.read_text()


def test_a_mixed_cell_stands_beside_its_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [  # part, decodes, prompt tokens, seconds: the end before prompts is seen 2 s late
        *((0, 8, 0, 3.0) for _ in range(4)),
        *((1, 8, 0, 5.0), (1, 0, 512, 6.0), (1, 0, 512, 8.0)),  # prompts alone: 8 s each
        *((2, 8, 0, 5.0), (2, 8, 512, 7.9), (2, 8, 512, 9.9)),  # together: 9.9 s each
    ]
    part, decodes, prefill, seconds = np.array(rows).T
    given = {"seconds": seconds, "decodes": decodes, "context": 100 * decodes, "prefill": prefill}
    given |= {"part": part, "prompts": prefill > 0}
    StepTable.from_columns(given, ("decodes", "prompts", "both")).save(tmp_path / "cells.npz")
    mixed_cells.main([str(tmp_path / "cells.npz")])
    (row,) = mixed_cells.rows(StepTable.load(tmp_path / "cells.npz"))
    assert (row.together, row.decode, row.prompts) == pytest.approx((9.9, 3.0, 8.0))
    assert "up to 1024 tokens: median -10.0 %, 1 cells" in capsys.readouterr().out


def test_without_mixed_steps_there_is_nothing_to_say(tmp_path: Path) -> None:
    table = timed(PLAIN)
    path = tmp_path / "pure.npz"
    table.take(table.kind != interference.MIXED).save(path)
    with pytest.raises(SystemExit, match="no step mixes decodes and prompts"):
        interference.main([str(path), "--out", str(tmp_path / "figure.svg")])


def test_a_card_against_unseen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card, unseen = tmp_path / "card.json", steps(tmp_path / "unseen.npz", PLAIN, seed=7)
    fit(timed(PLAIN, noise=0.005), ABOUT).card().save(card)
    held_out.main(["--card", str(card), "--test", str(unseen)])
    said = capsys.readouterr().out
    worst = float(said.split("worst ")[1].split(" %")[0])
    assert worst < 12
    with pytest.raises(SystemExit, match="card linear-h200-qwen3-8b was not calibrated"):
        held_out.main(["--card", "linear-h200-qwen3-8b", "--test", str(unseen)])


def test_logs_of_the_h200_runs(tmp_path: Path) -> None:
    path = tmp_path / "512_512-512_plain_0.npz"
    log = [
        [0.00, 0.01, 4, 400, 0, 0, 0.10],
        [0.02, 0.01, 4, 404, 0, 0, 0.15],
        [0.11, 0.01, 0, 0, 1024, 0, 0.35],
        [0.40, 0.02, 4, 408, 0, 0, 0.50],  # composed when the one before had ended
        [0.43, 0.01, 4, 412, 0, 0, 0.55],
    ]
    np.savez(path, log=np.array(log, dtype=float), columns=np.array(COLUMNS))
    table = read_steps([path])  # the first and the last have no neighbour
    assert table.seconds.tolist() == pytest.approx([0.05, 0.20, 0.08])
    assert table.context.tolist() == [408, 0, 412]
    assert table.prompts.tolist() == [0, 2, 0]
    assert table.attention[1] == pytest.approx(1024 * 512 * 13 / 24)
    assert table.busy.tolist() == [True, False, True]
    assert prompts_of("512_mix_eb+_0")[0] == pytest.approx((512 + 1024 + 128) / 3)
    assert np.isnan(prompts_of("something else")[0])
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(InputError, match="no step log"):
        read_steps([tmp_path / "bad.npz"])
