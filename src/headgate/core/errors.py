"""Errors a user can mend: one line that says what, where and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something the user gave is wrong. The command line prints it as one line and exits with 2."""


class RunError(RuntimeError):
    """A run could not go on (a policy planned nonsense, a request starved). Exit code 1."""


def unknown(what: str, name: str, choices: Iterable[str]) -> InputError:
    """An unknown name, with the nearest known one or the whole list as the remedy."""
    known = sorted(choices)
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(known)}"
    return InputError(f"unknown {what} {name!r}; {remedy}")
