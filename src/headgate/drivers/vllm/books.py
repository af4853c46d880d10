"""Who is who: vLLM's requests as the ledger's entries, and its answers as what ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.drivers.flight import Chunk, Flight
from headgate.drivers.live import Live
from headgate.drivers.vllm.seams import PROMOTE

Promises = Callable[[Request], tuple[str, Slo, int | None]]  # kind, promises, predicted output


class Books:
    """Tells the live driver what happens in vLLM. What vLLM does is the truth, planned or not."""

    def __init__(self, scheduler: Any, live: Live, requests: dict[int, Request], promises: Promises) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests = requests  # by our number
        self.wall: Callable[[], float] = time.time  # the clock that stamps arrivals in the front end
        self._scheduler = scheduler
        self._live = live
        self._promises = promises
        self._unready: dict[str, Request] = {}  # blocked, or between two inputs of a session
        self._flights: dict[int, tuple[Flight, dict[str, int]]] = {}
        self._next = 0
        self._by_priority = scheduler.policy.value == "priority"
        self._promote = next(getattr(scheduler, name) for name in PROMOTE if hasattr(scheduler, name))

    # -- comings and goings -------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request, or the next input of a session: the policy hears of it as soon as it can run."""
        if self._scheduler._is_blocked_waiting_status(request.status):
            self._unready[request.request_id] = request
            return
        live = self._live
        kind, slo, guess = self._promises(request)
        waited = max(0.0, self.wall() - request.arrival_time)
        tokens = max(1, request.num_tokens - request.num_computed_tokens)
        entry = Entry(
            live.ledger,
            self._next,
            live.now - waited,
            tokens,
            request.max_tokens,
            kind,
            guess,
            request.priority,
            slo,
        )
        self._next += 1
        self.entries[request.request_id] = entry
        self.requests[entry.id] = request
        live.arrive(entry)
        if self._by_priority:
            self._sort()

    def look_again(self) -> None:
        """Who was blocked (a grammar, remote KV, a session) may be ready now."""
        for name, request in list(self._unready.items()):
            blocked = self._scheduler._is_blocked_waiting_status(request.status)
            if not blocked or self._promote(request):
                del self._unready[name]
                self.arrive(request)

    def stopped(self, request: Request, tokens: int) -> None:
        """A session has answered one input and waits for the next."""
        self.left(request, End.STOPPED, tokens)
        self._unready[request.request_id] = request

    def left(self, request: Request, how: End, tokens: int) -> None:
        """It is gone, with that many output tokens."""
        name = request.request_id
        self._unready.pop(name, None)
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        del self.requests[entry.id]
        self._live.ledger.recount(entry, tokens)
        self._live.left(entry, how)
        for _, scheduled in self._flights.values():
            if name in scheduled:
                self._live.wasted(scheduled[name])

    def evicted(self, request: Request) -> None:
        """VLLM dropped its KV."""
        entry = self.entries.get(request.request_id)
        if entry is not None:
            self._live.evicted(entry)
            if self._by_priority:
                self._sort()

    def _sort(self) -> None:
        """`--scheduling-policy priority`: the queue policies see is in vLLM's order of urgency."""
        waiting, requests = self._live.ledger.waiting, self.requests
        for id in sorted(waiting, key=lambda id: (requests[id].priority, requests[id].arrival_time, id)):
            waiting.move_to_end(id)

    # -- steps --------------------------------------------------------------------------------------

    def ran(self, output: Any) -> None:
        """Read from vLLM's answer what the step holds."""
        live, ledger, scheduled = self._live, self._live.ledger, output.num_scheduled_tokens
        for name in (
            *(data.req_id for data in output.scheduled_new_reqs),
            *output.scheduled_cached_reqs.resumed_req_ids,
        ):
            entry, request = self.entries[name], self._scheduler.requests[name]
            if entry.evictions:
                ledger.recount(entry, request.num_output_tokens)
            live.admitted(entry, request.num_computed_tokens - scheduled[name])
        chunks = tuple(self._chunks(scheduled)) if ledger.prefilling else ()
        flight = live.ran(chunks, len(scheduled) - len(chunks), lambda: self._decodes(scheduled))
        if flight is not None:
            self._flights[id(output)] = flight, scheduled

    def done(self, output: Any, kv: int) -> dict[str, int]:
        """The tokens of that step are known; who was in it."""
        flight, scheduled = self._flights.pop(id(output), (None, {}))
        if flight is not None:
            self._live.done(flight, kv)
        return scheduled

    def recount(self, scheduled: dict[str, int]) -> None:
        """With speculation a decode may have got several tokens in the step."""
        ledger = self._live.ledger
        for name in scheduled:
            entry = self.entries.get(name)
            if entry is not None and entry.id in ledger.decoding:
                ledger.recount(entry, self._scheduler.requests[name].num_output_tokens)

    def _chunks(self, scheduled: dict[str, int]) -> list[Chunk]:
        chunks = []
        for entry in self._live.ledger.prefilling.values():
            request = self.requests[entry.id]
            tokens = scheduled.get(request.request_id)
            if tokens:
                computed = request.num_computed_tokens
                left = request.num_tokens - computed if request.is_prefill_chunk else 0
                chunks.append(Chunk(entry, tokens, computed - tokens, left))
        return chunks

    def _decodes(self, scheduled: dict[str, int]) -> list[int]:
        decoding = self._live.ledger.decoding
        return [entry.id for entry in map(self.entries.__getitem__, scheduled) if entry.id in decoding]
