"""Errors a user can fix: one line that says what, where and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from traceback import extract_tb
from typing import Any

UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
Fields = Callable[[tuple[int | str, ...]], Iterable[str]]  # what may stand at a place of a nested table


class InputError(ValueError):
    """Something the user gave is wrong. The command line prints it as one line and exits with 2."""


class RunError(RuntimeError):
    """A run could not go on (an invalid plan, a request starved). Exit code 1."""


class RunInterruptedError(RunError):
    """Ctrl-C, with what was done kept. Exit code 130."""


def one_line(error: BaseException) -> str:
    frame = extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} (in {frame.name}, {frame.filename}:{frame.lineno})"


def elsewhere(what: str, package: str, folder: str = "") -> InputError:
    install = f"install it: pip install ./{folder or package} in a clone"
    return InputError(f"{what} is in package headgate-{package}; {install}")


def unknown(what: str, name: str, choices: Iterable[str]) -> InputError:
    known = sorted(filter(None, choices))  # requests of no class have the empty name
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    listed = f"choose from: {', '.join(known)}" if known else "none exist, drop it"
    remedy = f"did you mean {near[0]!r}?" if near else listed
    return InputError(f"unknown {what} {name!r}; {remedy}")


def first_fault(faults: Sequence[Mapping[str, Any]], fields: Fields) -> str:
    """The first of a validator's faults as text, with the remedy, and how many more there are.

    `fields` names what may stand at a place. A misspelled field is two faults, one unknown and one missing;
    the unknown one says more and goes first.
    """
    ordered = sorted(faults, key=lambda fault: fault["type"] not in UNKNOWN_FIELD)
    first, more = ordered[0], len(ordered) - 1
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] in UNKNOWN_FIELD:
        parent, name = first["loc"][:-1], str(first["loc"][-1])
        missing = {str(f["loc"][-1]) for f in faults if f["type"] == "missing" and f["loc"][:-1] == parent}
        known = sorted(missing or fields(parent))
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        more -= bool(near and missing)
        remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(fields(parent)))}"
        message = f"unknown field {field!r}; {remedy}"
    elif first["type"] == "missing":
        message = f"field {field!r} is missing; add it"
    else:
        place = f"{field}: " if field else ""
        message = place + first["msg"].removeprefix("Value error, ")
    return message + (f" (and {more} more)" if more else "")
