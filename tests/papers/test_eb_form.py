"""Steps in the form of the paper: published coefficients come back, medians bear outliers."""

from __future__ import annotations

import numpy as np
import pytest

from headgate.cost.fit.steps import StepTable
from headgate_papers.eb.form import main, paper_form

PREFILL, DECODE = (1.278593e-3, 2.485255e-5), (8.921182e-3, 4.586468e-5)  # Qwen3-8B on H200, published
ALPHA = 0.011
BEND = -0.69 * 0.02 / (2 * 4096)  # kappa of the H200, published
BY_SHARE = 0.04 / 4096, (0.02 - 0.04) / 4096 - BEND, BEND


def table(spoil=lambda seconds: seconds, repeats=5):
    """Batches of many sizes, each timed several times."""
    rows = [(0, tokens) for tokens in (256, 512, 1024, 2048, 4096)]
    rows += [(decodes, 0) for decodes in (16, 32, 64, 128, 256, 384, 512)]
    rows += [(decodes, tokens) for decodes in (32, 128, 512) for tokens in (64, 512, 2048)]
    decodes, prefill = (np.repeat(np.array(side, float), repeats) for side in zip(*rows, strict=True))
    tokens = decodes + prefill
    share = decodes / tokens
    mixed = ALPHA + np.polynomial.polynomial.polyval(share, BY_SHARE) * tokens
    alone = np.where(prefill > 0, PREFILL[0] + PREFILL[1] * prefill, DECODE[0] + DECODE[1] * decodes)
    seconds = np.where((decodes > 0) & (prefill > 0), mixed, alone)
    columns = {"seconds": spoil(seconds), "decodes": decodes, "context": decodes * 512, "prefill": prefill}
    return StepTable.from_columns(columns)


def test_published_coefficients_come_back():
    found = paper_form(table())
    assert (found.prefill.alpha, found.prefill.beta) == pytest.approx(PREFILL, rel=1e-9)
    assert (found.decode.alpha, found.decode.beta) == pytest.approx(DECODE, rel=1e-9)
    assert found.mixed.alpha == pytest.approx(ALPHA, rel=1e-9)
    assert found.mixed.by_share == pytest.approx(BY_SHARE, rel=1e-7)
    assert found.mixed.kappa == pytest.approx(-0.69, rel=1e-7)
    assert [part.r2 for part in (found.prefill, found.decode, found.mixed)] == pytest.approx([1, 1, 1])
    assert [part.sizes for part in (found.prefill, found.decode, found.mixed)] == [5, 7, 9]


def test_medians_bear_a_step_that_took_ten_times_as_long():
    def spoil(seconds):
        seconds = seconds.copy()
        seconds[::5] *= 10
        return seconds

    assert paper_form(table(spoil)) == paper_form(table())


def test_r2_falls_with_what_a_line_does_not_explain():
    bent = paper_form(table(lambda seconds: seconds**1.2))
    assert 0.9 < bent.prefill.r2 < 0.9999


def test_too_few_sizes_are_said():
    few = StepTable.from_columns(
        {"seconds": [0.01, 0.02], "decodes": [1, 2], "context": [9, 9], "prefill": [0, 0]}
    )
    found = paper_form(few)
    assert (found.prefill, found.decode, found.mixed) == (None, None, None)
    assert [line for line in found.lines() if "fewer than" in line] == found.lines()[1:]


def test_lines_name_units_and_fit_a_terminal():
    lines = paper_form(table()).lines()
    assert max(map(len, lines)) <= 80
    assert "alpha 1.279 ms, beta 24.85 us per token, R2 1.0000 (5 sizes)" in lines[1]
    assert "kappa -0.69" in lines[-1]


def test_the_program_reads_saved_steps(tmp_path, capsys):
    table().save(tmp_path / "card.steps.npz")
    main([str(tmp_path / "card.steps.npz")])
    assert capsys.readouterr().out.splitlines() == paper_form(table()).lines()
