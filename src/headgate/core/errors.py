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


MOST_FAULTS = 3  # that are told


def told_faults(faults: Sequence[Mapping[str, Any]], fields: Fields) -> str:
    """A misspelled field is two faults, one unknown and one missing: the unknown one goes first, alone."""
    ordered, said = sorted(faults, key=lambda fault: fault["type"] not in UNKNOWN_FIELD), list[str]()
    missing = {fault["loc"] for fault in faults if fault["type"] == "missing"}
    for fault in ordered:
        place, field = fault["loc"], ".".join(map(str, fault["loc"]))
        if fault["type"] in UNKNOWN_FIELD:
            known = sorted(fields(place[:-1]))
            wanted = [str(loc[-1]) for loc in sorted(missing, key=str) if loc[:-1] == place[:-1]]
            near = get_close_matches(str(place[-1]), wanted or known, n=1, cutoff=0.5)
            missing -= {(*place[:-1], *near)}  # not told of again
            remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            said.append(f"unknown field {field!r}; {remedy}")
        elif place in missing:
            said.append(f"field {field!r} is missing; add it")
        elif fault["type"] != "missing":
            said.append(f"{field}: " * bool(field) + fault["msg"].removeprefix("Value error, "))
    more = f" (and {len(said) - MOST_FAULTS} more)" if len(said) > MOST_FAULTS else ""
    return " | ".join(said[:MOST_FAULTS]) + more
