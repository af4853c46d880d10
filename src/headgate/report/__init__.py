"""Reports: one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from headgate.core.errors import InputError
from headgate.record.whole_file import write_whole
from headgate.report.document import Page
from headgate.report.html.page import render
from headgate.report.runs.page import runs_page
from headgate.report.runs.scenes import Scene, gather

__all__ = ["Page", "Scene", "gather", "render", "runs_page", "write"]


def write(page: Page, path: str | Path) -> Path:
    """Write the page, whole or not at all; a file that is there is replaced."""
    target = Path(path)
    try:
        write_whole(target, render(page))
    except OSError as error:
        raise InputError(
            f"report {target}: {error.strerror or error}; name a file that can be written"
        ) from None
    return target
