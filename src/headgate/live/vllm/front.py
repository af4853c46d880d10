"""In vLLM's front end: what its engines count, on /metrics, where nothing was set up for that.

vLLM calls `install` in each of its processes, because it is one of its plug-ins (`vllm.general_plugins`). The
scheduler mostly runs in another process than /metrics: it leaves its metrics there as text, in a folder.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "HEADGATE_METRICS"  # the environment variable that names the folder; not made before it is needed
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # where processes leave their values, for the server to show
ENDING = ".prom"
LOG = logging.getLogger("vllm.headgate")
_shows: list[int] = []  # this process, if it shows what engines leave


def install() -> None:
    """Have /metrics of this process show what engines leave; engines inherit the name of the folder."""
    if SHARED in os.environ or FOLDER in os.environ:
        return
    try:
        from prometheus_client import REGISTRY

        folder = Path(tempfile.gettempdir(), f"headgate-metrics-{secrets.token_hex(16)}")
        REGISTRY.register(Left(folder))
        os.environ[FOLDER] = str(folder)
        _shows.append(os.getpid())
        atexit.register(_remove, folder, os.getpid())
    except Exception as error:  # vLLM would not start
        LOG.warning("headgate: no metrics on /metrics: %s: %s", type(error).__name__, error)


def leaves() -> bool:
    """Is there a front end in another process, which shows what is left?"""
    return SHARED not in os.environ and FOLDER in os.environ and os.getpid() not in _shows


class Left:
    """What engines have left, as metrics of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[Any]:
        """Nothing yet: which metrics there are is known when an engine has left some."""
        return []

    def collect(self) -> Iterator[Any]:
        """Each metric once, with the samples of all engines."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, Any] = {}
        for path in sorted(self._folder.glob(f"*{ENDING}")):
            for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
                known = found.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from found.values()


def leave(name: str, metrics: Any) -> None:
    """Leave these metrics for the front end, whole or not at all."""
    from prometheus_client import generate_latest

    folder = Path(os.environ[FOLDER])
    folder.mkdir(mode=0o700, exist_ok=True)
    written = folder / f"{name}.new"
    written.write_bytes(generate_latest(metrics))
    written.replace(folder / f"{name}{ENDING}")


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
