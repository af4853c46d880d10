"""The bar shows at a terminal, after a while, and leaves nothing behind."""

from __future__ import annotations

import io
import time

from headgate.cli import output as progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def sit_at_a_terminal(monkeypatch) -> Terminal:
    """To be called in the test itself: capturing puts standard error back after fixtures."""
    found = Terminal()
    monkeypatch.setattr("sys.stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return found


def test_it_shows_the_share_and_the_time_left(monkeypatch):
    terminal = sit_at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    end = time.monotonic() + 600  # a machine may be busy with something else for a while
    with progress.bar("mixed seed 0", 4) as report:
        report(2)
        while "50%" not in (drawn := terminal.getvalue()):  # it is drawn ten times a second
            assert time.monotonic() < end, f"never drawn: {drawn!r}"
            time.sleep(0.05)
    assert "mixed seed 0" in drawn and ":" in drawn


def test_short_work_shows_nothing(monkeypatch):
    terminal = sit_at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "PATIENCE", 600.0)
    with progress.bar("short", 4) as report:
        report(4)
    assert terminal.getvalue() == ""


def test_no_terminal_no_bar(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.bar("piped", 4) as report:
        report(4)
    assert pipe.getvalue() == ""


def test_a_search_without_a_terminal_says_at_once_what_runs(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    begun = set[str]()
    for label in ("runs of 500 requests", "counting engines"):
        with progress.bar(label, 4, begun=begun):
            assert pipe.getvalue() == "runs of 500 requests: begun; the next line in 30 s\n"
