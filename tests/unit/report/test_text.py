from __future__ import annotations

import io
import subprocess
import sys

import pytest

from headgate.report.terminal.tables import as_text, comparison_table, show, summary_table
from headgate.stats.comparison import compare
from headgate.stats.metrics import summarise
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


def lines(text: str) -> list[str]:
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    return text.splitlines()


@pytest.mark.parametrize("number", range(2, 7))
def test_a_comparison_fits_80_columns_and_marks_the_best(number):
    found = lines(as_text(comparison_table(compare(policies(number), "mixed"))))
    start = next(place for place, line in enumerate(found) if "mean TTFT (ms, lower is better)" in line)
    block = found[start + 1 : start + 1 + number]
    assert block[0].startswith("* mixed") and block[0].rstrip().endswith("baseline")
    assert block[1].startswith("  eb") and block[1].rstrip().endswith("worse")
    assert "[+" in block[1] and "]" in block[1]


def test_marks_of_those_level_with_the_best():
    runs = policies(3)
    runs["eb+"] = runs["eb"]
    text = as_text(comparison_table(compare(runs, "eb+")))
    block = text[text.index("mean TTFT") :].splitlines()[1:4]
    assert [line[:7].rstrip() for line in block] == ["  eb+", "* mixed", "  eb"]
    runs["mixed"] = [open_run(400, service=0.9, kinds=KINDS[:1])]
    level = as_text(comparison_table(compare(runs, "mixed")))
    block = level[level.index("mean TTFT") :].splitlines()[1:4]
    assert [line[:7].rstrip() for line in block] == ["  mixed", "* eb", "= eb+"]


def test_a_summary_fits_80_columns_and_says_units_and_rule():
    run = open_run(400, kinds=KINDS, kv_tokens=2000)
    run.requests["kind"][::2] = 1
    found = lines(as_text(summary_table(summarise(run), "eb on a small card")))
    text = " ".join(" ".join(found).split())
    assert found[0].startswith("eb on a small card")
    for part in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "E2E (ms)", "requests/s", "chat", "of 2,000 tokens"):
        assert part in text
    assert "Stationary" in text and "first 10 %" in text


def test_an_empty_run_has_a_summary():
    text = as_text(summary_table(summarise(make_run())))
    assert "nan" not in text and "NO" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_at_a_terminal_and_without_no_color(monkeypatch):
    table = comparison_table(compare(policies(2), "mixed"))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    show(table, coloured)
    assert "\x1b[" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    show(table, plain)
    assert "\x1b" not in plain.getvalue()


def test_reading_results_imports_nothing_heavy():
    code = (
        "import sys, headgate.report.terminal.tables, headgate.stats.vllm_bench; "
        "print([name for name in ('rich', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
