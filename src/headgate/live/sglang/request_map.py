"""SGLang's requests as the ledger's entries, its batches as what ran, and a look into its radix cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.live.engine.events import PromptPiece
from headgate.live.engine.live import Live
from headgate.live.engine.plug_in import Promises

UNSET = sys.maxsize  # and its like below 0: what SGLang gives a request without a priority
ENDS = {"length": End.LIMIT, "abort": End.ABORTED}
NO_REQUESTS: frozenset[Any] = frozenset()
LONGEST_WAY = 60.0  # seconds a request may have been on its way from the front end


class RequestMap:
    """Tells the live driver what happens in SGLang. What SGLang does is the truth, planned or not.

    By the request object, not by its name: an abort and a new request of the same name may cross.
    """

    def __init__(self, scheduler: Any, live: Live, promises: Promises) -> None:
        self.entries: dict[Any, Entry] = {}
        self.requests: dict[int, Any] = {}  # by our number
        self.look_for_lost = False  # a request may have gone without a word
        self.on_the_way: Callable[[Any], float] = _on_the_way
        self._scheduler, self._live, self._promises = scheduler, live, promises
        self._next = 0
        self._by_priority = bool(scheduler.enable_priority_scheduling)
        self._sign = 1 if scheduler.schedule_low_priority_values_first else -1
        self._in_order = True
        self._radix = scheduler.tree_cache
        # A look counts as a use, by which SGLang chooses what to drop: the trees of all ranks must be alike.
        elsewhere = scheduler.enable_hierarchical_cache or scheduler.enable_lmcache
        self._looks = not self._radix.disable and scheduler.tp_size == 1 and not elsewhere
        self._look_again = True  # prompts ran, or a request came or left, since the head was looked up

    def arrive(self, request: Any) -> None:
        """It is in SGLang's queue: new, or retracted or preempted."""
        live, entry = self._live, self.entries.get(request)
        self._look_again, self._in_order = True, False
        if entry is not None:
            if entry.id not in live.ledger.waiting:
                live.ledger.recount(entry, len(request.output_ids))
                live.evicted(entry)
                live.ledger.waiting.move_to_end(entry.id)  # where SGLang puts it
            return
        kind, slo, guess, tenant = self._promises(request)
        number, self._next = self._next, self._next + 1
        limit = int(request.sampling_params.max_new_tokens)
        given = request.priority if self._by_priority else None
        priority = 0 if given is None or abs(given) >= UNSET else self._sign * given
        if guess is not None:
            guess = min(guess, limit)
        entry = Entry(
            live.ledger,
            number,
            live.now - min(max(0.0, self.on_the_way(request)), LONGEST_WAY),
            len(request.origin_input_ids),
            limit,
            kind,
            guess,
            priority,
            slo,
            tenant,
        )
        entry.todo = max(1, entry.prompt + len(request.output_ids))
        self.entries[request], self.requests[number] = entry, request
        self.look(entry)
        live.arrive(entry)

    def left(self, request: Any, how: End) -> None:
        entry = self.entries.pop(request, None)
        if entry is None:
            return
        live = self._live
        del self.requests[entry.id]
        self._look_again = True
        live.ledger.recount(entry, len(request.output_ids))
        live.left(entry, how)
        for flight in live.flights:
            if flight.scheduled and request in flight.scheduled:
                live.wasted(1)

    def find_lost(self, batches: Iterable[Any]) -> None:
        """A request that is nowhere any more has been aborted: SGLang may drop it while it retracts."""
        scheduler = self._scheduler
        self.look_for_lost = False
        here = {*scheduler.waiting_queue, scheduler.chunked_req}
        for batch in batches:
            if batch is not None:
                here.update(batch.reqs)
        for batch, _ in scheduler.result_queue:
            here.update(batch.reqs)
        for request in [request for request in self.entries if request not in here]:
            self.left(request, End.ABORTED)

    def tidy(self) -> None:
        """Before a plan: the queue in SGLang's order of urgency, and what the next in turn finds cached."""
        live, ledger = self._live, self._live.ledger
        if self._by_priority and not self._in_order:
            for id in sorted(ledger.waiting, key=lambda id: (ledger.waiting[id].priority, id)):
                ledger.waiting.move_to_end(id)
            self._in_order = True
        if not self._looks or not (live.lease.ended or self._look_again):
            return
        self._look_again = False
        for entry in ledger.waiting.values():
            if self.look(entry):
                live.lease.ended = True
            break

    def look(self, entry: Entry) -> bool:
        """The question that SGLang asks when it admits a request, asked before the plan; True: other news.

        Requests that wait do not count on one another: SGLang enters a prompt when its piece has run.
        """
        if not self._looks or entry.id not in self.requests:
            return False
        request = self.requests[entry.id]
        tokens = request.origin_input_ids + request.output_ids
        if request.positional_embed_overrides is not None or not len(tokens):
            return False
        key = RadixKey(
            tokens,
            request.extra_key,
            limit=request._compute_max_prefix_len(len(tokens)),
            cache_salt=getattr(request, "cache_salt", None),
        )
        match = self._radix.match_prefix(MatchPrefixParams(key=key))
        free = self._radix.evictable_size()
        lock = self._radix.lock(match.last_device_node)
        loose = free - self._radix.evictable_size()  # what no request holds yet
        self._radix.unlock(lock)
        return entry.expect(match.device_prefix_len, loose, 0)

    def ran(self, batch: Any, planned: bool) -> None:
        live, ledger = self._live, self._live.ledger
        if batch is None:
            if planned:
                live.ran((), 0, None)
            return
        rows = batch.reqs
        pieces: tuple[PromptPiece, ...] = ()
        if batch.forward_mode.is_extend():
            beside = {*batch.decoding_reqs} if batch.decoding_reqs else NO_REQUESTS
            pieces = tuple(self._pieces(batch, beside))
            rows = [request for request in rows if request in beside]
            self._look_again = True
        strays = rows and (ledger.held or len(rows) != ledger.rolling)
        ids = [self.entries[row].id for row in rows if row in self.entries] if strays else None
        flight = live.ran(pieces, len(rows), ids)
        if flight is not None and self._scheduler.enable_overlap:
            flight.scheduled = {*batch.reqs}

    def _pieces(self, batch: Any, beside: Any) -> Iterable[PromptPiece]:
        live, ledger = self._live, self._live.ledger
        for request, tokens in zip(batch.reqs, batch.extend_lens, strict=True):
            if request in beside:
                continue
            entry, total = self.entries[request], len(request.full_untruncated_fill_ids)
            if entry.id in ledger.waiting:
                ledger.recount(entry, len(request.output_ids))
                entry.todo, entry.hit, entry.loose = total - request.prefix_len, 0, 0
                live.admitted(entry, request.prefix_len)
            yield PromptPiece(entry, int(tokens), request.prefix_len, total - request.extend_end)

    def done(self, batch: Any) -> None:
        """The tokens of the oldest step in flight are known: SGLang has them in the order of its steps."""
        live, scheduler = self._live, self._scheduler
        if live.flights:
            held = scheduler.max_total_num_tokens - scheduler.token_to_kv_pool_allocator.available_size()
            live.done(live.flights[0], held)
        for request in batch.reqs:
            if request.finished() and request in self.entries:
                reason = request.finished_reason.to_json()["type"]
                self.left(request, ENDS.get(reason, End.STOPPED))


def _on_the_way(request: Any) -> float:
    """Seconds since the front end sent it; both processes read the machine's monotonic clock."""
    times = request.time_stats
    sent = times.created_time or times.api_server_dispatch_time or times.scheduler_recv_time
    return time.perf_counter() - sent if sent else 0.0
