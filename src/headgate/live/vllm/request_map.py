"""vLLM's requests as the ledger's entries, its answers as what ran, and a look into its prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.v1.request import Request

from headgate.core.build import quick
from headgate.core.ledger import Entry
from headgate.core.policy import End
from headgate.kv.siblings import Siblings
from headgate.live.engine.events import PromptPiece, StepInFlight
from headgate.live.engine.live import Live
from headgate.live.engine.plug_in import Promises
from headgate.live.vllm.seams import PROMOTE

LONGEST_WAY = 60.0  # seconds a request may have been on its way from the front end
GROUP = [0]  # the only one
NO_BLOCKS: list[Any] = []
HASH: Callable[[Any], object] = attrgetter("block_hash")  # of a block; None when it was evicted
HOLDERS: Callable[[Any], int] = attrgetter("ref_cnt")


class RequestMap:
    """Tells the live driver what happens in vLLM. What vLLM does is the truth, planned or not."""

    def __init__(self, scheduler: Any, live: Live, promises: Promises) -> None:
        self.entries: dict[str, Entry] = {}
        self.requests: dict[int, Request] = {}  # by our number
        self.holding: dict[int, Request] = {}  # they wait, and hold KV: a session's next input, a remote load
        self.wall: Callable[[], float] = time.time  # the clock that stamps arrivals in the front end
        self._scheduler, self._live, self._promises = scheduler, live, promises
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

    def arrive(self, request: Request) -> None:
        if self._scheduler._is_blocked_waiting_status(request.status):
            self._unready[request.request_id] = request
        else:
            self._join(request)

    def _join(self, request: Request) -> None:
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
        kind, slo, guess, tenant = self._promises(request)
        # A wall clock may jump between the front end and here: neither from the future nor from long ago.
        arrival = live.now - min(max(0.0, self.wall() - request.arrival_time), LONGEST_WAY)
        number, self._next = self._next, self._next + 1
        limit, priority = request.max_tokens, request.priority
        if guess is not None:
            guess = min(guess, limit)
        if priority and not self._by_priority and slo.weight is None:
            # vLLM takes a priority of any client: it is a weight only where vLLM orders requests by it.
            slo = slo._replace(weight=1.0)
        entry = Entry(
            live.ledger, number, arrival, request.num_tokens, limit, kind, guess, priority, slo, tenant
        )
        self.entries[request.request_id] = entry
        self.requests[number] = request
        return entry

    def tidy(self) -> None:
        if self._unready:
            blocked = self._scheduler._is_blocked_waiting_status
            for name, request in list(self._unready.items()):
                if not blocked(request.status) or self._promote(request):
                    del self._unready[name]
                    self._join(request)
        if self._aside:
            running = self._scheduler.running
            adapters = {runs.lora_request.lora_int_id for runs in running if runs.lora_request}
            most = self._scheduler.lora_config.max_loras
            for name, request in list(self._aside.items()):
                if len(adapters | {request.lora_request.lora_int_id}) <= most:
                    del self._aside[name]
                    self._join(request)
        if self._by_priority and not self._in_order:
            # `--scheduling-policy priority`: the queue policies see is in vLLM's order of urgency
            waiting, requests = self._live.ledger.waiting, self.requests
            for id in sorted(waiting, key=lambda id: (requests[id].priority, requests[id].arrival_time, id)):
                waiting.move_to_end(id)
            self._in_order = True
        self._look_at_head()

    def _look_at_head(self) -> None:
        live, ledger = self._live, self._live.ledger
        if not live.lease.ended:
            if not self._look_again and self._lookup.found_nothing:
                return  # decodes alone bring none of a prompt that had nothing there
            if len(ledger.decoding) + len(ledger.prefilling) >= ledger.limits.running:
                return  # it has no slot: what there is of it changes nothing
        self._look_again = False
        for entry in ledger.waiting.values():
            if self._lookup.look_at_head(entry, self.requests[entry.id]):
                live.lease.ended = True
            break

    def look(self, entry: Entry) -> None:
        self._lookup.look(entry, self.requests[entry.id])

    def set_aside(self, requests: list[Request]) -> None:
        for request in requests:
            self._away(request)
            self._aside[request.request_id] = request

    def _away(self, request: Request) -> None:
        entry = self.entries[request.request_id]
        self.holding.pop(entry.id, None)
        self._lookup.siblings.drop(entry.id)
        self._live.away(entry)

    def stopped(self, request: Request, tokens: int) -> None:
        self.left(request, End.STOPPED, tokens)
        self._unready[request.request_id] = request

    def left(self, request: Request, how: End, tokens: int) -> None:
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
        self._lookup.siblings.drop(entry.id)
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
            # what it has in common with others will be there when it has a slot again
            self._lookup.siblings.withdraw(entry.id)
            self._live.evicted(entry)
            self._in_order = False

    def free_blocks(self) -> int:
        free: int = self._pool.get_num_free_blocks() if self._free is None else self._free.num_free_blocks
        return free

    def ran(self, output: Any, seen: list[Request]) -> None:
        live, ledger, scheduled = self._live, self._live.ledger, output.num_scheduled_tokens
        new, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        if new or resumed:
            names = [data.req_id for data in new]
            if resumed:  # a set; the step itself has them in the order in which they entered
                entered = {*names, *resumed}
                names = [name for name in scheduled if name in entered]
            self._admit(names, scheduled)
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
        prompts = sum([chunk.tokens for chunk in chunks])
        queries = sum(scheduled.values()) - prompts if self.speculates and decodes else 0
        ids = None
        if strays:
            ran = [self.entries[name].id for name in scheduled]
            ids = [id for id in ran if id in ledger.decoding]
        flight = live.ran(chunks, decodes, ids, queries)
        if seen:
            self._look_at_refused(seen, queries or decodes, prompts)
        if flight is not None:
            flight.output, flight.scheduled = output, scheduled

    def _look_at_refused(self, seen: list[Request], decodes: int, prompts: int) -> None:
        """The first prompt that vLLM tried and did not admit had no room: the policy may have counted on more
        in the cache than there is. `decodes` and `prompts` are tokens of the step.
        """
        plan, ledger = self._live.plan, self._live.ledger
        if plan is None or len(ledger.decoding) + len(ledger.prefilling) >= ledger.limits.running:
            return
        left = min(plan.budget, ledger.limits.batch_tokens) - decodes
        if prompts >= min(left, plan.chunk):
            return
        for request in seen:
            entry = self.entries.get(request.request_id)
            if entry is not None and entry.id in ledger.waiting:
                self._lookup.look(entry, request)
                return

    def _admit(self, names: list[str], scheduled: dict[str, int]) -> None:
        for name in names:
            if name in self._unready:  # it became ready, and vLLM saw it, while the step was composed
                self._join(self._unready.pop(name))
            entry, request = self.entries[name], self._scheduler.requests[name]
            if entry.evictions:
                self._live.ledger.recount(entry, request.num_output_tokens)
            self.holding.pop(entry.id, None)
            cached = request.num_computed_tokens - scheduled[name]
            entry.todo, entry.hit, entry.loose = max(1, request.num_tokens - cached), 0, 0
            self._lookup.siblings.admit(entry.id)
            self._live.admitted(entry, cached)

    def done(self, output: Any) -> StepInFlight | None:
        for flight in self._live.flights:
            if flight.output is output:
                held = self._blocks - self.free_blocks()
                self._live.done(flight, held * self._block // self._groups)
                return flight
        return None

    def delivered(self, flight: StepInFlight, runner_output: Any) -> None:
        """What each decode of a step got, before vLLM ends requests: drafts beyond a stop count, too."""
        sampled = getattr(runner_output, "sampled_token_ids", None)
        if not sampled or not flight.decodes:
            return
        rows, drafts = runner_output.req_id_to_index, flight.output.scheduled_spec_decode_tokens
        prompts = {chunk.entry.id for chunk in flight.chunks}
        deliveries = []
        for name in flight.scheduled:
            entry = self.entries.get(name)
            if entry is not None and entry.id not in prompts and name in rows:
                deliveries.append((entry.kind, len(sampled[rows[name]]), len(drafts.get(name, ()))))
        self._live.delivered(deliveries)

    def recount(self, scheduled: dict[str, int]) -> None:
        """With speculation a decode may have got several tokens in the step."""
        ledger = self._live.ledger
        for name in scheduled:
            entry = self.entries.get(name)
            if entry is None or entry.id in ledger.prefilling:
                continue
            request = self._scheduler.requests[name]
            self._live.recount(entry, request.num_output_tokens)
            if entry.id in ledger.waiting:  # evicted while the step was in flight
                entry.todo = request.num_tokens - entry.hit

    def _chunks(self, scheduled: dict[str, int]) -> list[PromptPiece]:
        chunks = []
        for entry in self._live.ledger.prefilling.values():
            request = self.requests[entry.id]
            tokens = scheduled.get(request.request_id)
            if tokens:
                computed = request.num_computed_tokens
                left = request.num_tokens - computed if request.is_prefill_chunk else 0
                chunks.append(quick(PromptPiece, (entry, tokens, computed - tokens, left)))
        return chunks


class HeadHit(NamedTuple):
    request: Request
    tokens: int  # of the request
    hit: int
    blocks: list[Any]
    hashes: list[object]  # theirs
    miss: Any  # hash of the first block that is not there; None: all are


class Lookup:
    """The same question vLLM asks when it admits a request, asked earlier, so that policies can count on it.

    vLLM enters a block into the cache when the step that computes it is composed, so the requests of a group
    find in the same step what the first of them brings. Requests that wait count on that, too (`Siblings`).
    Only where one group of layers has all the KV and it is computed here: with several groups, or KV from
    elsewhere, a waiting request has all its prompt to do until vLLM admits it.
    """

    def __init__(self, scheduler: Any) -> None:
        one_group = len(scheduler.kv_cache_config.kv_cache_groups) == 1
        caches = bool(getattr(scheduler.cache_config, "enable_prefix_caching", False))
        elsewhere = getattr(scheduler, "connector", None) is not None
        self._coordinator: Any = None
        if one_group and caches and not elsewhere:
            self._coordinator = getattr(scheduler.kv_cache_manager, "coordinator", None)
        self._block = scheduler.block_size
        self._pool = _chained(self._coordinator, self._block)
        self.siblings = Siblings()
        self._head: HeadHit | None = None  # of the next in turn

    @property
    def found_nothing(self) -> bool:
        head = self._head
        return head is not None and not head.blocks

    def look_at_head(self, entry: Entry, request: Request) -> bool:
        """While its first missing block stays away, only the blocks that were found can have changed."""
        coordinator, head = self._coordinator, self._head
        if coordinator is None or request.num_computed_tokens:
            return False
        if (
            head is None
            or head.request is not request
            or head.tokens != request.num_tokens
            or (head.miss is not None and self._pool.get_cached_block(head.miss, GROUP))
        ):
            return self.look(entry, request, remember=True)
        loose = 0
        if head.blocks:
            if [*map(HASH, head.blocks)] != head.hashes:
                return self.look(entry, request, remember=True)
            loose = [*map(HOLDERS, head.blocks)].count(0) * self._block
        return entry.expect(head.hit, loose, self.siblings.held(entry.id) * self._block)

    def look(self, entry: Entry, request: Request, remember: bool = False) -> bool:
        """What is there now, or will be after those that run; True: another number than before."""
        if remember:
            self._head = None
        if self._coordinator is None or request.num_computed_tokens or _never_reads(request):
            return False
        hit, loose = self._look(request, remember and self._pool is not None)
        return entry.expect(hit, loose, self.siblings.held(entry.id) * self._block)

    def arrives(self, entry: Entry, request: Request) -> None:
        """As `look`, and it counts on what it shares with those before it, even if they wait, too."""
        if self._coordinator is None or request.num_computed_tokens:
            return
        shared = 0
        if self._pool is not None:
            names = request.block_hashes[: request.num_tokens // self._block]  # the list itself may be cut
            shared = self.siblings.add(entry.id, names.__getitem__, len(names)) * self._block
        if not _never_reads(request):
            hit, loose = self._look(request, remember=False)
            entry.expect(hit, loose, shared, arrives=True)

    def _look(self, request: Request, remember: bool) -> tuple[int, int]:
        hit = loose = 0
        first = None
        if self._pool is not None and request.num_tokens > self._block:
            first = request.block_hashes[0]
        if self._pool is None or (first is not None and self._pool.get_cached_block(first, GROUP)):
            hashes, most = request.block_hashes, request.num_tokens - 1
            groups, hit, *_ = self._coordinator.find_longest_cache_hit(hashes, most)
            blocks = groups[0]
            loose = [*map(HOLDERS, blocks)].count(0) * self._block
            if remember:
                self._head = self._found(request, blocks, hit)
        elif remember:
            self._head = quick(HeadHit, (request, request.num_tokens, 0, NO_BLOCKS, NO_BLOCKS, first))
        return hit, loose

    def _found(self, request: Request, blocks: list[Any], hit: int) -> HeadHit | None:
        """What to remember; None where more than the first missing block decides."""
        place, miss = len(blocks), None
        if place < (request.num_tokens - 1) // self._block:
            miss = request.block_hashes[place]
        if hit != place * self._block or (miss is not None and self._pool.get_cached_block(miss, GROUP)):
            return None
        return HeadHit(request, request.num_tokens, hit, blocks, [*map(HASH, blocks)], miss)


def _never_reads(request: Request) -> bool:
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def _chained(coordinator: Any, block: int) -> Any:
    """The pool of blocks, where a block counts only if all before it are there, and each has one hash.

    Not so with a sliding window, or with hashes of parts of blocks.
    """
    managers: Any = getattr(coordinator, "single_type_managers", ())
    pool = getattr(coordinator, "block_pool", None)
    if [type(manager).__name__ for manager in managers] != ["FullAttentionManager"]:
        return None
    if getattr(pool, "num_hash_lookahead_tokens", 0) > 1:  # a whole block may have no hash yet
        return None
    return pool if getattr(pool, "hash_block_size", None) == managers[0].block_size == block else None
