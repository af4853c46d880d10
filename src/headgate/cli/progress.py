"""A progress bar with the time left, on standard error, for work of over two seconds at a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds before it shows


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with how much of `total` is done. It shows by itself, even if nobody calls."""
    if not sys.stderr.isatty():
        yield lambda done: None
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
