"""An Observer that writes a run's tables, the same whoever drives the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.core.build import mypyc_attr
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End, StepCounter
from headgate.core.request import RECORDED, Request

HOW = {how: code for code, how in enumerate(End)}
STOPPED = End.STOPPED
STILL_HERE = -1
NOWHERE = -1  # the engine of a request that was sent to none
STEPS = {"start": float, "first": float, "seconds": float, "count": int, "decodes": int, "context": int}
STEPS |= {"prefill": int, "behind": int, "kv": int}
STAYS = {"request": int, "opened": float, "gap": float, "first_tick": int}
PLANS = {"time": float, "step": int, "decode": int, "prompts": int, "evict": int}
MANY = 1024  # numbers that wait in a list before they are packed
REQUEST_TIMES = ("arrival", "admitted", "first_token", "finished")
REQUEST_COUNTS = (*RECORDED, "cached", "output", "evictions", "wasted")
PLAIN = tuple(name for name in RECORDED if name != "kind")  # a kind is kept as its number


class Numbers:
    """Row after row of doubles, in which counts are exact. They are packed many at once: that is quicker."""

    __slots__ = ("new", "packed")

    def __init__(self) -> None:
        self.new: list[float] = []
        self.packed = array("d")

    def __len__(self) -> int:
        return len(self.packed) + len(self.new)

    def pack(self) -> None:
        self.packed.fromlist(self.new)
        self.new.clear()


class Rows:
    """One row per request, shared by all engines that work on it."""

    def __init__(self, requests: int, kinds: Sequence[str]) -> None:
        self.kinds = {name: index for index, name in enumerate(kinds)}
        self.handles: dict[int, Request] = {}  # those still here
        self.last_before: dict[int, float] = {}  # newest token of those who lost their KV
        self.times = {name: array("d", [nan]) * requests for name in REQUEST_TIMES}
        self.counts = {name: array("q", [0]) * requests for name in REQUEST_COUNTS}
        self._plain = [(name, self.counts[name]) for name in PLAIN]
        self._arrival, self._finished = self.times["arrival"], self.times["finished"]
        self._kind, self._output = self.counts["kind"], self.counts["output"]
        self.how = array("b", [STILL_HERE]) * requests
        self.replica = array("q", [NOWHERE]) * requests

    def arrived(self, request: Request, now: float) -> None:
        id = request.id
        self.handles[id] = request
        self._arrival[id] = now
        self._kind[id] = self.kinds[request.kind]
        for name, column in self._plain:
            column[id] = getattr(request, name)

    def finished(self, request: Request, now: float, how: End) -> None:
        id = request.id
        if self.last_before:
            self.last_before.pop(id, None)
        self._finished[id] = now
        self.how[id] = 0 if how is STOPPED else HOW[how]  # an Enum takes long to hash
        self._fill(self.handles.pop(id), id)

    def table(self) -> dict[str, NDArray[Any]]:
        """As columns. Requests that never came have no row."""
        for request in self.handles.values():
            self._fill(request, request.id)
        came = ~np.isnan(np.array(self.times["arrival"]))
        columns = self.times | self.counts | {"how": self.how, "replica": self.replica}
        return {"id": np.flatnonzero(came)} | {
            name: np.array(column)[came] for name, column in columns.items()
        }

    def _fill(self, request: Request, id: int) -> None:
        self._output[id] = request.generated
        if request.cached:
            self.counts["cached"][id] = request.cached
        if request.evictions:
            self.counts["evictions"][id] = request.evictions
            self.counts["wasted"][id] = request.wasted


@mypyc_attr(allow_interpreted_subclasses=True)
class Recorder(StepCounter):
    """Keeps one row per request, per run of equal steps, per stay among the decodes, and per plan.

    A request's tokens are not listed one by one: while it decodes with the others it gets one in each tick,
    so a *stay* (from which tick, for how many) says it all. See `headgate.record.tables` for the columns.
    """

    def __init__(
        self, requests: int, kinds: Sequence[str] = ("",), replica: int = 0, rows: Rows | None = None
    ) -> None:
        self._replica = replica
        self.rows = rows or Rows(requests, kinds)
        self._last_before = self.rows.last_before
        self._admitted, self._first = self.rows.times["admitted"], self.rows.times["first_token"]
        self._steps, self._stays, self._plans = Numbers(), Numbers(), Numbers()
        self._ticks = array("q")  # of each stay; less the tick that it began with as long as it is open
        self._stay_of: dict[int, int] = {}  # request to the number of its open stay
        self._gauges: dict[str, array[float]] = {}
        self._tick = 0
        self._step = 0

    def arrived(self, request: Request, now: float) -> None:
        self.rows.arrived(request, now)
        self.rows.replica[request.id] = self._replica

    def admitted(self, request: Request, now: float) -> None:
        id = request.id
        if isnan(self._admitted[id]):
            self._admitted[id] = now

    def prefilled(self, request: Request, now: float) -> None:
        """A stay among the decodes begins with a token."""
        before = self._last_before.pop(request.id, nan) if self._last_before else nan
        if before != before:
            self._first[request.id] = now
        self._open_stay(request.id, now, now - before)

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
        ends: Sequence[float],
        decodes: int,
        context: int,
        prefill: int,
        behind: int,
        kv: int,
    ) -> None:
        """One row for the whole run of them."""
        count = len(ends)
        whole = ends[-1] - start
        first = whole if count == 1 else ends[0] - start
        steps = self._steps.new
        steps += (start, first, whole, count, decodes, context, prefill, behind, kv)
        if len(steps) > MANY:
            self._steps.pack()
        self._step += count
        if decodes:
            self._tick += count

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """What was decided, in numbers: how many decodes are named (-1: all), how many prompts, evictions."""
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        plans = self._plans.new
        plans += (now, self._step, named, len(plan.prefill), len(plan.evict))
        if len(plans) > MANY:
            self._plans.pack()
        if gauges:
            self._gauge(gauges)

    def _gauge(self, gauges: Mapping[str, float]) -> None:
        for name, value in gauges.items():
            column = self._gauges.get(name)
            if column is None:
                column = self._gauges[name] = array("d", [nan]) * (len(self._plans) // len(PLANS) - 1)
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
        plans = _columns(self._plans, PLANS)
        for name, column in self._gauges.items():
            column.extend([nan] * (len(plans["time"]) - len(column)))
            plans[f"gauge.{name}"] = np.array(column)
        stays = _columns(self._stays, STAYS) | {"ticks": np.array(self._ticks)}
        return {"steps": _columns(self._steps, STEPS), "stays": stays, "plans": plans}

    def _open_stay(self, id: int, opened: float, gap: float) -> None:
        stays = self._stays.new
        stays += (id, opened, gap, self._tick)
        if len(stays) > MANY:
            self._stays.pack()
        self._stay_of[id] = len(self._ticks)
        self._ticks.append(-self._tick)

    def _close_stay(self, id: int) -> None:
        stay = self._stay_of.pop(id, None)
        if stay is not None:
            self._ticks[stay] += self._tick


def _columns(rows: Numbers, names: dict[str, type]) -> dict[str, NDArray[Any]]:
    """As columns of their own types."""
    rows.pack()
    table = np.array(rows.packed).reshape(-1, len(names))
    return {name: table[:, index].astype(kind) for index, (name, kind) in enumerate(names.items())}
