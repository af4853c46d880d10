"""An Observer that writes a run's tables, the same whoever drives the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.build import compiled, mypyc_attr
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End
from headgate.core.request import RECORDED, Request
from headgate.core.step_counter import StepCounter

if compiled():
    from headgate.record.compiled_rows import Rows
else:
    from headgate.record.rows import Rows  # type: ignore[assignment]

HOW = {how: code for code, how in enumerate(End)}
STOPPED: Final = End.STOPPED
STILL_HERE: Final = -1
NOWHERE: Final = -1  # the engine of a request that was sent to none
STEPS = {"start": float, "first": float, "seconds": float, "count": int, "decodes": int, "context": int}
STEPS |= {"prefill": int, "behind": int, "kv": int}
STAYS = {"number": int, "request": int, "opened": float, "gap": float, "first_tick": int, "ticks": int}
PLANS = {"time": float, "step": int, "decode": int, "prompts": int, "evict": int}
REQUESTS = {"id": int, "arrival": float, "admitted": float, "first_token": float, "finished": float}
REQUESTS |= {"prompt": int, "kind": int, "priority": int, "cached": int, "output": int, "evictions": int}
REQUESTS |= {"wasted": int, "how": int, "replica": int}
MORE: Final = tuple(name for name in RECORDED if name not in REQUESTS)
REQUESTS |= dict.fromkeys(MORE, int)


class Here:
    """A request that has not left, and what was noted of it."""

    __slots__ = ("admitted", "arrival", "first", "replica", "request")

    def __init__(self, request: Request, arrival: float) -> None:
        self.request, self.arrival = request, arrival
        self.admitted = self.first = nan
        self.replica = NOWHERE


class Stay:
    """A stay among the decodes that has not ended."""

    __slots__ = ("first_tick", "gap", "number", "opened")

    def __init__(self, number: int, opened: float, gap: float, first_tick: int) -> None:
        self.number, self.opened, self.gap, self.first_tick = number, opened, gap, first_tick


class Requests:
    """One row per request, shared by all engines that work on it; written when it leaves."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = {name: index for index, name in enumerate(kinds)}
        self.here: dict[int, Here] = {}
        self.last_before: dict[int, float] = {}  # newest token of those who lost their KV
        self._left = Rows()

    def arrived(self, request: Request, now: float) -> None:
        self.here[request.id] = Here(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        id = request.id
        if self.last_before:
            self.last_before.pop(id, None)
        code = 0 if how is STOPPED else HOW[how]  # an Enum takes long to hash
        self._write(self._left, id, self.here.pop(id), now, code)

    def table(self) -> dict[str, NDArray[Any]]:
        """As columns, by number. Requests that never came have no row."""
        still = Rows()
        for id, here in self.here.items():
            self._write(still, id, here, nan, STILL_HERE)
        found = _sorted(_columns(REQUESTS, self._left, still), "id")
        return found | {"how": found["how"].astype(np.int8)}

    def _write(self, rows: Rows, id: int, here: Here, finished: float, how: int) -> None:
        """The columns of REQUESTS; a kind is kept as its number."""
        request = here.request
        rows.request(
            id,
            here.arrival,
            here.admitted,
            here.first,
            finished,
            request.prompt,
            self.kinds[request.kind],
            request.priority,
            request.cached,
            request.generated,
            request.evictions,
            request.wasted,
            how,
            here.replica,
        )
        for name in MORE:
            rows.count(getattr(request, name))


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(StepCounter):
    """Keeps one row per request, per run of equal steps, per stay among the decodes, and per plan.

    A request's tokens are not listed one by one: while it decodes with the others it gets one in each tick,
    so a *stay* (from which tick, for how many) says it all. See `headgate.record.tables` for the columns.
    """

    def __init__(
        self, requests: int, kinds: Sequence[str] = ("",), replica: int = 0, rows: Requests | None = None
    ) -> None:
        self._replica = replica
        self.rows = rows or Requests(kinds)
        self._here, self._last_before = self.rows.here, self.rows.last_before
        self._steps, self._stays, self._plans = Rows(), Rows(), Rows()
        self._asked = 0  # plans
        self._opened = 0  # stays
        self._stay_of: dict[int, Stay] = {}  # of each request, as long as it is open
        self._gauges: dict[str, array[float]] = {}
        self._tick = 0
        self._step = 0

    def arrived(self, request: Request, now: float) -> None:
        self.rows.arrived(request, now)
        self._here[request.id].replica = self._replica

    def admitted(self, request: Request, now: float) -> None:
        here = self._here[request.id]
        if here.admitted != here.admitted:
            here.admitted = now

    def prefilled(self, request: Request, now: float) -> None:
        """A stay among the decodes begins with a token."""
        id = request.id
        before = self._last_before.pop(id, nan) if self._last_before else nan
        if before != before:
            self._here[id].first = now
        self._open_stay(id, now, now - before)

    def held(self, request: Request, now: float) -> None:
        self._close_stay(request.id)

    def resumed(self, request: Request, now: float) -> None:
        """A stay begins without a token."""
        last = request.last_token
        self._open_stay(request.id, now if last is None else last, nan)

    def evicted(self, request: Request, now: float) -> None:
        """Its stay is over; its next token will come late."""
        self._close_stay(request.id)
        if request.last_token is not None:
            self._last_before[request.id] = request.last_token

    def finished(self, request: Request, now: float, how: End) -> None:
        self._close_stay(request.id)
        self.rows.finished(request, now, how)

    def ran(
        self,
        start: float,
        first: float,
        last: float,
        count: int,
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
    ) -> None:
        """One row for the whole run of them."""
        whole = last - start
        self._steps.step(start, first - start, whole, count, decodes, context, prefill, behind, kv)
        self._step += count
        if decodes:
            self._tick += count

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """What was decided, in numbers: how many decodes are named (-1: all), how many prompts, evictions."""
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        self._plans.plan(now, self._step, named, len(plan.prefill), len(plan.evict))
        self._asked += 1
        if gauges:
            self._gauge(gauges)

    def _gauge(self, gauges: Mapping[str, float]) -> None:
        for name, value in gauges.items():
            column = self._gauges.get(name)
            if column is None:
                column = self._gauges[name] = array("d", [nan]) * (self._asked - 1)
            column.append(value)

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """All that was recorded so far, as columns."""
        own = self.own_tables()
        own["steps"]["replica"] = np.full(len(own["steps"]["start"]), self._replica)
        return {"requests": self.rows.table(), **own}

    def own_tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Steps, stays and plans of this engine."""
        for id in list(self._stay_of):
            self._close_stay(id)
        plans = _columns(PLANS, self._plans)
        for name, column in self._gauges.items():
            column.extend([nan] * (len(plans["time"]) - len(column)))
            plans[f"gauge.{name}"] = np.array(column)
        stays = _sorted(_columns(STAYS, self._stays), "number")  # as they were opened
        del stays["number"]
        return {"steps": _columns(STEPS, self._steps), "stays": stays, "plans": plans}

    def _open_stay(self, id: int, opened: float, gap: float) -> None:
        self._stay_of[id] = Stay(self._opened, opened, gap, self._tick)
        self._opened += 1

    def _close_stay(self, id: int) -> None:
        stay = self._stay_of.pop(id, None)
        if stay is not None:
            first = stay.first_tick
            self._stays.stay(stay.number, id, stay.opened, stay.gap, first, self._tick - first)


def _columns(names: dict[str, type], *rows: Rows) -> dict[str, NDArray[Any]]:
    """As columns of their own types."""
    kinds = np.dtype([(name, "<f8" if kind is float else "<i8") for name, kind in names.items()])
    tables = [np.frombuffer(part, kinds) for each in rows for part in each.parts()]
    none = np.empty(0, kinds)
    return {name: np.concatenate([none[name], *(table[name] for table in tables)]) for name in names}


def _sorted(columns: dict[str, NDArray[Any]], by: str) -> dict[str, NDArray[Any]]:
    """One column after the other, so that few are there twice."""
    order = np.argsort(columns[by])
    for name in columns:
        columns[name] = columns[name][order]
    return columns
