"""Observers that write a run's tables, the same for every driver, of one engine and of a fleet."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.build import compiled, mypyc_attr
from headgate.core.listeners import StepCounter
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End
from headgate.core.request import RECORDED, Request
from headgate.record.rows import PLANS, REQUESTS, STAYS, STEPS

if compiled():
    from headgate.record.compiled_rows import Rows
else:
    from headgate.record.rows import Rows  # type: ignore[assignment]

HOW = {how: code for code, how in enumerate(End)}
STOPPED: Final = End.STOPPED
STILL_HERE: Final = -1
NOWHERE: Final = -1  # the engine of a request that was sent to none
MORE: Final = tuple(name for name in RECORDED if name not in REQUESTS)
COLUMNS = REQUESTS | dict.fromkeys(MORE, int)


class OpenStay:
    __slots__ = ("first_tick", "gap", "number", "opened")

    def __init__(self, number: int, opened: float, gap: float, first_tick: int) -> None:
        self.number, self.opened, self.gap, self.first_tick = number, opened, gap, first_tick


class OpenRequest:
    __slots__ = ("admitted", "arrival", "first", "replica", "request", "stay")

    def __init__(self, request: Request, arrival: float) -> None:
        self.request, self.arrival = request, arrival
        self.admitted = self.first = nan
        self.replica = NOWHERE
        self.stay: OpenStay | None = None


class Tables:
    """The rows of all engines of a run; one per request, written when it leaves.

    Engines of a fleet write into the same buffers, whose ends stay in the CPU's caches.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = {name: index for index, name in enumerate(kinds)}
        self.here: dict[int, OpenRequest] = {}
        self.last_before: dict[int, float] = {}  # newest tokens of requests that lost their KV
        self._left = Rows()
        self.steps, self.stays, self.plans = Rows(), Rows(), Rows()
        self.opened = 0  # stays
        self.asked = 0  # plans
        self._gauges: dict[str, array[float]] = {}

    def arrived(self, request: Request, now: float) -> None:
        self.here[request.id] = OpenRequest(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        id = request.id
        if self.last_before:
            self.last_before.pop(id, None)
        code = 0 if how is STOPPED else HOW[how]  # an Enum takes long to hash
        self._write(self._left, id, self.here[id], now, code)
        del self.here[id]  # last: Ctrl-C may come in between, and its row is written then, or written again

    def gauge(self, gauges: Mapping[str, float]) -> None:
        """With the newest plan; a policy may give one with some plans only."""
        for name, value in gauges.items():
            column = self._gauges.setdefault(name, array("d"))
            column.extend([nan] * (self.asked - 1 - len(column)))
            column.append(value)

    def engines(self, ticks: Mapping[int, int]) -> dict[str, dict[str, NDArray[Any]]]:
        """Steps, stays and plans by engine, then by time; `ticks` are those of each engine so far."""
        for id, here in self.here.items():
            self.close_stay(id, here, ticks.get(here.replica, 0), here.replica)
        plans = _columns(PLANS, self.plans)
        engine = plans.pop("replica")
        for name, column in self._gauges.items():
            column.extend([nan] * (len(engine) - len(column)))
            plans[f"gauge.{name}"] = np.array(column[: len(engine)])
        stays = _by_number(_columns(STAYS, self.stays), "number")  # as they were opened
        del stays["number"]
        tables = {"steps": _columns(STEPS, self.steps), "stays": stays, "plans": plans | {"replica": engine}}
        if len(ticks) < 2:
            return tables
        return {name: _sorted(table, "replica") for name, table in tables.items()}

    def close_stay(self, id: int, here: OpenRequest, tick: int, replica: int) -> None:
        stay = here.stay
        if stay is not None:
            first = stay.first_tick
            self.stays.stay(stay.number, id, stay.opened, stay.gap, first, tick - first, replica)
            here.stay = None

    def table(self) -> dict[str, NDArray[Any]]:
        still = Rows()
        for id, here in self.here.items():
            self._write(still, id, here, nan, STILL_HERE)
        columns = _by_number(_columns(COLUMNS, self._left, still), "id")
        return columns | {"how": columns["how"].astype(np.int8)}

    def _write(self, rows: Rows, id: int, here: OpenRequest, finished: float, how: int) -> None:
        request = here.request
        rows.request(
            id, here.arrival, here.admitted, here.first, finished,
            request.prompt, self.kinds[request.kind], request.priority, request.cached,
            request.generated, request.evictions, request.wasted, how, here.replica,
        )  # fmt: skip
        for name in MORE:
            rows.count(getattr(request, name))


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(StepCounter):
    """Keeps one row per request, per run of equal steps, per stay among the decodes, and per plan.

    A request's tokens are not listed one by one: while it decodes with the others it gets one in each tick,
    so a *stay* (from which tick, for how many) says it all. See `headgate.record.tables` for the columns.
    """

    def __init__(self, kinds: Sequence[str] = ("",), replica: int = 0, rows: Tables | None = None) -> None:
        self._replica = replica
        self.rows = rows or Tables(kinds)
        self._here, self._last_before = self.rows.here, self.rows.last_before
        self.tick = 0
        self._step = 0

    def arrived(self, request: Request, now: float) -> None:
        self.rows.arrived(request, now)
        self._here[request.id].replica = self._replica

    def admitted(self, request: Request, now: float) -> None:
        here = self._here[request.id]
        if here.admitted != here.admitted:
            here.admitted = now

    def prefilled(self, request: Request, now: float) -> None:
        id = request.id
        before = self._last_before.pop(id, nan) if self._last_before else nan
        if before != before:
            self._here[id].first = now
        self._open_stay(id, now, now - before)

    def held(self, request: Request, now: float) -> None:
        self._close_stay(request.id)

    def resumed(self, request: Request, now: float) -> None:
        last = request.last_token
        self._open_stay(request.id, now if last is None else last, nan)

    def evicted(self, request: Request, now: float) -> None:
        self._close_stay(request.id)
        if request.last_token is not None:
            self._last_before.setdefault(request.id, request.last_token)  # a token may be dropped in between

    def finished(self, request: Request, now: float, how: End) -> None:
        self._close_stay(request.id)
        self.rows.finished(request, now, how)

    def ran(
        self, start: float, first: float, last: float, count: int, decodes: int, context: int, prefill: int,
        behind: int, kv: int,
    ) -> None:  # fmt: skip
        whole = last - start
        self.rows.steps.step(
            start, first - start, whole, count, decodes, context, prefill, behind, kv, self._replica
        )
        self._step += count
        if decodes:
            self.tick += count

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """What was decided, in numbers: how many decodes are named (-1: all), how many prompts, evictions."""
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        rows = self.rows
        rows.plans.plan(now, self._step, named, len(plan.prefill), len(plan.evict), self._replica)
        rows.asked += 1
        if gauges:
            rows.gauge(gauges)

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        own = self.rows.engines({self._replica: self.tick})
        del own["stays"]["replica"], own["plans"]["replica"]
        return {"requests": self.rows.table(), **own}

    def _open_stay(self, id: int, opened: float, gap: float) -> None:
        rows = self.rows
        self._here[id].stay = OpenStay(rows.opened, opened, gap, self.tick)
        rows.opened += 1

    def _close_stay(self, id: int) -> None:
        here = self._here.get(id)
        if here is not None:
            self.rows.close_stay(id, here, self.tick, self._replica)


class EngineRecorder(Recorder):
    """The recorder of one engine of a fleet. Requests arrive at the fleet, not here."""

    def arrived(self, request: Request, now: float) -> None:
        """It was sent here; the fleet knows since when it waits."""
        self._here[request.id].replica = self._replica

    def parted(self, request: Request) -> None:
        self._close_stay(request.id)

    def joined(self, request: Request, now: float, runs: bool) -> None:
        self.arrived(request, now)
        if runs:
            self.resumed(request, now)

    def came_without(self, request: Request) -> None:
        self._here[request.id].replica = self._replica
        if request.last_token is not None:
            self._last_before.setdefault(request.id, request.last_token)


class FleetRecorder:
    """One row per request whichever engine served it, and the steps of every engine."""

    def __init__(self, kinds: Sequence[str], engines: int) -> None:
        self.rows = Tables(kinds)
        self.engines = [EngineRecorder((), number, self.rows) for number in range(engines)]

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """All that was recorded so far; every table but the requests is sorted by engine, then by time."""
        ticks = {number: engine.tick for number, engine in enumerate(self.engines)}
        return {"requests": self.rows.table(), **self.rows.engines(ticks)}


def _columns(names: dict[str, type], *rows: Rows) -> dict[str, NDArray[Any]]:
    kinds = np.dtype([(name, "<f8" if kind is float else "<i8") for name, kind in names.items()])
    size = kinds.itemsize  # of whole rows; Ctrl-C may have come while the last one was written
    tables = [np.frombuffer(part, kinds, len(part) // size) for table in rows for part in table.parts()]
    none = np.empty(0, kinds)
    return {name: np.concatenate([none[name], *(table[name] for table in tables)]) for name in names}


def _by_number(columns: dict[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    """Each once."""
    columns = _sorted(columns, name)
    first = np.diff(columns[name], prepend=-1) != 0
    return {name: column[first] for name, column in columns.items()}


def _sorted(columns: dict[str, NDArray[Any]], by: str) -> dict[str, NDArray[Any]]:
    keys = columns[by]
    small = keys.size and keys.max() < 2**15  # numpy sorts these by their digits
    order = np.argsort(keys.astype(np.int16) if small else keys, kind="stable")
    for name in columns:
        columns[name] = columns[name][order]
    return columns
