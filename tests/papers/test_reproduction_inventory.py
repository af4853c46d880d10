"""docs/reproductions.md has every table and figure of the papers, papers/outputs what experiments print."""

from __future__ import annotations

import re
from pathlib import Path

from headgate_papers import EXPERIMENTS

ROOT = Path(__file__).parents[2]
PAGE, OUTPUTS = (ROOT / "docs" / "reproductions.md").read_text(), ROOT / "papers" / "outputs"
STATUS = ("reproduced", "differs", "cannot", "input")
AGAINST = ("number", "claim", "theory", "reference")


def rows() -> list[list[str]]:
    part = PAGE.split("\n## Inventory\n")[1].split("\n## ")[0]
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in found[2:]]


def test_every_row_has_a_status_and_says_why():
    papers = [row[0] for row in rows() if row[0].startswith("**")]
    assert len(papers) == 4
    for item, _, status, command, _ in (row for row in rows() if not row[0].startswith("**")):
        word, _, reason = status.partition(":")
        word, _, against = word.partition(", ")
        assert word in STATUS and reason.strip(), item
        assert (against.split(" ")[0] in AGAINST) == (word in ("reproduced", "differs")), item
        if word == "cannot":
            assert "missing" in status and not command, item
        if word in ("reproduced", "differs") and not command:
            assert "`" in status, f"{item}: neither a command nor a place"


def test_every_experiment_is_in_the_inventory_and_no_other():
    named = {name for row in rows() for name in re.findall(r"`([a-z0-9-]+)`", row[3])}
    assert named == set(EXPERIMENTS)


def test_all_take_less_than_an_hour_on_two_cores():
    seconds = {name: int(row[4]) for row in rows() if row[4] for name in re.findall(r"`(.*)`", row[3])}
    assert set(seconds) <= set(EXPERIMENTS) and 1000 < sum(seconds.values()) < 2 * 3600
    assert len(PAGE.split()) <= 2500


def test_the_tables_of_the_eb_paper_are_all_there():
    numbers: set[tuple[str, int]] = set()
    text = PAGE.split("**EB**")[1].split("**RAD and SLAI**")[0]
    for kind, first, rest in re.findall(r"^\| (Table|Figure)s? (\d+)([^|]*)\|", text, re.MULTILINE):
        more = [int(each) for each in re.findall(r"\d+", rest.split("(")[0])]
        span = range(int(first), more[-1] + 1) if " to " in rest and more else (int(first), *more)
        numbers |= {(kind, each) for each in span}
    assert numbers >= {("Table", each) for each in range(1, 21)} | {("Figure", each) for each in range(1, 13)}


def test_every_experiment_has_its_output_with_a_verdict():
    assert {file.stem for file in OUTPUTS.iterdir()} == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        output = (OUTPUTS / f"{name}.txt").read_text()
        assert output.startswith(f"{name}: ") and "why" in output, name
        verdict = " ".join(output.rstrip().split("\n\n")[-1].split())
        heading = "As published" if "came out as published" in verdict else "As expected"
        assert f"\n{heading}\n- " in output, name
        assert re.search(r"\d+ of \d+ checked|times the published|Nothing was published", verdict), name
