"""Listens to a scheduler from outside: one row per step, and the time of every token."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from studies.h200.arms import gauges

MOST_REQUESTS = 100_000
GAUGES_EVERY = 32  # steps


class Row(NamedTuple):
    """One step: when and how long schedule() ran, what it chose, and when its tokens were there."""

    began: float
    scheduling: float
    decodes: int
    context: int  # KV tokens that the decodes read
    prefill: int  # prompt tokens
    behind: int  # KV tokens already there for those prompts
    running: int
    kv: float  # share of the blocks in use
    preempted: int
    ended: float


class Tokens(NamedTuple):
    """Who got a token at one moment, and how long ago each had the one before."""

    time: float
    ids: npt.NDArray[np.int32]
    gaps: npt.NDArray[np.float32]  # nan: its first


class Record:
    """Wraps schedule() and update_from_output() of one scheduler; the same for every arm."""

    def __init__(self, scheduler: Any) -> None:
        self.rows: list[Row] = []
        self.tokens: list[Tokens] = []
        self.gauges: list[tuple[float, dict[str, float]]] = []
        self.arrival = np.full(MOST_REQUESTS, np.nan)
        self.first = np.full(MOST_REQUESTS, np.nan)
        self.prompt = np.zeros(MOST_REQUESTS)
        self._last = np.full(MOST_REQUESTS, np.nan)
        self._number: dict[str, int] = {}
        self._open: deque[Row] = deque()  # scheduled, tokens not there yet; first in, first out
        self._scheduler = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated

    def queued(self, number: int, name: str, prompt: int) -> None:
        """A request of the caller's number has joined under the engine's own name."""
        self._number[name] = number
        self.prompt[number] = prompt
        self.arrival[number] = perf_counter()

    def restart_clock(self, first: int) -> None:
        """Requests from this number on count as having arrived now."""
        self.arrival[first:][~np.isnan(self.arrival[first:])] = perf_counter()

    def forget(self) -> None:
        """Drop rows and tokens; requests that run stay known."""
        self.rows, self.tokens, self.gauges = [], [], []

    def _scheduled(self, *args: Any, **words: Any) -> Any:
        began = perf_counter()
        output = self._schedule(*args, **words)
        scheduling = perf_counter() - began
        decodes, context, prefill, behind = shape(output)
        running, kv = len(self._scheduler.running), self._scheduler.kv_cache_manager.usage
        preempted = len(getattr(output, "preempted_req_ids", None) or ())
        self._open.append(
            Row(began, scheduling, decodes, context, prefill, behind, running, kv, preempted, 0.0)
        )
        return output

    def _updated(self, *args: Any, **words: Any) -> Any:
        result = self._update(*args, **words)
        now = perf_counter()
        self.rows.append(self._open.popleft()._replace(ended=now))
        if len(self.rows) % GAUGES_EVERY == 1:
            self.gauges.append((now, dict(gauges(self._scheduler))))
        served = [
            each.request_id for outputs in result.values() for each in outputs.outputs if each.new_token_ids
        ]
        if served:
            ids = np.fromiter(map(self._number.__getitem__, served), np.int32, len(served))
            self.tokens.append(Tokens(now, ids, (now - self._last[ids]).astype(np.float32)))
            self._last[ids] = now
            new = ids[np.isnan(self.first[ids])]
            self.first[new] = now
        return result


def shape(output: Any) -> tuple[int, int, int, int]:
    """Decodes, their context, prompt tokens and what lies behind those, of one SchedulerOutput."""
    tokens = output.num_scheduled_tokens
    decodes = context = prefill = behind = 0
    for new in output.scheduled_new_reqs:
        prefill += tokens[new.req_id]
        behind += new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for name, computed, put_out in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        scheduled = tokens[name]
        if put_out and scheduled == 1 and name not in resumed:
            decodes += 1
            context += computed
        else:
            prefill += scheduled
            behind += computed
    return decodes, context, prefill, behind
