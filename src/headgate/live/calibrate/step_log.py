"""Listens to a scheduler from outside: one row per step, with its shape and the time it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from headgate.cost.fit.steps import StepTable, shape_class

SETTLE = 2  # steps after a disturbance that do not count: one may be under way, one was composed late


class Composition(NamedTuple):
    """What a step holds, read from vLLM's own answer."""

    decodes: int = 0
    context: int = 0  # KV tokens the decodes read, those they write included
    prefill: int = 0
    behind: int = 0
    prompts: int = 0
    attention: float = 0.0  # sum over pieces of prompts of tokens * (start + tokens / 2)


class StepRow(NamedTuple):
    """One step."""

    composed: float  # when schedule() was entered
    start: float  # when it began to count: the end of the step before it, or `composed` where none was
    end: float  # when its tokens were there
    ahead: bool  # it was composed before the step before it had ended
    before: int  # shape class of that step; 0: the engine stood idle
    kept: bool
    label: str
    held: Composition


class _Open(NamedTuple):
    composed: float
    follows: bool  # a step before it was still to end, or had just ended with others waiting
    kept: bool
    label: str
    held: Composition


class StepLog:
    """Wraps schedule() and update_from_output() of one scheduler.

    A step takes from the end of the step before it to its own end; under asynchronous scheduling it is
    composed while that one runs, without it the composing is part of its time. After a stand-still it takes
    from its own schedule() on. Its end is when update_from_output() is entered: what the engine does
    with the tokens then overlaps with the next step, or is part of it.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = perf_counter) -> None:
        self.rows: list[StepRow] = []
        self.empty = 0  # steps with nothing in them, in a row
        self.label: Callable[[], str] = lambda: "all"
        self._clock = clock
        self._open: deque[_Open | None] = deque()  # composed, tokens not there yet; first in, first out
        self._last_end: float | None = None  # None: the engine stood idle, or was held up
        self._last_class = 0
        self._ignore = 0
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated

    def close(self) -> None:
        """The scheduler is as it was; what wrapped it later must have gone before."""
        self._scheduler.schedule, self._scheduler.update_from_output = self._schedule, self._update

    def disturbed(self) -> None:
        """The host does something that is no part of serving: the steps around it do not count."""
        self._ignore = SETTLE
        self._last_end = None
        self._open = deque(each and each._replace(kept=False, follows=False) for each in self._open)

    def table(self) -> StepTable:
        rows = [row for row in self.rows if row.kept]
        labels = tuple(dict.fromkeys(row.label for row in rows)) or ("all",)
        place = {label: number for number, label in enumerate(labels)}
        columns: dict[str, Any] = {
            name: np.array([getattr(row.held, name) for row in rows], dtype=np.float64)
            for name in Composition._fields
        }
        columns |= {
            "seconds": np.array([row.end - row.start for row in rows]),
            "before": np.array([row.before for row in rows], dtype=np.int8),
            "busy": np.array([row.ahead for row in rows], dtype=bool),
            "part": np.array([place[row.label] for row in rows], dtype=np.int32),
        }
        return StepTable.from_columns(columns, labels)

    def times(self) -> dict[str, Any]:
        """When each step that counts was composed and ended, beside its shape: for a closer look."""
        rows = [row for row in self.rows if row.kept]
        times = {name: [getattr(row, name) for row in rows] for name in ("composed", "start", "end")}
        times |= {name: [getattr(row.held, name) for row in rows] for name in ("decodes", "prefill")}
        return {name: np.array(column) for name, column in times.items()}

    def _scheduled(self, *args: Any, **words: Any) -> Any:
        composed = self._clock()
        output = self._schedule(*args, **words)
        if not output.num_scheduled_tokens:
            self.empty += 1
            if not any(self._open):
                self._last_end = None
            self._open.append(None)
            return output
        self.empty = 0
        follows = any(self._open) or self._last_end is not None
        self._open.append(_Open(composed, follows, not self._ignore, self.label(), composition(output)))
        self._ignore = max(0, self._ignore - 1)
        return output

    def _updated(self, *args: Any, **words: Any) -> Any:
        end = self._clock()
        row = self._open.popleft()
        if row is not None:
            last = self._last_end if row.follows else None
            start = row.composed if last is None else last
            ahead = last is not None and row.composed < last
            before = 0 if last is None else self._last_class
            self.rows.append(StepRow(row.composed, start, end, ahead, before, row.kept, row.label, row.held))
            self._last_end = end
            self._last_class = int(shape_class(row.held.decodes, row.held.prefill))
        result = self._update(*args, **words)
        if not any(self._open) and not self._scheduler.has_unfinished_requests():
            self._last_end = None
        return result


def composition(output: Any) -> Composition:
    """Of one SchedulerOutput. A request that has put something out and gets one token decodes."""
    tokens = output.num_scheduled_tokens
    decodes = context = prefill = behind = prompts = 0
    attention = 0.0
    pieces = [(tokens[new.req_id], new.num_computed_tokens) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for name, computed, put_out in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        if put_out and tokens[name] == 1 and name not in resumed:
            decodes += 1
            context += computed + 1
        else:
            pieces.append((tokens[name], computed))
    for piece, start in pieces:
        prompts += 1
        prefill += piece
        behind += start
        attention += piece * (start + piece / 2)
    return Composition(decodes, context, prefill, behind, prompts, attention)
