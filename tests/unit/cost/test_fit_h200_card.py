"""The measured card: the tool makes it again, and it fits as well as we say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from headgate.cost.card import load_card

ROOT = Path(__file__).resolve().parents[3]
RUNS = ("eb-512-1", "eb-512-48", "eb-512-128", "eb-512-192", "mb-512-0")
RESIDUALS = load_card("linear-h200-qwen3-8b").provenance.residuals


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_h200_card", ROOT / "tools" / "fit_h200_card.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_h200_card"] = module
    spec.loader.exec_module(module)
    return module


def test_the_tool_reproduces_the_card(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--out", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == tool.CARD.read_bytes()
    assert tool.main(["--check"]) == 0
    assert "held out" in capsys.readouterr().out


def test_check_notices_a_changed_card(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "changed.json").write_text(tool.CARD.read_text().replace("H200", "H100"))
    assert tool.main(["--check", "--out", str(tmp_path / "changed.json")]) == 1


def test_no_logs_is_a_usage_error(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(["--logs", str(tmp_path)])
    assert caught.value.code == 2


def test_no_time_is_lost(tool: ModuleType) -> None:
    for path in sorted(tool.LOGS.glob("*.npz")):
        entry = np.load(path)["log"][:, 0]
        run = tool.read_run(path)
        assert run.seconds.sum() == pytest.approx(entry[-1] - entry[0])
        assert run.pieces(run.seconds).sum() == pytest.approx(entry[-1] - entry[0])


def test_only_one_shift_fits(tool: ModuleType) -> None:
    scores = []
    for shift in (0, 1, 2):
        run = tool.read_run(tool.LOGS / "qwen3_8b_bal_eb_512_128_uniform.npz", shift)
        run.starts = np.arange(len(run.seconds))
        found = tool.terms([(run, None)])
        scores.append(tool.figures(run.seconds, tool.predict(run, found))["r2"])
    assert scores[1] > 0.99
    assert max(scores[0], scores[2]) < 0.9


@pytest.mark.parametrize(
    ("part", "r2", "median", "p95"),
    [
        ("all", 0.999, 0.03, 0.08),
        ("decode", 0.99, 0.03, 0.08),
        ("prefill", 0.999, 0.05, 0.15),
        ("mixed", 0.999, 0.01, 0.02),
    ],
)
def test_residuals_stay_below_the_bar(part: str, r2: float, median: float, p95: float) -> None:
    figures = RESIDUALS[part]
    assert figures["r2"] > r2
    assert figures["median"] < median
    assert figures["p95"] < p95


@pytest.mark.parametrize("run", RUNS)
def test_makespans_are_told_unseen_within_two_percent(run: str) -> None:
    assert abs(RESIDUALS[run]["total_error"]) < 0.01
    assert abs(RESIDUALS[f"{run} held out"]["total_error"]) < 0.02


def test_the_price_per_context_token_is_memory_speed() -> None:
    # 147,456 bytes of KV per token at 4.8 TB/s are 31 ns; nothing can be faster, and not much should be lost.
    per_context = load_card("linear-h200-qwen3-8b").cost.decode.per_context
    assert 0.98 * 147_456 / 4.8e12 < per_context < 1.25 * 147_456 / 4.8e12
