"""Durations and slices of time as people write them: 500ms, 0.5s, 2min, 10min..20min.

A number without a unit is refused: 500 may be milliseconds or seconds, and either answer would look right.
"""

from __future__ import annotations

import math
import re

from headgate.core.errors import InputError

# Each unit as (multiply, divide): dividing by 1000 rounds once, multiplying by 0.001 would round twice.
UNITS: dict[str, tuple[float, float]] = {
    "us": (1, 1_000_000), "ms": (1, 1000), "s": (1, 1), "min": (60, 1), "h": (3600, 1)
}  # fmt: skip
LONGEST_TEXT = 64  # characters; no duration needs more
# Possessive quantifiers (++, *+) never give a character back: a text that does not match fails in linear time
_WRITTEN = re.compile(r"\s*+((?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)\s*+([a-z]*+)\s*+")


def duration(text: str, units: tuple[str, str] | None = ("ms", "s")) -> float:
    """Seconds in a text such as `500ms`, `0.5s`, `2min` or `1h`; `units`: the likely ones.

    None: a plain number is in seconds, as prices per token or request are in a card.
    """
    if len(text) > LONGEST_TEXT:
        raise InputError(f"{text[:20]!r}... is not a duration; write 500ms, 0.5s, 2min or 1h")
    match = _WRITTEN.fullmatch(text)
    if match is None or (match[2] and match[2] not in UNITS):
        raise InputError(f"{text!r} is not a duration; write 500ms, 0.5s, 2min or 1h")
    number, unit = match[1], match[2]
    if units and not unit and float(number):
        raise InputError(f"{text.strip()!r} has no unit; write {number}{units[0]} or {number}{units[1]}")
    multiply, divide = UNITS[unit or "s"]
    seconds = float(number) * multiply / divide
    if not math.isfinite(seconds):
        raise InputError(f"{text!r} is too long a duration; write a finite number of seconds")
    return seconds


def slice_text(text: str) -> tuple[float, float]:
    """Start and end in seconds of a slice such as `10min..20min`; an open end is 0 or infinity."""
    start_text, dots, end_text = text.partition("..")
    if not dots:
        raise InputError(f"{text!r} is not a slice of time; write it as 10min..20min")
    start = duration(start_text, ("s", "min")) if start_text.strip() else 0.0
    end = duration(end_text, ("s", "min")) if end_text.strip() else math.inf
    if start >= end:
        raise InputError(f"slice {text!r} ends before it starts; write the earlier time first")
    return start, end
