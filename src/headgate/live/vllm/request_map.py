"""Who is who: vLLM's requests as the ledger's entries, and its answers as what ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request

from headgate.core.build import quick
from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.live.engine.live import Live
from headgate.live.engine.step_in_flight import Chunk
from headgate.live.vllm.lookup import Lookup
from headgate.live.vllm.seams import PROMOTE

LONGEST_WAY = 60.0  # seconds a request may have been on its way from the front end
Promises = Callable[[Request], tuple[str, Slo, int | None]]  # kind, promises, predicted output


class RequestMap:
    """Tells the live driver what happens in vLLM. What vLLM does is the truth, planned or not."""

    def __init__(self, scheduler: Any, live: Live, promises: Promises) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests: dict[int, Request] = {}  # by our number
        self.holding: dict[int, Request] = {}  # they wait, and hold KV: a session's next input, a remote load
        self.wall: Callable[[], float] = time.time  # the clock that stamps arrivals in the front end
        self._scheduler = scheduler
        self._live = live
        self._promises = promises
        self._unready: dict[str, Request] = {}  # blocked, or between two inputs of a session
        self._aside: dict[str, Request] = {}  # no room for its adapter
        self.turned_away: list[Request] = []  # their clients are told with the next tokens
        self.speculates = bool(scheduler.num_spec_tokens)
        self._next = 0
        self._by_priority = scheduler.policy.value == "priority"
        self._in_order = True
        self._look_again = True  # prompts ran, or a request came or left, since the head was looked up
        self._lookup = Lookup(scheduler)
        self._pool = scheduler.kv_cache_manager.block_pool
        queue = getattr(self._pool, "free_block_queue", None)
        self._free: Any = queue if hasattr(queue, "num_free_blocks") else None
        self._blocks: int = scheduler._headgate_blocks
        self._block: int = scheduler.block_size
        self._groups: int = scheduler._headgate_groups
        self._promote = next(getattr(scheduler, name) for name in PROMOTE if hasattr(scheduler, name))

    # -- comings and goings -------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request, or the next input of a session: the policy hears of it as soon as it can run."""
        if self._scheduler._is_blocked_waiting_status(request.status):
            self._unready[request.request_id] = request
        else:
            self._join(request)

    def _join(self, request: Request) -> None:
        """It can run: a new entry, or the one that was away."""
        live, entry = self._live, self.entries.get(request.request_id)
        known = entry
        if entry is None:
            entry = self._entry(request)
        entry.todo, entry.hit, entry.loose = max(1, request.num_tokens - request.num_computed_tokens), 0, 0
        self._look_again = True
        self._lookup.arrives(entry, request)
        if known is None:
            live.arrive(entry)
        else:
            live.back(entry)
        if request.num_computed_tokens:
            self.holding[entry.id] = request
        self._in_order = False

    def _entry(self, request: Request) -> Entry:
        live = self._live
        kind, slo, guess = self._promises(request)
        # A wall clock may jump between the front end and here: neither from the future nor from long ago.
        arrival = live.now - min(max(0.0, self.wall() - request.arrival_time), LONGEST_WAY)
        number, self._next = self._next, self._next + 1
        limit, priority = request.max_tokens, request.priority
        if guess is not None:
            guess = min(guess, limit)
        entry = Entry(live.ledger, number, arrival, request.num_tokens, limit, kind, guess, priority, slo)
        self.entries[request.request_id] = entry
        self.requests[number] = request
        return entry

    def tidy(self) -> None:
        """Before a plan: who could not run may be able to now, and the queue is in vLLM's order."""
        if self._unready:
            blocked = self._scheduler._is_blocked_waiting_status
            for name, request in list(self._unready.items()):
                if not blocked(request.status) or self._promote(request):
                    del self._unready[name]
                    self._join(request)
        if self._aside:
            running = self._scheduler.running
            adapters = {each.lora_request.lora_int_id for each in running if each.lora_request}
            for name, request in list(self._aside.items()):
                if (
                    len(adapters | {request.lora_request.lora_int_id})
                    <= self._scheduler.lora_config.max_loras
                ):
                    del self._aside[name]
                    self._join(request)
        if self._by_priority and not self._in_order:
            self._sort()
        self._look_at_head()

    def _look_at_head(self) -> None:
        """The next in turn sees what is in the cache now."""
        live, ledger = self._live, self._live.ledger
        if not live.lease.ended:
            if not self._look_again and self._lookup.found_nothing:
                return  # decodes alone bring none of a prompt that had nothing there
            if len(ledger.decoding) + len(ledger.prefilling) >= ledger.limits.running:
                return  # it has no seat: what there is of it changes nothing
        self._look_again = False
        for entry in ledger.waiting.values():
            if self._lookup.look_at_head(entry, self.requests[entry.id]):
                live.lease.ended = True
            break

    def look(self, entry: Entry) -> None:
        """It was evicted, and waits: how much of it is still in the prefix cache?"""
        self._lookup.look(entry, self.requests[entry.id])

    def set_aside(self, requests: list[Request]) -> None:
        """There is no room for their adapters: the policy is not to wait for them."""
        for request in requests:
            self._away(request)
            self._aside[request.request_id] = request

    def _away(self, request: Request) -> None:
        entry = self.entries[request.request_id]
        self.holding.pop(entry.id, None)
        self._lookup.gone(entry)
        self._live.away(entry)

    def stopped(self, request: Request, tokens: int) -> None:
        """A session has answered one input and waits for the next."""
        self.left(request, End.STOPPED, tokens)
        self._unready[request.request_id] = request

    def left(self, request: Request, how: End, tokens: int) -> None:
        """It is gone, with that many output tokens."""
        name = request.request_id
        entry = self.entries.get(name)
        if self._unready or self._aside:
            if entry is not None and (name in self._unready or name in self._aside):
                self._live.back(entry)  # it left while it was away
            self._unready.pop(name, None)
            self._aside.pop(name, None)
        if entry is None:
            return
        del self.entries[name], self.requests[entry.id]
        self.holding.pop(entry.id, None)
        self._look_again = True
        self._lookup.gone(entry)
        self._live.ledger.recount(entry, tokens)
        self._live.left(entry, how)
        for flight in self._live.flights:
            scheduled = flight.scheduled
            if name in scheduled:
                self._live.wasted(scheduled[name])

    def evicted(self, request: Request) -> None:
        entry = self.entries.get(request.request_id)
        if entry is not None:
            self._look_again = True
            self._lookup.evicted(entry)
            self._live.evicted(entry)
            self._in_order = False

    def _sort(self) -> None:
        """`--scheduling-policy priority`: the queue policies see is in vLLM's order of urgency."""
        waiting, requests = self._live.ledger.waiting, self.requests
        for id in sorted(waiting, key=lambda id: (requests[id].priority, requests[id].arrival_time, id)):
            waiting.move_to_end(id)
        self._in_order = True

    # -- steps --------------------------------------------------------------------------------------

    def free_blocks(self) -> int:
        """Of KV. Where vLLM's counter is where it has always been, its function need not be called."""
        free: int = self._pool.get_num_free_blocks() if self._free is None else self._free.num_free_blocks
        return free

    def ran(self, output: Any, seen: list[Request]) -> None:
        """Read from vLLM's answer what the step holds; `seen` are the waiting ones it could look at."""
        live, ledger, scheduled = self._live, self._live.ledger, output.num_scheduled_tokens
        new, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        if new or resumed:
            names = [data.req_id for data in new]
            if resumed:  # a set; the step itself has them in the order in which they entered
                entered = {*names, *resumed}
                names = [name for name in scheduled if name in entered]
            self._seat(names, scheduled)
        for request in seen:
            if self._scheduler._is_blocked_waiting_status(request.status):  # its KV is being loaded
                self._away(request)
                self._unready[request.request_id] = request
        chunks = tuple(self._chunks(scheduled)) if ledger.prefilling else ()
        if chunks:
            self._look_again = True
        decodes = len(scheduled) - len(chunks)
        # Have others run than the ledger thinks?
        strays = decodes > 0 and (len(ledger.held) > 0 or decodes != ledger.rolling)
        flight = live.ran(chunks, decodes, self._decodes(scheduled) if strays else None)
        if seen:
            self._look_at_refused(seen, decodes, sum([chunk.tokens for chunk in chunks]))
        if flight is not None:
            flight.output, flight.scheduled = output, scheduled

    def _look_at_refused(self, seen: list[Request], decodes: int, prompts: int) -> None:
        """The first prompt that vLLM tried and did not admit had no room: the policy may have counted on more
        in the cache than there is.
        """
        plan, ledger = self._live.plan, self._live.ledger
        if plan is None or len(ledger.decoding) + len(ledger.prefilling) >= ledger.limits.running:
            return
        left = min(plan.budget, ledger.limits.batch_tokens) - decodes * ledger.limits.decode_width
        if prompts >= min(left, plan.chunk):
            return
        for request in seen:
            entry = self.entries.get(request.request_id)
            if entry is not None and entry.id in ledger.waiting:
                self._lookup.look(entry, request)
                return

    def _seat(self, names: list[str], scheduled: dict[str, int]) -> None:
        """They have got a seat, or theirs again."""
        for name in names:
            if name in self._unready:  # it became ready, and vLLM saw it, while the step was composed
                self._join(self._unready.pop(name))
            entry, request = self.entries[name], self._scheduler.requests[name]
            if entry.evictions:
                self._live.ledger.recount(entry, request.num_output_tokens)
            self.holding.pop(entry.id, None)
            found = request.num_computed_tokens - scheduled[name]
            entry.todo, entry.hit, entry.loose = max(1, request.num_tokens - found), 0, 0
            self._lookup.admitted(entry)
            self._live.admitted(entry, found)

    def done(self, output: Any) -> bool:
        """The tokens of that step are known. False: it was empty."""
        for flight in self._live.flights:
            if flight.output is output:
                held = self._blocks - self.free_blocks()
                self._live.done(flight, held * self._block // self._groups)
                return True
        return False

    def recount(self, scheduled: dict[str, int]) -> None:
        """With speculation a decode may have got several tokens in the step."""
        ledger = self._live.ledger
        for name in scheduled:
            entry = self.entries.get(name)
            if entry is None or entry.id in ledger.prefilling:
                continue
            request = self._scheduler.requests[name]
            ledger.recount(entry, request.num_output_tokens)
            if entry.id in ledger.waiting:  # evicted while the step was in flight
                entry.todo = request.num_tokens - entry.hit

    def _chunks(self, scheduled: dict[str, int]) -> list[Chunk]:
        chunks = []
        for entry in self._live.ledger.prefilling.values():
            request = self.requests[entry.id]
            tokens = scheduled.get(request.request_id)
            if tokens:
                computed = request.num_computed_tokens
                left = request.num_tokens - computed if request.is_prefill_chunk else 0
                chunks.append(quick(Chunk, (entry, tokens, computed - tokens, left)))
        return chunks

    def _decodes(self, scheduled: dict[str, int]) -> list[int]:
        decoding = self._live.ledger.decoding
        return [entry.id for entry in map(self.entries.__getitem__, scheduled) if entry.id in decoding]
