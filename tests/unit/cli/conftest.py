"""The command line in this process: fast, and every exception that leaks out is seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from headgate.cli import app, main

COMMANDS = typer.main.get_command(app)  # made once: it takes as long as a small run


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def headgate(tmp_path, monkeypatch, capsys):
    """Runs `headgate ARGS` in an empty folder; what it printed and its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # nothing is kept from one test to the next
    monkeypatch.setattr("headgate.cli.app", COMMANDS)

    def run(*args: object) -> Said:
        monkeypatch.setattr("sys.argv", ["headgate", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Said(left.value.code, out, err)

    return run


def _files(folder: Path) -> list[Path]:
    """All but what Python itself keeps of the modules it has read."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.fixture
def refused(headgate, tmp_path):
    """Asserts that a command is refused: one line on stderr, exit code 2, nothing printed or written."""

    def run(args: list[object], *fragments: str) -> str:
        before = _files(tmp_path)
        said = headgate(*args)
        assert said.code == 2, said
        assert said.err.startswith("headgate: ") and said.err.count("\n") == 1, said.err
        assert said.out == ""
        assert _files(tmp_path) == before
        for fragment in fragments:
            assert fragment in said.err
        return said.err

    return run
