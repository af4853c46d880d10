"""Traces of a live engine and of a router, one JSON object a line, read back into the tables of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.files import parse_line
from headgate.core.plan import ALL, NONE, Plan
from headgate.core.policy import End, Observer, Steps
from headgate.core.request import Identity, Slo
from headgate.record.recorder import Recorder
from headgate.record.tables import COLUMNS, ENDS, Run
from headgate.record.trace_fields import FIELDS, KNOWN, TRACE, fault, first_line, header_fault

SAME_MOMENT = 1e-6  # seconds; less is rounding
ORDERED = ("admitted", "prefilled", "finished")  # of a request that has arrived
HERE = (*ORDERED, "held", "resumed", "evicted")
WRONG = (KeyError, TypeError, ValueError, IndexError, OverflowError)  # what nonsense in a line can cause


@dataclass(slots=True, eq=False)
class TracedRequest(Identity):
    todo: int = 0
    generated: int = 0
    last_token: float | None = None
    evictions: int = 0
    cached: int = 0
    wasted: int = 0
    newest: float = -inf  # when it got its slot or its last first token

    @property
    def room(self) -> int:
        return self.todo

    @property
    def queued(self) -> float:
        """A trace is of one engine, whose queue it reached when it arrived."""
        return self.arrival


class ClockError(Exception):
    """A moment before one that was told already. Engines count from their start and never back."""


class Replay:
    def __init__(self, listener: Observer | None = None) -> None:
        self._tables = Recorder([])
        self.recorder = listener or self._tables
        self.here: dict[int, TracedRequest] = {}
        self.tenants: dict[str, int] = {}
        self.tenant_of: dict[int, str] = {}
        self.promised: dict[str, Slo] = {}  # to all requests of a kind
        self.asides: list[dict[str, Any]] = []  # what the tables have no place for
        self._came: set[int] = set()
        self._rolling: dict[int, int] = {}  # requests that get a token in each tick, and since which
        self._tick = 0
        self._end = -inf  # of the newest step
        self._queries: list[int] = []  # by row of the step table

    def tell(self, line: dict[str, Any]) -> None:
        """One line of the trace. Requests that came before it began are not known, and left out."""
        event = line["event"]
        if event in HERE:
            seen = self.here.get(line["id"])
            if seen is not None:
                what, at = f"{event!r} of request {seen.id}", line["at"]
                _forward(what, "its arrival", seen.arrival, at)
                if event in ORDERED:
                    _forward(what, "its slot or first token", seen.newest, at)
                    seen.newest = at
                if event != "admitted":
                    getattr(self, f"_{event}")(seen, line)
                how = (End(line["how"]),) if event == "finished" else ()
                getattr(self.recorder, event)(seen, line["at"], *how)
        elif event in ("arrived", "steps", "plan"):
            getattr(self, f"_{event}")(line)
        elif event in FIELDS:
            self.asides.append(line)

    def tables(self) -> dict[str, Any]:
        for seen in self.here.values():
            self._stop(seen)
        tables = self._tables.tables()
        if any(self._queries):
            tables["steps"]["queries"] = np.array(self._queries)
        return tables

    def _arrived(self, line: dict[str, Any]) -> None:
        slo = Slo(**{name: line[name] for name in Slo._fields})
        known = {name: line[name] for name in KNOWN}
        if line["id"] in self._came:
            raise ValueError("the same request comes twice")
        self._came.add(line["id"])
        kind, kinds = line["kind"], self._tables.rows.kinds
        kinds.setdefault(kind, len(kinds))
        if self.promised.setdefault(kind, slo) != slo:
            self.promised[kind] = Slo()  # requests of one kind with promises of their own
        self.tenants.setdefault(line["tenant"], len(self.tenants))
        self.tenant_of[line["id"]] = line["tenant"]
        seen = self.here[line["id"]] = TracedRequest(arrival=line["at"], slo=slo, **known)
        self.recorder.arrived(seen, line["at"])

    def _prefilled(self, seen: TracedRequest, line: dict[str, Any]) -> None:
        seen.generated += 1
        seen.last_token = line["at"]
        self._rolling[seen.id] = self._tick

    def _held(self, seen: TracedRequest, line: dict[str, Any]) -> None:
        self._stop(seen)

    def _resumed(self, seen: TracedRequest, line: dict[str, Any]) -> None:
        seen.last_token = line["last"]
        self._rolling[seen.id] = self._tick

    def _evicted(self, seen: TracedRequest, line: dict[str, Any]) -> None:
        self._rolling.pop(seen.id, None)
        seen.last_token, seen.generated = line["last"], line["output"]
        seen.evictions, seen.wasted = line["evictions"], line["wasted"]

    def _finished(self, seen: TracedRequest, line: dict[str, Any]) -> None:
        self._rolling.pop(seen.id, None)
        del self.here[seen.id]
        seen.generated, seen.cached = line["output"], line["cached"]
        seen.evictions, seen.wasted = line["evictions"], line["wasted"]

    def _steps(self, line: dict[str, Any]) -> None:
        steps = Steps(*(line[name] for name in Steps._fields))
        _forward("'steps'", "the end of the step above", self._end, steps.start, *steps.ends)
        self._end = steps.ends[-1]
        if self.recorder is self._tables:
            self._queries.append(steps.queries)
        if steps.decodes:
            self._tick += len(steps.ends)
        self.recorder.stepped(steps)

    def _plan(self, line: dict[str, Any]) -> None:
        named = line["decode"]
        decode = ALL if named < 0 else frozenset(range(named)) if named else NONE
        plan = Plan(decode, tuple(range(line["prompts"])), evict=tuple(range(line["evict"])))
        gauges = {name: nan if value is None else value for name, value in line["gauges"].items()}
        self.recorder.planned(plan, line["at"], gauges)

    def _stop(self, seen: TracedRequest) -> None:
        since = self._rolling.pop(seen.id, None)
        if since is not None:
            seen.generated += self._tick - since


def _forward(what: str, than: str, *moments: float) -> None:
    for before, after in pairwise(moments):
        if after < before - SAME_MOMENT:
            raise ClockError(f"{what} at {after:g} s, before {than} at {before:g} s")
        than = "the moment above"


def is_live_trace(path: str | Path) -> bool:
    return isinstance(first_line(path).get("trace"), int)


def tell_trace(path: str | Path, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Tells of each line but the first, which is returned."""
    lines = trace_lines(path)
    _, header = next(lines)
    for number, line in lines:
        try:
            tell(line)
        except ClockError as error:
            raise InputError(
                f"trace {path}:{number}: {error}: the clock goes back; give each engine's trace by itself"
            ) from None
        except WRONG as error:
            raise InputError(
                f"trace {path}:{number}: {line.get('event')!r} makes no sense here "
                f"({type(error).__name__}: {error}); the file was changed, take another"
            ) from None
    return header


def read_live_trace(path: str | Path) -> Run:
    """The run a trace tells of. A last line that was cut off is left out; any other damage is refused.

    So is a clock that goes back: rates and waits taken from it would mean nothing, and sorting would put
    steps of two engines into one another.
    """
    replay = Replay()
    header = tell_trace(path, replay.tell)
    if not replay.promised:
        raise InputError(f"trace {path}: no request in it; let the engine serve some first")
    left, asides, tables = len(replay.here), replay.asides, replay.tables()
    kinds = [{"name": name, **slo.said()} for name, slo in replay.promised.items()]
    meta = header | {"label": header.get("policy", "?"), "load": "open", "clients": None, "kinds": kinds}
    meta |= {
        "outcome": f"cut off with {left} requests under way" if left else "finished",
        "policies": [line for line in asides if line["event"] == "policy"],
        "fallbacks": [line for line in asides if line["event"] == "fell_back"],
        "rescues": sum(line["event"] == "rescued" for line in asides),
        "wasted_tokens": sum(line["tokens"] for line in asides if line["event"] == "wasted"),
    }
    if "queries" in tables["steps"]:
        engine = header.get("engine")
        drafts = engine.get("num_speculative_tokens") if isinstance(engine, dict) else None
        meta["speculation"] = {"drafts": drafts}  # gaps are between deliveries
    if len(replay.tenants) > 1:
        meta["tenants"] = list(replay.tenants)
        numbers = {id: replay.tenants[name] for id, name in replay.tenant_of.items()}
        tables["requests"]["tenant"] = np.array([numbers[id] for id in tables["requests"]["id"].tolist()])
    return Run(meta, **tables)


def trace_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first line, which says whose trace it is, then all others; each with its number, checked."""
    lines = _lines(path, fault, header=True)
    number, header = next(lines, (0, {}))
    if not isinstance(header.get("trace"), int):
        raise InputError(
            f"{path} is no trace of a live engine; give a file that headgate serve --trace wrote"
        )
    if header["trace"] > TRACE:
        raise InputError(f"trace {path} has format {header['trace']}, this version reads {TRACE}; upgrade")
    if wrong := header_fault(header):
        raise InputError(f"trace {path}:{number}: {wrong}; the file was changed, take another")
    yield number, header
    yield from lines


def _lines(
    path: str | Path, fault: Callable[[dict[str, Any]], str | None], header: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                line = parse_line(text)
                if number == 1 and header:
                    yield number, line or {}
                    continue
                wrong = "not a JSON object" if line is None else fault(line)
                if wrong and not text.endswith("\n"):
                    return  # who wrote it died here
                if line is None or wrong:
                    raise InputError(f"trace {path}:{number}: {wrong}; the file was changed, take another")
                yield number, line
    except OSError as error:
        raise InputError(f"trace {path}: {error.strerror or error}; give a readable file") from None


# -- a router's trace

VERSION = 1
HOW = {"ok": End.STOPPED, "client-gone": End.ABORTED, "refused": End.REFUSED}
NUMBERS = ("arrival", "finished", "prompt", "output", "engine", "cached")
OPTIONAL = ("placed", "first_token")


def is_route_trace(path: str | Path) -> bool:
    return {"route", "arrival"} <= first_line(path).keys()


def read_route_trace(path: str | Path) -> Run:
    """A run without steps. A last line that was cut off is left out; any other damage is refused."""
    records = sorted((record for _, record in _lines(path, _fault)), key=lambda record: record["arrival"])
    if not records:
        raise InputError(f"trace {path}: no request in it; let the router serve some first")
    names = sorted({str(record["class"]) for record in records})
    ends = [ENDS.index(HOW.get(str(record["outcome"]), End.ABORTED)) for record in records]
    columns = {"id": range(len(records)), "kind": [names.index(str(record["class"])) for record in records]}
    columns |= {"replica": [max(int(record["engine"]), 0) for record in records], "how": ends}
    columns |= dict.fromkeys(("evictions", "wasted"), [0] * len(records))
    requests = {name: np.array(values) for name, values in columns.items()}
    times = {"arrival": "arrival", "admitted": "placed", "first_token": "first_token", "finished": "finished"}
    for column, name in times.items():
        moments = [nan if record[name] is None else float(record[name]) for record in records]
        requests[column] = np.array(moments) - float(records[0]["arrival"])
    for name in ("prompt", "output", "cached"):
        requests[name] = np.array([int(record[name]) for record in records])
    kinds = [{"name": name, "first_token": None, "between_tokens": None} for name in names]
    label = str(records[-1].get("router", "?"))
    meta: dict[str, Any] = {"label": label, "driver": "route", "load": "open", "clients": None}
    meta |= {"kinds": kinds, "outcome": "finished", "policies": [], "fallbacks": []}
    empty = {name: {column: np.empty(0) for column in every} for name, every in COLUMNS.items()}
    return Run(meta, **(empty | {"requests": requests}))


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
