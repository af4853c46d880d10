"""Files a user names, read without trusting them: a FIFO would hang the reader, a huge file stall it."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from headgate.core.errors import InputError

MOST_BYTES = 1 << 20  # of a settings file


def read_regular(path: str, most: int = MOST_BYTES) -> bytes:
    """The whole of a regular file of at most `most` bytes; OSError says what it is otherwise."""
    # without NONBLOCK opening a FIFO would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a regular file", path)
        if about.st_size > most:
            raise OSError(0, f"{about.st_size:,} bytes, more than {most:,}", path)
        data = bytearray()
        while piece := file.read(min(most + 1 - len(data), 1 << 20)):  # memory for so much is asked for
            data += piece
            if len(data) > most:  # it grows, or its size is not told (as in /proc)
                raise OSError(0, f"more than {most:,} bytes", path)
    return bytes(data)


def read_text(path: str, what: str, remedy: str, most: int = MOST_BYTES) -> str:
    try:
        return read_regular(path, most).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{what} {path}: {reason}; {remedy}") from None


def read_json(text: str, where: str, remedy: str = "fix the file") -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{where}, {place}: not valid JSON ({error.msg}); {remedy}") from None
    except (RecursionError, ValueError) as error:  # nested without end, a number of thousands of digits
        raise InputError(f"{where}: cannot be read: {str(error)[:60]}; {remedy}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: must be a JSON object; {remedy}")
    return document


def parse_line(text: str) -> dict[str, Any] | None:
    """One JSON object, or None for anything else (nesting without end included)."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
