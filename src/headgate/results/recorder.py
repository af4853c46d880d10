"""An Observer that writes a run's tables, the same whoever drives the engine."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import nan
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End, Observer, Steps
from headgate.core.request import Request

HOW = {how: code for code, how in enumerate(End)}
STILL_HERE = -1
STEPS = {"start": float, "first": float, "seconds": float, "count": int, "decodes": int, "context": int}
STEPS |= {"prefill": int, "behind": int, "kv": int}
STAYS = {"request": int, "opened": float, "gap": float, "first_tick": int, "ticks": int}
PLANS = {"time": float, "step": int, "decode": int, "prompts": int, "evict": int}
STEP_ROW, STAY_ROW, PLAN_ROW = (Struct(f"{len(columns)}d").pack for columns in (STEPS, STAYS, PLANS))
TICKS = Struct("d")
REQUEST_TIMES = ("arrival", "admitted", "first_token", "finished")
REQUEST_COUNTS = ("kind", "cached", "prompt", "output", "evictions", "wasted")


class Recorder(Observer):
    """Keeps one row per request, per run of equal steps, per stay among the decodes, and per plan.

    A request's tokens are not listed one by one: while it decodes with the others it gets one in each tick,
    so a *stay* (from which tick, for how many) says it all. See `headgate.results.tables` for the columns.
    """

    def __init__(self, requests: int, kinds: Sequence[str] = ("",), replica: int = 0) -> None:
        self._replica = replica
        self._kinds = {name: index for index, name in enumerate(kinds)}
        self._handles: dict[int, Request] = {}  # those still here
        self._last_before: dict[int, float] = {}  # newest token of those evicted
        self._times = {name: array("d", [nan]) * requests for name in REQUEST_TIMES}
        self._counts = {name: array("q", [0]) * requests for name in REQUEST_COUNTS}
        self._prompt, self._kind = self._counts["prompt"], self._counts["kind"]
        self._how = array("b", [STILL_HERE]) * requests
        self._arrival, self._admitted, self._first, self._finished = self._times.values()
        self._steps = bytearray()  # row after row of doubles, in which counts are exact
        self._stays = bytearray()
        self._plans = bytearray()
        self._stay_of: dict[
            int, tuple[int, int]
        ] = {}  # request to where its open stay ends, and its first tick
        self._gauges: dict[str, array[float]] = {}
        self._tick = 0
        self._step = 0

    def arrived(self, request: Request, now: float) -> None:
        """A new row."""
        id = request.id
        self._handles[id] = request
        self._arrival[id] = now
        self._prompt[id] = request.prompt
        self._kind[id] = self._kinds[request.kind]

    def admitted(self, request: Request, now: float) -> None:
        """Its first seat counts."""
        if self._admitted[request.id] != self._admitted[request.id]:  # still nan
            self._admitted[request.id] = now

    def prefilled(self, request: Request, now: float) -> None:
        """A stay among the decodes begins with a token."""
        before = self._last_before.pop(request.id, nan) if self._last_before else nan
        if before != before:
            self._first[request.id] = now
        self._open_stay(request.id, now, now - before)

    def held(self, request: Request, now: float) -> None:
        """Its stay is interrupted."""
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
        """Its row is complete."""
        id = request.id
        self._close_stay(id)
        if self._last_before:
            self._last_before.pop(id, None)
        self._finished[id] = now
        self._how[id] = HOW[how]
        self._fill(self._handles.pop(id))

    def stepped(self, steps: Steps) -> None:
        """One row for the whole run of them."""
        start, ends, decodes, context, prefill, behind, kv = steps
        count = len(ends)
        whole = ends[-1] - start
        first = whole if count == 1 else ends[0] - start
        self._steps += STEP_ROW(start, first, whole, count, decodes, context, prefill, behind, kv)
        self._step += count
        if decodes:
            self._tick += count

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """What was decided, in numbers: how many decodes are named (-1: all), how many prompts, evictions."""
        decode = plan.decode
        named = -1 if decode is ALL else 0 if isinstance(decode, Decodes) else len(decode)
        self._plans += PLAN_ROW(now, self._step, named, len(plan.prefill), len(plan.evict))
        for name, value in gauges.items():
            column = self._gauges.get(name)
            if column is None:
                column = self._gauges[name] = array("d", [nan]) * (len(self._plans) // (8 * len(PLANS)) - 1)
            column.append(value)

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """All that was recorded so far, as columns. Requests that never came have no row."""
        for id in list(self._stay_of):
            self._close_stay(id)
        for request in self._handles.values():
            self._fill(request)
        came = ~np.isnan(np.array(self._arrival))
        columns = self._times | self._counts | {"how": self._how}
        requests = {name: np.array(column)[came] for name, column in columns.items()}
        steps = _columns(self._steps, STEPS)
        for table in (requests, steps):
            table["replica"] = np.full(len(next(iter(table.values()))), self._replica)
        plans = _columns(self._plans, PLANS)
        for name, column in self._gauges.items():
            column.extend([nan] * (len(plans["time"]) - len(column)))
            plans[f"gauge.{name}"] = np.array(column)
        return {
            "requests": {"id": np.flatnonzero(came)} | requests,
            "steps": steps,
            "stays": _columns(self._stays, STAYS),
            "plans": plans,
        }

    def _fill(self, request: Request) -> None:
        row, id = self._counts, request.id
        row["output"][id] = request.generated
        if request.cached:
            row["cached"][id] = request.cached
        if request.evictions:
            row["evictions"][id] = request.evictions
            row["wasted"][id] = request.wasted

    def _open_stay(self, id: int, opened: float, gap: float) -> None:
        self._stays += STAY_ROW(id, opened, gap, self._tick, 0)
        self._stay_of[id] = len(self._stays) - 8, self._tick

    def _close_stay(self, id: int) -> None:
        where = self._stay_of.pop(id, None)
        if where is not None:
            TICKS.pack_into(self._stays, where[0], self._tick - where[1])


def _columns(rows: bytearray, names: dict[str, type]) -> dict[str, NDArray[Any]]:
    """Rows of doubles, as columns of their own types."""
    table = np.frombuffer(bytes(rows)).reshape(-1, len(names))
    return {name: table[:, index].astype(kind) for index, (name, kind) in enumerate(names.items())}
