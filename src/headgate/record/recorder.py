"""An Observer that writes a run's tables, the same whoever drives the engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from math import nan
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headgate.core.build import mypyc_attr
from headgate.core.plan import ALL, Decodes, Plan
from headgate.core.policy import End
from headgate.core.request import RECORDED, Request
from headgate.core.step_counter import StepCounter

HOW = {how: code for code, how in enumerate(End)}
STOPPED: Final = End.STOPPED
STILL_HERE: Final = -1
NOWHERE: Final = -1  # the engine of a request that was sent to none
STEPS = {"start": float, "first": float, "seconds": float, "count": int, "decodes": int, "context": int}
STEPS |= {"prefill": int, "behind": int, "kv": int, "replica": int}
STAYS = {"request": int, "opened": float, "gap": float, "first_tick": int, "replica": int}
PLANS = {"time": float, "step": int, "decode": int, "prompts": int, "evict": int, "replica": int}
TIMES = {"id": int, "arrival": float, "admitted": float, "first_token": float, "finished": float}
COUNTS = {"cached": int, "output": int, "evictions": int, "wasted": int, "how": int, "replica": int}
PLAIN: Final = tuple(name for name in RECORDED if name != "kind")
KIND = {"kind": int}
REQUESTS = TIMES | KIND | COUNTS | dict.fromkeys(PLAIN, int)  # as they are written
SHOWN = (*TIMES, *RECORDED, *COUNTS)  # as they are shown


def _packer(names: Mapping[str, type]) -> Callable[..., bytes]:
    """Makes bytes of a row: doubles, and counts of 64 bits."""
    return Struct("".join("d" if kind is float else "q" for kind in names.values())).pack


STEP: Final = _packer(STEPS)
STAY: Final = _packer(STAYS)
PLAN: Final = _packer(PLANS)
REQUEST: Final = _packer(TIMES | KIND | COUNTS)
COUNT: Final = _packer(KIND)
NO_STAY: Final = -1


class Here:
    """A request that has not left, and what was noted of it."""

    __slots__ = ("admitted", "arrival", "first", "replica", "request", "stay")

    def __init__(self, request: Request, arrival: float) -> None:
        self.request, self.arrival = request, arrival
        self.admitted = self.first = nan
        self.replica = NOWHERE
        self.stay = NO_STAY  # the number of the open one


class Rows:
    """The rows of all engines of a run; one per request, written when it leaves.

    Engines of a fleet write into the same buffers, whose ends stay in the CPU's caches.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = {name: index for index, name in enumerate(kinds)}
        self.here: dict[int, Here] = {}
        self.last_before: dict[int, float] = {}  # newest token of those who lost their KV
        self._left = bytearray()
        self.steps, self.stays, self.plans = bytearray(), bytearray(), bytearray()
        self.ticks = array("q")  # of each stay; less the tick that it began with as long as it is open
        self.asked = 0  # plans
        self._gauges: dict[str, array[float]] = {}

    def arrived(self, request: Request, now: float) -> None:
        self.here[request.id] = Here(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        id = request.id
        if self.last_before:
            self.last_before.pop(id, None)
        code = 0 if how is STOPPED else HOW[how]  # an Enum takes long to hash
        self._left += self._row(id, self.here.pop(id), now, code)

    def gauge(self, gauges: Mapping[str, float]) -> None:
        """With the newest plan; a policy may give one with some plans only."""
        for name, value in gauges.items():
            column = self._gauges.setdefault(name, array("d"))
            column.extend([nan] * (self.asked - 1 - len(column)))
            column.append(value)

    def engines(self, ticks: Mapping[int, int]) -> dict[str, dict[str, NDArray[Any]]]:
        """Steps, stays and plans by engine, then by time; `ticks` are those of each engine so far."""
        for here in self.here.values():
            if here.stay != NO_STAY:
                self.ticks[here.stay] += ticks[here.replica]
                here.stay = NO_STAY
        gauges = {}
        for name, column in self._gauges.items():
            column.extend([nan] * (self.asked - len(column)))
            gauges[f"gauge.{name}"] = np.array(column)
        many = len(ticks) > 1
        return {
            "steps": _columns(self.steps, STEPS, {}, many),
            "stays": _columns(self.stays, STAYS, {"ticks": np.array(self.ticks)}, many),
            "plans": _columns(self.plans, PLANS, gauges, many),
        }

    def table(self) -> dict[str, NDArray[Any]]:
        """As columns, by number. Requests that never came have no row."""
        still = [self._row(id, here, nan, STILL_HERE) for id, here in self.here.items()]
        rows = _table(b"".join((self._left, *still)) if still else self._left, REQUESTS)
        order = np.argsort(rows["id"])
        found = {name: rows[name][order] for name in SHOWN}
        return found | {"how": found["how"].astype(np.int8)}

    def _row(self, id: int, here: Here, finished: float, how: int) -> bytes:
        """The columns of REQUESTS; a kind is kept as its number."""
        request = here.request
        row = REQUEST(
            id,
            here.arrival,
            here.admitted,
            here.first,
            finished,
            self.kinds[request.kind],
            request.cached,
            request.generated,
            request.evictions,
            request.wasted,
            how,
            here.replica,
        )
        for name in PLAIN:
            row += COUNT(getattr(request, name))
        return row


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
        self.rows = rows or Rows(kinds)
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
        self.rows.steps += STEP(
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
        rows.plans += PLAN(now, self._step, named, len(plan.prefill), len(plan.evict), self._replica)
        rows.asked += 1
        if gauges:
            rows.gauge(gauges)

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """All that was recorded so far, as columns."""
        own = self.rows.engines({self._replica: self.tick})
        del own["stays"]["replica"], own["plans"]["replica"]
        return {"requests": self.rows.table(), **own}

    def _open_stay(self, id: int, opened: float, gap: float) -> None:
        rows, tick = self.rows, self.tick
        rows.stays += STAY(id, opened, gap, tick, self._replica)
        self._here[id].stay = len(rows.ticks)
        rows.ticks.append(-tick)

    def _close_stay(self, id: int) -> None:
        here = self._here.get(id)
        if here is not None and here.stay != NO_STAY:
            self.rows.ticks[here.stay] += self.tick
            here.stay = NO_STAY


def _columns(
    rows: bytearray, names: dict[str, type], more: dict[str, NDArray[Any]], many: bool
) -> dict[str, NDArray[Any]]:
    """As columns of their own types, and more; the engine is the last, by which rows of many are sorted."""
    table = _table(rows, names)
    if many:
        engine = table["replica"]
        small = engine.size and engine.max() < 2**15  # numpy sorts these by their digits
        order = np.argsort(engine.astype(np.int16) if small else engine, kind="stable")
        table, more = table[order], {name: column[order] for name, column in more.items()}
    found = {name: table[name].copy() for name in names}
    replica = found.pop("replica")
    return found | more | {"replica": replica}


def _table(rows: bytes | bytearray, names: dict[str, type]) -> NDArray[Any]:
    """Not a copy: the rows cannot grow as long as it is used."""
    kinds = np.dtype([(name, np.float64 if kind is float else np.int64) for name, kind in names.items()])
    return np.frombuffer(rows, kinds) if rows else np.empty(0, kinds)
