"""Every experiment runs, its numbers are finite, and what it counts is counted."""

import json
import math

import pytest
from typer.testing import CliRunner

from as_text import as_text
from headgate.cli import app
from headgate.core.errors import InputError, RunError
from headgate.workloads.lengths import Fixed
from headgate_papers import EXPERIMENTS, Options, find, reproduce, serving
from headgate_papers.eb import split_runs, table3, table10
from headgate_papers.eb.published import CARDS, CHOICES, H200, TABLE3
from headgate_papers.eb.published_split import Scene
from headgate_papers.eb.split_runs import SplitJob, load_of
from headgate_papers.page import published_page
from headgate_papers.report import Cell, Count, Report, Row, Section, sign, sign_pairs
from headgate_papers.serving import Job, Load, Outcomes, card_cost, carry_out, run_job

QUICK = Options(quick=True)
RUNNER = CliRunner()


@pytest.fixture(scope="module", params=[name for name in sorted(EXPERIMENTS) if not name.startswith("wait-")])
def report(request):
    return reproduce(request.param, QUICK, find(request.param).jobs(QUICK))


def test_ratios_are_finite_and_positive(report):
    ratios = [ratio for section in report.sections for ratio in section.ratios()]
    assert ratios
    assert all(math.isfinite(ratio) and ratio >= 0 for ratio in ratios)


def test_every_cell_has_a_number_of_ours(report):
    missing = [
        row.setting
        for part in report.sections
        for row in part.rows
        for cell in row.cells
        if math.isnan(cell.ours)
    ]
    assert not missing or any("stopped" in remark for remark in report.remarks)


def test_counts_are_within_their_totals(report):
    assert report.counts
    assert all(0 <= count.agree <= count.of for count in report.counts)
    assert report.remarks and report.setup


def test_json_is_strict(report):
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert json.loads(text)["experiment"] == report.name


def test_text_fits_80_columns(report):
    out = as_text(published_page(report, []))
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


def test_counts_follow_the_numbers():
    """The same judge on invented outcomes: all signs right, then all wrong."""

    class Invented(Outcomes):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def figure(self, key, name):
            card, scene, policy = key
            gpu = next((gpu for (gpu, _), known in CARDS.items() if known == card), H200)
            if name == "exclusive":
                right = CHOICES[gpu, int(scene[2:])]
                return float(right if self.scale > 0 else not right)
            metric = {"tokens": "tok/s", "ttft": "TTFT", "tpot": "TPOT"}[name]
            published = TABLE3[gpu, scene][metric]
            base, mine = (
                published[0],
                published[table3.POLICIES.index(policy.replace(table3.PAPER, "eb-online"))],
            )
            return (base * (mine / base) ** self.scale) / (1e3 if name == "tpot" else 1)

    right = table3.judge(Invented(1), QUICK)
    assert all(count.agree == count.of for count in right.counts)
    assert all(ratio == pytest.approx(1) for section in right.sections for ratio in section.ratios())
    wrong = table3.judge(Invented(-1), QUICK)
    assert [count.agree for count in wrong.counts[:4]] == [0, 0, 0, 0]


def test_the_papers_rule_gives_the_papers_choices():
    for (gpu, clients), exclusive in CHOICES.items():
        assert table3.paper_choice(CARDS[gpu, "8B"], clients) is exclusive


def test_theory_of_table_10():
    """By the cost of a phase that Table 10 needs; one output token less, which the prompt brings."""
    shares = [table10.theory_shares(output) for output in (64, 256)]
    assert shares[0]["kernel"] == pytest.approx(0.064043, abs=1e-3)
    assert shares[1]["kernel"] == pytest.approx(0.032729, abs=2e-4)
    assert [share["phase"] for share in shares] == pytest.approx([0.483, 0.295], abs=4e-3)


def test_phase_overhead_replaces_the_prefill_constant():
    assert card_cost(CARDS[H200, "8B"], 0.5).prefill.constant == 0.5
    assert card_cost(CARDS[H200, "8B"]).prefill.constant == 1.278593e-3


def test_signs_and_ties():
    assert [sign(value, 100) for value in (100.5, 102, 98)] == [0, 1, -1]
    pairs = sign_pairs(
        [(Cell(100, 1), Cell(100.5, 2)), (Cell(100, 1), Cell(110, 0.5)), (Cell(1, 1), Cell(2, math.nan))]
    )
    assert pairs == [(1, -1)]
    assert Count.of_pairs("signs", pairs) == Count("signs", 0, 1)
    assert math.isnan(Cell(0, 1).ratio)


def test_runs_that_stop_have_no_number_and_are_named(monkeypatch):
    def stuck(engine, policy, workload):
        raise RunError("policy Stuck runs nothing; 3 waiting")

    monkeypatch.setattr(serving, "simulate", stuck)
    jobs = [
        Job(theta, "pub-h200-qwen3-8b", Load(1, 1, Fixed(8), Fixed(8)), "mixed", {}, 64) for theta in (1, 2)
    ]
    assert math.isnan(carry_out(run_job, jobs, 0).figure(1, "requests"))
    found = reproduce("eb-table13", QUICK, jobs)
    assert (
        found.remarks[-1]
        == "No number for 2 of 2 runs, which stopped. The first, 1: policy Stuck runs nothing."
    )
    json.dumps(found.as_dict(), allow_nan=False)


def test_points_are_shown_as_differences():
    table = Section("t", "s", ("a",), (Row("x", (Cell(1.0, 3.5),)),), points=True)
    out = as_text(published_page(Report("n", "t", (), (table,), (), ()), []))
    assert "+2.5" in out


def test_command_lists_runs_and_refuses(tmp_path):
    listed = RUNNER.invoke(app, ["reproduce"])
    assert all(name in listed.output for name in EXPERIMENTS)
    target = tmp_path / "table18.json"
    ran = RUNNER.invoke(app, ["reproduce", "eb-table18", "--quick", "--json", str(target)])
    assert ran.exit_code == 0
    assert json.loads(target.read_text())["quick"] is True
    refused = RUNNER.invoke(app, ["reproduce", "eb-table33"])
    assert isinstance(refused.exception, InputError)
    assert "eb-table" in str(refused.exception)


def test_the_sweep_of_chunk_sizes_is_what_the_card_was_fitted_to():
    report = reproduce("slai-fig5", QUICK, find("slai-fig5").jobs(QUICK))
    ratios = report.sections[0].ratios()
    assert len(ratios) == 14 and all(0.96 <= ratio <= 1.04 for ratio in ratios)


def test_a_send_that_occupies_the_prefill_engine_explains_the_h200_row_of_table_19():
    """The issue's figures: 39.6 ktok/s, TTFT 3.61 s, TPOT 22.8 ms; without the send 41.9 and 1.1 s."""
    scene = Scene(H200, 512, "512/256")
    job = SplitJob("row", CARDS[H200, "8B"], "1P+1D", 2, load_of(scene, 4000, (512, 256)))
    outcomes = carry_out(split_runs.run_split, [job], 0)
    assert outcomes.figure("row", "tokens") == pytest.approx(39_649, rel=0.02)
    assert outcomes.figure("row", "ttft") == pytest.approx(3.608, rel=0.12)
    assert outcomes.figure("row", "tpot") == pytest.approx(0.02281, rel=0.08)
