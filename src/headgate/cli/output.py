"""Where results go: a run folder, a JSON file, a report, standard output; and the progress bar."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.record.tables import write_whole

if TYPE_CHECKING:
    from headgate.experiment.build import Unservable
    from headgate.record.tables import Run
    from headgate.report.document import Page
    from headgate.report.runs.scenes import Scene
    from headgate.stats.measured import Measured


RUNS = Path("runs")
NO_REPORT = "none"
REPORT = "report.html"  # its name beside run folders


@contextmanager
def run_folder(out: str | None, name: str, overwrite: bool) -> Iterator[Path]:
    """The folder to write to: the one asked for, which must be free, or the next number under runs/.

    It is made at once, so that a place that cannot be written to is refused before the work is done and two
    commands at the same time do not get the same folder. It goes again if nothing was written.
    """
    if out is None and overwrite:
        raise InputError("--overwrite without --out: every run gets a new folder under runs/; drop it")
    try:
        folder, fresh = (_next(name), True) if out is None else _asked(out, overwrite)
    except OSError as error:
        where = f"--out {out}" if out is not None else "folder runs/"
        raise InputError(f"{where}: {error.strerror or error}; choose another with --out") from None
    try:
        yield folder
    finally:
        if fresh:
            with suppress(OSError):  # it is not empty: something was written
                folder.rmdir()
                RUNS.rmdir()


def _asked(out: str, overwrite: bool) -> tuple[Path, bool]:
    if not out:
        raise InputError("--out is empty; name a folder")
    folder = Path(out)
    fresh = not folder.exists()
    if not fresh and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; name a folder")
    if not fresh and any(folder.iterdir()) and not overwrite:
        raise InputError(f"--out {folder} exists and is not empty; choose another or pass --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, fresh


def _next(name: str) -> Path:
    """The next free number under runs/, taken with a short-lived claim that only one command can make."""
    taken = [int(path.name[:4]) for path in RUNS.glob("[0-9][0-9][0-9][0-9]-*")]
    number = max(taken, default=0)
    RUNS.mkdir(parents=True, exist_ok=True)
    while True:
        number += 1
        claim = RUNS / f".{number:04d}"
        try:
            claim.mkdir()
        except FileExistsError:
            continue
        try:
            if not any(RUNS.glob(f"{number:04d}-*")):
                folder = RUNS / f"{number:04d}-{name}"
                folder.mkdir()
                return folder
        finally:
            claim.rmdir()


def file_option(help: str, free: str, remedy: str) -> Any:
    """An option for a file to write, or the word `free`. A place that cannot be written to is refused before
    the work is done.
    """

    def checked(option: typer.CallbackParam, target: str | None) -> str | None:
        if target is None or target == free:
            return target
        path, flag = Path(target), option.opts[0]
        try:
            if path.is_dir():
                raise InputError(f"{flag} {target or chr(34) * 2} is a folder; {remedy}")
            if not path.resolve().parent.is_dir():
                raise InputError(f"{flag} {target}: its folder does not exist; create it or name another")
            if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
                raise InputError(f"{flag} {target}: no permission to write there; name another")
        except OSError as error:
            raise InputError(f"{flag} {target}: {error.strerror or error}; name another file") from None
        return target

    return typer.Option(help=help, callback=checked)


def json_option(help: str = "as JSON, to a file or - for stdout") -> Any:
    return file_option(help, "-", "name a file, or - for stdout")


def report_option(help: str) -> Any:
    return file_option(help, NO_REPORT, f"name a file, or {NO_REPORT} for no report")


Json = Annotated[str | None, json_option()]
Report = Annotated[
    str | None, report_option(f"HTML report to this file; {NO_REPORT}: not even beside the runs")
]


def write_json(target: str | None, document: dict[str, Any]) -> None:
    if target is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False)
    if target == "-":
        print(text, flush=True)
    else:
        write_text("--json", target, text + "\n")


def write_text(what: str, target: str | Path, text: str) -> None:
    try:
        write_whole(target, text)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{what} {target}: {why}; name a file that can be written") from None


def ended_early(run: Run, what: str, folder: Path) -> RunError:
    outcome = run.meta["outcome"]
    kind = RunInterruptedError if outcome == "interrupted" else RunError
    return kind(f"{what} ended early ({outcome}); its results so far are in {folder}")


def save(run: Run | Measured, folder: Path, overwrite: bool) -> None:
    from headgate.stats.measured import Measured
    from headgate.stats.vllm_bench import bench_result

    found, heard = Measured.of(run), list[int]()
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if alone else None
    try:
        figures = json.dumps(bench_result(found), indent=2, allow_nan=False) + "\n"
        found.run.save(folder, overwrite, {"bench.json": figures})
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)
    if heard:
        raise RunInterruptedError(f"interrupted; what there is stands in {folder}")


# -- plans, reports and JSON


class Outputs(NamedTuple):
    json: str | None
    report: str | None


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
    first, *others = page.chapters
    return replace(page, chapters=(replace(first, setup=setup, alarms=tuple(filter(None, alarms))), *others))


def said_to(json: str | None) -> IO[str]:
    """Where text for people goes: not between the lines of JSON."""
    return sys.stderr if json == "-" else sys.stdout


def summed_up(scenes: Sequence[Scene]) -> None:
    """Figures and comparisons, worked out here so that a progress bar shows how far it is."""
    with bar("summing up", len(scenes)) as progress:
        for number, scene in enumerate(scenes, 1):
            _ = scene.metrics, scene.comparison  # both are kept
            progress(number)


def save_page(page: Page, target: str | None, say: IO[str]) -> None:
    if target is None or target == NO_REPORT:
        return
    from headgate.report.html.page import render

    write_text("report", target, render(page))
    path = Path(target)
    print(f"report: {path} ({path.stat().st_size / 1000:,.0f} kB, open it in a browser)", file=say)


# -- a progress bar

PATIENCE = 2.0  # seconds before it shows
LINES = 30.0  # seconds between two lines, where there is no terminal


@contextmanager
def bar(label: str, total: int | None, begun: set[str] | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with how much of `total` (None: unknown) is done. A search's first shows at once."""
    if not sys.stderr.isatty():
        if begun == set():
            print(f"{label}: begun; the next line in {LINES:g} s", file=sys.stderr, flush=True)
            begun.add(label)
        began = told = monotonic()

        def line(done: int) -> None:
            nonlocal told
            if (now := monotonic()) - told >= LINES:
                told = now
                of = f" of about {total}" if total else ""
                print(f"{label}: {done}{of} after {now - began:.0f} s", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = Progress(console=Console(stderr=True), transient=True)
    task = shown.add_task(label, total=total)
    lock, over = threading.Lock(), threading.Event()

    def begin() -> None:
        with lock:
            if not over.is_set():
                shown.start()

    timer = threading.Timer(PATIENCE, begin)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done: shown.update(task, completed=done)
    finally:
        timer.cancel()
        with lock:
            over.set()
            shown.stop()
