"""`headgate report`, and the reports other commands write."""

from __future__ import annotations

import json
import os

import pytest

SMALL = ["--requests", 60, "--prompt", 60, "--output", 20, "--clients", 8]


@pytest.fixture
def compared(headgate):
    assert headgate("compare", "--policy", "mixed", "--policy", "v0", *SMALL, "--out", "both").code == 0
    return "both"


def test_compare_writes_a_report_beside_the_runs(headgate, compared, tmp_path):
    html = (tmp_path / "both/report.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and 'class="verdict"' in html


def test_a_report_of_a_folder_keeps_the_order_of_the_runs(headgate, compared, tmp_path):
    said = headgate("report", compared, "--out", "again.html", "--json", "verdict.json")
    assert said.code == 0 and "report: again.html" in said.out
    document = json.loads((tmp_path / "verdict.json").read_text())
    assert document["scenes"][0]["comparison"]["policies"] == ["mixed", "v0"]
    assert document["scenes"][0]["verdict"] in " ".join(said.out.split())
    assert max(map(len, said.out.splitlines())) <= 80


def test_another_baseline(headgate, compared):
    assert headgate("report", compared, "--baseline", "v0", "--json", "-").code == 0
    said = headgate("report", compared, "--baseline", "v1")
    assert said.code == 2 and "v1" in said.err and "v0" in said.err


def test_no_report_where_none_is_wanted(headgate, tmp_path):
    headgate("compare", "--policy", "mixed", "--policy", "v0", *SMALL, "--out", "quiet", "--report", "none")
    assert not (tmp_path / "quiet/report.html").exists() and not (tmp_path / "none").exists()


def test_simulate_writes_one_when_asked(headgate, tmp_path):
    assert headgate("simulate", *SMALL, "--out", "one", "--report", "one.html").code == 0
    assert (tmp_path / "one.html").stat().st_size > 10_000
    assert headgate("simulate", *SMALL, "--out", "two").code == 0
    assert [path.name for path in tmp_path.glob("*.html")] == ["one.html"]


def test_plans_write_one_when_asked(headgate, tmp_path):
    assert headgate("plan", "threshold", "--requests", 200, "--report", "plan.html").code == 0
    assert "Threshold curve" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["report", "nowhere"], ("nowhere", "folder")),
        (["report", "."], ("no run in folder",)),
        (["report", ".", "--out", "missing/report.html"], ("--out missing/report.html", "does not exist")),
        (["simulate", *SMALL, "--report", "."], ("--report . is a folder",)),
        (["compare", "--policy", "mixed", "--policy", "v0", *SMALL, "--report", "no/x"], ("--report no/x",)),
    ],
)
def test_bad_input_is_one_line(refused, args, words):
    refused(args, *words)


def test_no_color_may_stand_anywhere(headgate, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert headgate("doctor", "--no-color").code == 0
    assert os.environ.pop("NO_COLOR") == "1"
