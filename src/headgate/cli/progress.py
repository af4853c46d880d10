"""A progress bar on standard error, for runs of more than two seconds at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds before it shows


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with how much of `total` is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    began = time.monotonic()
    shown = Progress(console=Console(stderr=True), transient=True)
    task = shown.add_task(label, total=total)

    def report(done: int) -> None:
        if time.monotonic() - began > PATIENCE:
            if not shown.live.is_started:
                shown.start()
            shown.update(task, completed=done)

    try:
        yield report
    finally:
        shown.stop()
