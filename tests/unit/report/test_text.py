"""Documents at a terminal: 80 columns, nothing cut, colours only where they are wanted."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from as_text import as_text
from headgate.report.document import Cell, Chapter, Code, Facts, Grid, Listed, Section, row
from headgate.report.runs.page import scene_chapter
from headgate.report.runs.scenes import scene_of
from headgate.report.terminal import show
from small_runs import make_run, open_run

NAMES = ["mixed", "eb", "eb+", "slai", "rad", "a policy with a rather long name"]
KINDS = [
    {"name": "chat", "first_token": 0.2, "between_tokens": 0.1},
    {"name": "batch", "first_token": None, "between_tokens": None},
]


def policies(number: int):
    return {
        name: [open_run(400, service=0.1 + 0.02 * place, kinds=KINDS[:1])]
        for place, name in enumerate(NAMES[:number])
    }


def compared(runs) -> str:
    return as_text(scene_chapter(scene_of(runs, "a title")))


def lines(text: str) -> list[str]:
    assert "\x1b" not in text and "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    return text.splitlines()


@pytest.mark.parametrize("number", range(2, 7))
def test_a_comparison_fits_80_columns_and_marks_the_best(number):
    found = lines(compared(policies(number)))
    start = next(place for place, line in enumerate(found) if "mean TTFT (ms, lower is better)" in line)
    block = found[start + 1 : start + 1 + number]
    assert block[0].startswith("* mixed") and block[0].endswith("baseline")
    assert block[1].startswith("  eb") and block[1].endswith("worse")
    assert "[+" in block[1] and "]" in block[1]


def test_marks_of_those_level_with_the_best():
    runs = policies(3)
    runs = {name: runs[name] for name in ("eb+", "mixed", "eb")} | {"eb+": runs["eb"]}
    text = compared(runs)
    block = text[text.index("mean TTFT (") :].splitlines()[1:4]
    assert [line[:7].rstrip() for line in block] == ["  eb+", "* mixed", "  eb"]
    runs = {"mixed": [open_run(400, service=0.9, kinds=KINDS[:1])], "eb": runs["eb"], "eb+": runs["eb+"]}
    level = compared(runs)
    block = level[level.index("mean TTFT (") :].splitlines()[1:4]
    assert [line[:7].rstrip() for line in block] == ["  mixed", "* eb", "= eb+"]
    assert "a column without *: no significant difference" in " ".join(level.split())


def test_a_run_fits_80_columns_and_says_units_and_rule():
    run = open_run(400, kinds=KINDS, kv_tokens=2000)
    run.requests["kind"][::2] = 1
    found = lines(as_text(scene_chapter(scene_of({"eb": [run]}, "eb on a small card"))))
    text = " ".join(" ".join(found).split())
    assert found[0].startswith("eb on a small card")
    for part in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "E2E (ms)", "requests/s", "chat", "of 2,000 tokens"):
        assert part in text
    assert "Stationary" in text and "first 10 %" in text


def test_an_empty_run_has_figures():
    text = as_text(scene_chapter(scene_of({"nothing": [make_run()]})))
    assert "nan" not in text and "NO: too few requests to tell" in text


def test_an_overload_is_called_that():
    runs = {name: [open_run(1000, rate=9.0, service=service)] for name, service in (("a", 0.2), ("b", 0.21))}
    text = " ".join(compared(runs).split())
    assert "Overloaded: the backlog grows" in text and "Mind" not in text


def wide(columns: int, **more) -> Grid:
    heads = ("policy", *(f"column {place}\nper second" for place in range(columns)))
    rows = tuple(row(name, *(1000.0 * place + 0.5 for place in range(columns))) for name in ("one", "two"))
    return Grid("", heads, rows, **more)


def test_a_table_too_wide_is_continued_below_with_its_names():
    found = lines(as_text(wide(20)))
    assert sum(line.startswith("one") for line in found) == sum(line.startswith("two") for line in found) == 2
    numbers = [word for line in found if line.startswith("one") for word in line.split()[1:]]
    assert len(numbers) == 20


def test_minor_columns_go_first():
    heads = wide(12).heads
    found = lines(as_text(wide(12, minor=heads[-4:])))
    assert sum(line.startswith("one") for line in found) == 1 and "7,000" in "".join(found)
    assert "11,000" not in "".join(found)
    assert "11,000" in as_text(wide(12))
    assert "2,000" in as_text(wide(3, minor=heads[3:4]))  # there is room for it


def test_words_are_broken_and_numbers_are_not():
    rows = (row("a name", Cell("many words " * 20, tone="prose"), 123456.0),)
    found = lines(as_text(Grid("", ("name", "why", "number"), rows)))
    assert sum("many words" in line for line in found) > 2 and sum("123,456" in line for line in found) == 1


def test_rows_of_a_group_stand_under_its_name():
    rows = (row("first", "a", 1.0), row("first", "b", 2.0), row("second", "a", 3.0))
    found = lines(as_text(Grid("", ("group", "name", "value"), rows, grouped=True)))
    assert [line.split()[0] for line in found[2:]] == ["first", "a", "b", "second", "a"]


def test_every_block_has_a_place():
    blocks = (Facts({"Fact": "said " * 30}), Listed(("item " * 30,)), Code("a \\\n    b"), "A sentence.")
    found = lines(as_text(Chapter("Title", "Verdict.", (Section("Heading", blocks),), ("A note.",))))
    assert found[:3] == ["Title", "", "Heading"] and found[-2:] == ["Verdict.", "A note."]
    assert "a \\" in found and "    b" in found and "A sentence." in found
    assert sum(line.startswith("  item") for line in found) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_at_a_terminal_and_without_no_color(monkeypatch):
    chapter = scene_chapter(scene_of(policies(2)))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    show(chapter, coloured)
    assert "\x1b[" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    show(chapter, plain)
    assert "\x1b" not in plain.getvalue()


def test_a_stream_that_knows_ascii_only_gets_that():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    show("λ* ± 1 ─ ↑ 語", out)
    assert out.buffer.getvalue() == b"l* ~ 1 - ^ ?\n"


def test_reading_results_imports_nothing_heavy():
    code = (
        "import sys, headgate.report.terminal, headgate.stats.vllm_bench; "
        "print([name for name in ('rich', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
