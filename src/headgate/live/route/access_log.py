"""One JSON line per request, without prompts, keys or raw header values; the trace file is made likewise."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from headgate.core.errors import InputError
from headgate.live.route.answers import RefusedError

CONTROL = re.compile(r"[^\x20-\x7e]")
LONGEST = 128
FLUSH_EVERY = 64  # lines


def clean(text: str) -> str:
    """A text from outside, fit for a log: printable ASCII, at most 128 characters."""
    return CONTROL.sub("?", text[:LONGEST])


def refusal_record(wall: float, seconds: float, path: str, id: str, refused: RefusedError) -> dict[str, Any]:
    """The line of a request that was refused before it had a class: a wrong key, path or body."""
    return {
        "time": round(wall, 3),
        "id": clean(id),
        "key": refused.key,
        "class": "",
        "path": clean(path),
        "status": refused.status,
        "outcome": "refused",
        "fault": refused.reason,
        "total_ms": round(1000 * seconds, 3),
    }


class JsonLines:
    """A file of JSON objects, one a line. A full disk stops the log, not the router."""

    def __init__(self, path: str | None) -> None:
        self.lost = 0
        self._file: TextIO | None = None
        self._since = 0
        if path == "-":
            self._file = sys.stdout
        elif path is not None:
            try:
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (open as long as the router runs)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise InputError(f"{path}: cannot be written, {why}; choose another file") from None

    @property
    def wanted(self) -> bool:
        """Whether anything is written at all."""
        return self._file is not None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._since += 1
            if self._since >= FLUSH_EVERY:
                self.flush()
        except (OSError, ValueError):
            self.lost += 1

    def flush(self) -> None:
        """Whatever is buffered goes to the file."""
        self._since = 0
        try:
            if self._file is not None:
                self._file.flush()
        except (OSError, ValueError):
            self.lost += 1

    def close(self) -> None:
        self.flush()
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()
