"""Reports that commands write: the flag, and the file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headgate.cli.output import NO_REPORT, check_json, check_report, write_json

if TYPE_CHECKING:
    from headgate.experiment.unservable import Unservable
    from headgate.report.document import Page
    from headgate.report.runs.scenes import Scene

Report = Annotated[
    str | None, typer.Option(help=f"HTML report to this file; {NO_REPORT}: not even beside the runs")
]
Json = Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")]


class Outputs(NamedTuple):
    """Where a plan goes besides the terminal."""

    json: str | None
    report: str | None

    def checked(self) -> Outputs:
        """The same, or a mistake told before the work begins."""
        check_json(self.json)
        check_report(self.report)
        return self


def tell(
    page: Page,
    document: dict[str, Any],
    outputs: Outputs,
    setup: str = "",
    lost: Unservable | None = None,
    alarms: Sequence[str] = (),
) -> None:
    """A plan on the terminal, and as JSON and HTML where asked; `setup` is what it rests on. What is `lost`
    comes before everything else, everywhere.
    """
    from headgate.report.terminal import show

    say = said_to(outputs.json)
    page = resting_on(page, setup, [lost.said if lost else "", *alarms])
    show(page, say)
    save_page(page, outputs.report, say)
    write_json(outputs.json, lost.before(document) if lost else document)


def resting_on(page: Page, setup: str, alarms: Sequence[str]) -> Page:
    """The same with its first lines."""
    first, *others = page.chapters
    return replace(page, chapters=(replace(first, setup=setup, alarms=tuple(filter(None, alarms))), *others))


def said_to(json: str | None) -> IO[str]:
    """Where text for people goes: not between the lines of JSON."""
    return sys.stderr if json == "-" else sys.stdout


def summed_up(scenes: Sequence[Scene]) -> None:
    """Figures and comparisons, worked out here so that somebody who waits sees how far it is."""
    from headgate.cli.progress import bar

    with bar("summing up", len(scenes)) as progress:
        for number, scene in enumerate(scenes, 1):
            _ = scene.metrics, scene.comparison  # both are kept
            progress(number)


def save_page(page: Page, target: str | None, say: IO[str]) -> None:
    """Write it and say where."""
    if target is None or target == NO_REPORT:
        return
    from headgate.report.html.page import write

    path = write(page, target)
    print(f"report: {path} ({path.stat().st_size / 1000:,.0f} kB, open it in a browser)", file=say)
