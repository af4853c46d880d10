"""Text files of numbers: reading them, plain or gzip, and reading one field."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from headgate.core.errors import InputError
from headgate.workloads.columns import LONGEST

_GZIP_MAGIC = b"\x1f\x8b"
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)


class BadFieldError(ValueError):
    """Why one field of one row cannot be used."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, unpacked when it is gzip (detected by its content, not by its name)."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        if any(Path(path).glob("chunk-*-trace.csv")):
            raise InputError(
                f"{path}: a client pool of ServeGen holds laws of arrivals and lengths, not requests; "
                "generate a workload with ServeGen, save it as CSV, and read that with --columns"
            ) from None
        raise InputError(f"{path}: is a directory; name a file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read, {reason}; check the path and its permissions") from None
    if not content.startswith(_GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        raise InputError(f"{path}: damaged gzip file; fetch it again") from None


def as_text(path: str | os.PathLike[str], content: bytes) -> str:
    """The content as text; the path is for the error alone."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{path}: not a text file; give CSV or JSON lines, plain or gzip")
    if not text.strip():
        raise InputError(f"{path}: the file is empty; give one with requests in it")
    return text


def tokens_or_none(value: object, what: str) -> int:
    """A number of tokens, 0 included."""
    return 0 if value in (0, "0") else tokens(value, what)


def tokens(value: object, what: str) -> int:
    """A length of at least one token; whole numbers written as 512.0 are taken too."""
    # Almost every field is plain digits, and a trace has many of them: try that first.
    try:
        count = int(value) if isinstance(value, str) else _whole(value, what)
    except BadFieldError:
        raise
    except ValueError:
        count = _whole(value, what)
    if not 1 <= count <= LONGEST:
        raise BadFieldError(f"{what} is {count}, not a length from 1 to {LONGEST}")
    return count


def seconds(value: object, what: str) -> float:
    """A time of at least zero."""
    number = _number(value, what)
    if number < 0:
        raise BadFieldError(f"{what} is {value}, before the start")
    return number


def nanoseconds(value: object, what: str) -> int:
    """A calendar time, such as 2023-11-16 18:15:46.6805900, since 1970; without a zone it counts as UTC.

    Whole nanoseconds keep every published digit; `datetime` alone stops at microseconds.
    """
    moment, _, rest = str(value).strip().partition(".")
    zone = rest.lstrip("0123456789")
    fraction = rest[: len(rest) - len(zone)][:9].ljust(9, "0")
    try:
        return _whole_seconds(moment + zone) * 1_000_000_000 + int(fraction)
    except ValueError:
        shown = str(value)[:40]
        raise BadFieldError(f"{what} is {shown!r}, not a time such as 2023-11-16 18:15:46.68") from None


@lru_cache(maxsize=64)
def _whole_seconds(moment: str) -> int:
    """Seconds since 1970; kept for a while, as neighbouring rows of a trace share their second."""
    when = datetime.fromisoformat(moment)
    since = when - (_EPOCH if when.tzinfo is None else _EPOCH_UTC)
    return since.days * 86_400 + since.seconds


def _whole(value: object, what: str) -> int:
    number = _number(value, what)
    if number != math.floor(number):
        raise BadFieldError(f"{what} is {value}, not a whole number")
    return int(number)


def _number(value: object, what: str) -> float:
    """A finite number from text or JSON; true and false are not numbers here."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise BadFieldError(
            f"{what} is {value!r}, not a number" if value is not None else f"{what} is missing"
        )
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadFieldError(f"{what} is {str(value)[:40]!r}, not a number") from None
    if not math.isfinite(number):
        raise BadFieldError(f"{what} is {str(value)[:40]}, not a finite number")
    return number
