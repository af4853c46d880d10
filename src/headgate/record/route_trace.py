"""A router's trace, one JSON object per request, read back into the tables of a run."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.record.tables import COLUMNS, ENDS, Run
from headgate.record.trace_fields import first_line, parse_line

VERSION = 1
HOW = {"ok": End.STOPPED, "client-gone": End.ABORTED, "refused": End.REFUSED}
NUMBERS = ("arrival", "finished", "prompt", "output", "engine", "cached")
OPTIONAL = ("placed", "first_token")


def is_route_trace(path: str | Path) -> bool:
    """Whether the first line is one that `headgate route --trace` wrote."""
    return {"route", "arrival"} <= first_line(path).keys()


def read_route_trace(path: str | Path) -> Run:
    """The run a router's trace tells of: requests and their times, without steps of engines.

    A last line that was cut off is left out; any other damage is refused.
    """
    records = _records(path)
    records.sort(key=lambda record: float(record["arrival"]))
    names = sorted({str(record["class"]) for record in records})
    place = {name: number for number, name in enumerate(names)}
    count, none = len(records), np.zeros(len(records), dtype=np.int64)
    requests: dict[str, Any] = {
        "id": np.arange(count),
        "kind": np.array([place[str(record["class"])] for record in records]),
        "admitted": _times(records, "placed"),
        "first_token": _times(records, "first_token"),
        "evictions": none,
        "wasted": none.copy(),
        "replica": np.array([max(int(record["engine"]), 0) for record in records]),
        "how": np.array([ENDS.index(HOW.get(str(record["outcome"]), End.ABORTED)) for record in records]),
        "arrival": _times(records, "arrival"),
        "finished": _times(records, "finished"),
    }
    for name in ("admitted", "first_token", "finished", "arrival"):
        requests[name] -= requests["arrival"][0]
    for name in ("prompt", "output", "cached"):
        requests[name] = np.array([int(record[name]) for record in records])
    meta = {
        "label": str(records[-1].get("router", "?")),
        "driver": "route",
        "load": "open",
        "clients": None,
        "kinds": [{"name": name, "first_token": None, "between_tokens": None} for name in names],
        "outcome": "finished",
        "policies": [],
        "fallbacks": [],
    }
    empty = {name: {column: np.empty(0) for column in columns} for name, columns in COLUMNS.items()}
    return Run(meta, **(empty | {"requests": requests}))


def _times(records: list[dict[str, Any]], name: str) -> Any:
    return np.array([nan if record[name] is None else float(record[name]) for record in records])


def _records(path: str | Path) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InputError(f"trace {path}: {error.strerror or error}; give a readable file") from None
    records: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        record = parse_line(text)
        last = number == len(lines)  # what follows the last line end: nothing, or a line cut off
        if record is not None and not (last and _fault(record)):
            if wrong := _fault(record):
                raise InputError(f"trace {path}:{number}: {wrong}; the file was changed, take another")
            records.append(record)
        elif text.strip() and not last:
            raise InputError(f"trace {path}:{number}: not a JSON object; the file was changed, take another")
    if not records:
        raise InputError(f"trace {path}: no request in it; let the router serve some first")
    return records


def _fault(record: dict[str, Any]) -> str | None:
    if record.get("route") != VERSION:
        return f"format {record.get('route')!r}, this version reads {VERSION}"
    for name in (*NUMBERS, *OPTIONAL):
        value = record.get(name)
        if value is None and name in OPTIONAL:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
            return f"{name!r} is not a number"
    if not isinstance(record.get("class"), str) or not isinstance(record.get("outcome"), str):
        return "'class' or 'outcome' is not a text"
    return None
