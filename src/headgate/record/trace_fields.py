"""Lines of traces: how they are parsed, and what each line of a live engine's trace must hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate.core import request
from headgate.core.files import parse_line
from headgate.core.policy import Steps

TRACE = 1  # of the format; a reader refuses a newer one instead of misreading it
# What a request brings with it, but for its time (`at`) and its promise, which has three fields.
KNOWN = tuple(name for name in request.FIELDS if name not in ("arrival", "slo"))
# Every line but the first is {"event": NAME, ...} with these fields; the first says whose trace it is.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "arrived": (*KNOWN, "at", "first_token", "between_tokens", "between_kind", "weight", "background"),
    "admitted": ("id", "at"),
    "prefilled": ("id", "at"),
    "held": ("id", "at"),
    "resumed": ("id", "at", "last"),  # when its newest token came
    "evicted": ("id", "at", "last", "output", "evictions", "wasted"),
    "finished": ("id", "at", "how", "output", "evictions", "wasted", "cached"),
    "steps": Steps._fields,
    "plan": ("at", "decode", "prompts", "evict", "gauges"),  # decode: -1 all, 0 none, n named
    "policy": ("at", "policy", "parameters"),  # another one from now on
    "mark": ("at", "date", "mark"),  # the settings file with this word was read; date: Unix seconds
    "fell_back": ("at", "reason"),
    "rescued": ("at",),
    "wasted": ("at", "tokens"),
}
OPTIONAL = {"last", "first_token", "between_tokens", "guess", "weight"}  # may be null
# Older traces lack them; `queries` is written only where decodes bring drafts, `between_kind` if not gap.
LATER: Mapping[str, Any] = {
    "tenant": "", "weight": None, "background": False, "queries": 0, "between_kind": request.GAP,
}  # fmt: skip
KINDS = (request.GAP, request.MEAN, request.ENVELOPE)
TEXTS = {"kind", "how", "policy", "reason", "tenant", "mark"}
MOMENTS = {"at", "date", "start", "last", "first_token", "between_tokens", "priority", "guess"}
MOMENTS |= {"weight"}  # any finite number
OBJECTS = {"gauges", "parameters"}
REQUESTS = {"decode", "prompts", "evict"}  # so many of them in one plan
LARGEST = 1e300  # of a number
FIRST_LINE = 1 << 20  # characters of it that are looked at
MOST, MOST_REQUESTS = 10**12, 10**7  # of whatever is counted: more is damage, and tables could not hold it


def first_line(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse_line(file.readline(FIRST_LINE)) or {}
    except (OSError, ValueError):  # no such file, or no name of one
        return {}


def fault(line: dict[str, Any]) -> str | None:
    event = line.get("event")
    if not isinstance(event, str):
        return "has no event"
    for name in FIELDS.get(event, ()):
        if name not in line:
            if name not in LATER:
                return f"{event!r} lacks {name!r}"
            line[name] = LATER[name]
        value = line[name]
        if value is None:
            if name not in OPTIONAL:
                return f"{name!r} of {event!r} is empty"
        elif (wanted := _wanted(name, value)) is not None:
            return f"{name!r} of {event!r} is not {wanted}"
    return None


def header_fault(line: dict[str, Any]) -> str | None:
    if not isinstance(line.get("policy", ""), str):
        return "'policy' of the first line is not a text"
    kv = line.get("kv_tokens")
    return None if kv is None or _number(kv) else "'kv_tokens' of the first line is not a finite number"


def _wanted(name: str, value: Any) -> str | None:
    if name in MOMENTS:
        return None if _number(value) else "a finite number"
    if name == "between_kind":
        return None if value in KINDS else f"one of {', '.join(KINDS)}"
    if name in TEXTS:
        return None if isinstance(value, str) else "a text"
    if name == "background":
        return None if isinstance(value, bool) else "true or false"
    if name in OBJECTS:
        return None if isinstance(value, dict) else "a JSON object"
    if name == "ends":
        fine = isinstance(value, list) and bool(value) and all(map(_number, value))
        return None if fine else "a list of moments"
    least, most = -1 if name == "decode" else 0, MOST_REQUESTS if name in REQUESTS else MOST
    fine = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return None if fine else f"a whole number from {least} to {most}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
