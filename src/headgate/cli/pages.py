"""Reports that commands write: the flag, and the file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Annotated

import typer

from headgate.cli.output import NO_REPORT

if TYPE_CHECKING:
    from headgate.record.tables import Run
    from headgate.report.document import Page
    from headgate.report.runs.scenes import Scene

Report = Annotated[
    str | None, typer.Option(help=f"HTML report to this file; {NO_REPORT}: not even beside the runs")
]


def report_runs(
    scenes: Sequence[Mapping[str, Sequence[Run]]],
    target: str | None,
    say: IO[str],
    title: str = "",
    names: Sequence[str] = (),
) -> None:
    """The report of runs that were just made; each scene has its own requests."""
    if target is None or target == NO_REPORT or not any(scenes):
        return
    from headgate.report import runs_page
    from headgate.report.runs.scenes import scene_of

    made = [scene_of(runs, names[place] if names else "") for place, runs in enumerate(scenes)]
    save_page(runs_page(made, sys.argv[1:], title), target, say)


def summed_up(scenes: Sequence[Scene]) -> None:
    """Figures and comparisons, worked out here so that somebody who waits sees how far it is."""
    from headgate.cli.progress import bar

    with bar("summing up", len(scenes)) as progress:
        for number, scene in enumerate(scenes, 1):
            _ = scene.metrics, scene.comparison  # both are kept by the scene
            progress(number)


def save_page(page: Page, target: str | None, say: IO[str]) -> None:
    """Write it and say where."""
    if target is None or target == NO_REPORT:
        return
    from headgate.report import write

    path = write(page, target)
    print(f"report: {path} ({path.stat().st_size / 1000:,.0f} kB, open it in a browser)", file=say)
