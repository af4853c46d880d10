"""The process that an engine runs in: its log, work beside the engine, metrics left for another process."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

# The part that belongs to one engine sets `LOG.logger` to a child of the engine's own logger: its handlers,
# format and level hold then.
LOG: logging.LoggerAdapter[logging.Logger] = logging.LoggerAdapter(logging.getLogger("headgate"))
PATIENCE = 5.0  # seconds the end of the process waits for work under way, such as a slow disk
FOLDER = "HEADGATE_METRICS"  # the environment variable that names the folder; not made before it is needed
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # where processes leave their values, for the server to show
ENDING = ".prom"
_shows: list[int] = []  # this process, if it shows what engines leave


class EngineNames(NamedTuple):
    name: str  # in traces; as a policy: the engine decides, headgate only watches
    title: str  # in messages
    slots: str  # its limit of running requests
    budget: str  # its limit of tokens a step
    longest: str  # its limit of tokens of a request
    plug_ins: str  # what headgate must be one of, so that the server shows its metrics
    priorities: str  # the flag that orders requests by priority


class Background:
    """The engine never waits for `work`. Where it fails that is logged once, and it is tried again."""

    def __init__(self, work: Callable[[], None], every: float, name: str) -> None:
        self._work, self._every, self._name = work, every, name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headgate-{name}", daemon=True)
        self._thread.start()
        # Unlike atexit this also runs in processes that multiprocessing forked, as an engine's may be.
        self._exit = Finalize(None, self.close, exitpriority=10)

    def close(self) -> None:
        self._exit.cancel()
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)

    @property
    def busy(self) -> bool:
        """Is it still at work, although it was closed? A disk may hang for ever."""
        return self._thread.is_alive() and self._thread is not threading.current_thread()

    def _run(self) -> None:
        logged = False
        ended = False
        while not ended:
            ended = self._end.wait(self._every)
            try:
                self._work()
            except Exception as error:
                if not logged:
                    name = type(error).__name__
                    LOG.warning("headgate: %s failed and is tried again: %s: %s", self._name, name, error)
                logged = True


# -- metrics for another process
# The scheduler mostly runs in another process than /metrics: it leaves its metrics as text, in a folder.


def show_left_metrics() -> None:
    """Have /metrics of this process show what engines leave; engines inherit the name of the folder."""
    if SHARED in os.environ or FOLDER in os.environ:
        return
    try:
        from prometheus_client import REGISTRY

        folder = Path(tempfile.gettempdir(), f"headgate-metrics-{secrets.token_hex(16)}")
        REGISTRY.register(LeftMetrics(folder))
        os.environ[FOLDER] = str(folder)
        _shows.append(os.getpid())
        atexit.register(_remove, folder, os.getpid())
    except Exception as error:  # the engine would not start
        LOG.warning("headgate: no metrics on /metrics: %s: %s", type(error).__name__, error)


def leaves_metrics() -> bool:
    return SHARED not in os.environ and FOLDER in os.environ and os.getpid() not in _shows


def leave_metrics(name: str, metrics: Any) -> None:
    from prometheus_client import generate_latest

    folder = Path(os.environ[FOLDER])
    folder.mkdir(mode=0o700, exist_ok=True)
    written = folder / f"{name}.new"
    written.write_bytes(generate_latest(metrics))
    written.replace(folder / f"{name}{ENDING}")


class LeftMetrics:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        """Nothing yet: which metrics there are is known when an engine has left some."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Any] = {}
        for path in sorted(self._folder.glob(f"*{ENDING}")):
            for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
