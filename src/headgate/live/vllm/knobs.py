"""A plan becomes the few things vLLM's own `schedule` reads, for one step; then they go back."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from vllm.v1.request import Request, RequestStatus

from headgate.core.ledger import Entry
from headgate.core.plan import ALL, NONE, Decodes, Plan
from headgate.live.engine.live import Live
from headgate.live.vllm.queues import NOTHING, GatedQueue, QueueGate
from headgate.live.vllm.request_map import RequestMap

WAITING, PREEMPTED = RequestStatus.WAITING, RequestStatus.PREEMPTED
DECODES_ONLY = Plan(ALL)
NO_REQUESTS: Final[list[Request]] = []
SLOTS = ("max_num_active_reqs", "max_num_running_reqs")  # the first where there is one
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")  # which of them exist depends on the release


class Knobs:
    """Which sit the step out: `next_decode_eligible_step`. Which may enter, in which order: the gates of the
    waiting queues. How many tokens: the step's budget and the longest piece of a prompt.
    """

    def __init__(self, scheduler: Any, live: Live, books: RequestMap, renew: Callable[[], Any]) -> None:
        self._scheduler, self._live, self._ledger, self._books = scheduler, live, live.ledger, books
        self._renew = renew
        self._groups: int = scheduler._headgate_groups
        self._block: int = scheduler.block_size
        self._slots = SLOTS[0] if hasattr(scheduler, SLOTS[0]) else SLOTS[1]
        self._requests = books.requests
        self._gate = QueueGate()
        names = [name for name in QUEUES if hasattr(scheduler, name)]
        for name in names:
            setattr(scheduler, name, GatedQueue(getattr(scheduler, name), self._gate))
        self._queues: list[GatedQueue] = [getattr(scheduler, name) for name in names]
        self._limited = False  # tokens of this step are limited
        self._spent: Plan | None = None  # all its prompts have run; one that comes back ends its lease
        self._quiet: Plan | None = None  # every decode, no prompt, no limit: all knobs but the gate stay
        self._idle = -1  # sessions that waited for input when slots were last counted
        self._order: list[Request] | None = None  # of those running, where we had to change it
        self._budget: int = scheduler.max_num_scheduled_tokens
        self._longest: int = scheduler.scheduler_config.long_prefill_token_threshold
        # Its worker has drafts of the step before only: one that sat a step out comes back with none.
        self.forgets = bool(
            scheduler.num_spec_tokens
            and scheduler.scheduler_config.async_scheduling
            and not getattr(scheduler, "use_v2_model_runner", False)
        )
        width = live.ledger.limits.decode_width
        self._least = _least_piece(scheduler, width)
        # Blocks that a decode may need for a step: vLLM takes room for its drafts, and for those after them.
        ahead: int = getattr(scheduler, "num_lookahead_tokens", 0)
        self._blocks_each = -(-(width + ahead) // self._block) * self._groups

    def prepare(self, throttled: bool) -> list[Request]:
        """The waiting requests that vLLM can see. `throttled`: a data-parallel engine wants decodes only."""
        scheduler, live, ledger = self._scheduler, self._live, self._ledger
        self._books.tidy()
        idle: int = scheduler.num_waiting_for_streaming_input  # sessions
        if live.lease.ended or live.plan is None or idle != self._idle:
            self._idle = idle
            slots = max(1, getattr(scheduler, self._slots) - idle)
            if slots != ledger.limits.running:
                ledger.limits = ledger.limits._replace(running=slots)
                live.lease.ended = True
            if live.lease.ended or live.plan is None:
                renewal = self._renew()
                if renewal is not None:
                    live.take_over(renewal.policy)
        free = self._books.free_blocks()
        short = free < ledger.rolling * self._blocks_each  # may a decode lack a block?
        plan = live.begin(free * self._block // self._groups, short)
        if plan is None:
            return NO_REQUESTS
        if plan is self._quiet and not ledger.prefilling and ledger.decoding:  # most steps
            self._gate.shut = True
            return NO_REQUESTS
        if throttled and not scheduler.prefill_capacity_bound and ledger.decoding:
            plan = DECODES_ONLY
        return self.turn(plan)

    def turn(self, plan: Plan) -> list[Request]:
        ledger = self._ledger
        alone = not plan.prefill or plan is self._spent
        if alone and plan.decode is ALL and not ledger.prefilling and ledger.decoding:
            self._gate.shut = True
            if plan.budget < self._budget or plan.chunk < inf:
                self._limit(plan, NO_REQUESTS)
            elif plan is not DECODES_ONLY:
                self._quiet = plan
            return NO_REQUESTS
        halfway = [ledger.prefilling[id] for id in plan.prefill if id in ledger.prefilling]
        visible = self._visible(plan)
        if not halfway and not visible and ledger.waiting.keys().isdisjoint(plan.prefill):
            self._spent = plan
        for queue in self._queues:
            if visible and queue.members:
                queue.shut(visible)
            else:
                queue.visible = NOTHING
        self._hold(plan, halfway)
        self._limit(plan, visible)
        if halfway and plan.decode is not NONE:
            self._prompts_last(halfway)
        return visible

    def _visible(self, plan: Plan) -> list[Request]:
        """The new prompts of the plan, and before them those that wait with KV in hand.

        That KV can only come free by their running, so they never stand behind one that needs it, and
        enter even unasked when none runs. A request that the plan evicts does not enter in the same step.
        """
        ledger, requests, holding = self._ledger, self._requests, self._books.holding
        ids = [id for id in plan.prefill if id in ledger.waiting and id not in plan.evict]
        if holding and (ids or not (ledger.decoding or ledger.prefilling)):
            ids = [*holding, *[id for id in ids if id not in holding]]
        visible = [requests[id] for id in ids]
        if visible and self._scheduler.lora_config:
            return self._with_room_for_adapters(visible)
        return visible

    def restore(self) -> None:
        scheduler = self._scheduler
        if self._limited:
            self._limited = False
            scheduler.max_num_scheduled_tokens = self._budget
            scheduler.scheduler_config.long_prefill_token_threshold = self._longest
        if self._gate.shut:
            self._gate.shut = False
            return
        for queue in self._queues:
            if queue.taken:
                queue.open()
            else:
                queue.visible = None
        if self._order is not None:
            # the order of admission decides which vLLM preempts
            rank = {request: place for place, request in enumerate(self._order)}
            self._scheduler.running.sort(key=lambda request: rank.get(request, len(rank)))
            self._order = None

    def forget_drafts(self, scheduled: dict[str, int]) -> None:
        """Of those that run and are not in this step, whatever kept them out: the worker has lost theirs."""
        running = self._scheduler.running
        if len(scheduled) < len(running):
            for request in running:
                if request.spec_token_ids and request.request_id not in scheduled:
                    request.spec_token_ids = []

    def undo(self, seen: list[Request]) -> None:
        """VLLM's `schedule` failed half-way: undo what it had done to those that wait and those that run.

        Of the requests that it had admitted the worker knows nothing: they wait again, as before. The others
        may have got blocks that the worker was never told of, and blocks may be listed in the prefix cache
        that were never computed: vLLM preempts all that run and empties the cache, which it refuses where
        KV is held by requests that wait.
        """
        scheduler = self._scheduler
        free = scheduler.kv_cache_manager.free
        queued = {request for queue in self._queues for request in queue.members}
        admitted = {request for queue in self._queues for request in queue.put_back(queued)}
        self.restore()
        scheduler.running[:] = [request for request in scheduler.running if request not in admitted]
        for request in seen:
            free(request)
            request.num_computed_tokens = 0
            if request in admitted:
                request.status = PREEMPTED if request.num_preemptions else WAITING
                getattr(scheduler, "_inflight_prefills", set()).discard(request)
        ran = [*scheduler.running]
        scheduler.reset_prefix_cache(reset_running_requests=True)
        for request in ran:  # vLLM 0.26 drops an output for each token in flight: with drafts, too many
            if getattr(request, "async_tokens_to_discard", 0) > 1:
                name, flights = request.request_id, self._live.flights
                request.async_tokens_to_discard = sum([name in flight.scheduled for flight in flights])

    def _hold(self, plan: Plan, halfway: list[Entry]) -> None:
        ledger, requests = self._ledger, self._requests
        decode, until = plan.decode, self._scheduler.current_step + 2
        if decode is NONE:
            named = {requests[entry.id] for entry in halfway}
            held = [request for request in self._scheduler.running if request not in named]
        else:
            prompts = {*plan.prefill}
            held = [requests[id] for id in ledger.prefilling if id not in prompts]
            if not isinstance(decode, Decodes):
                held += [requests[id] for id in ledger.decoding if id not in decode]
        for request in held:
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, until)

    def _limit(self, plan: Plan, visible: list[Request]) -> None:
        """Tokens of the step, and of its prompts; never less than the decodes of the plan need, of which
        some may have joined since it was made, or than vLLM needs to run any prompt at all.
        """
        scheduler, budget, chunk = self._scheduler, plan.budget, plan.chunk
        self._limited = True
        decodes = self._decodes(plan)
        if not scheduler.scheduler_config.enable_chunked_prefill:
            if visible:  # a prompt that cannot be cut runs whole, or never
                budget = max(budget, decodes + max(visible[0].num_tokens, self._least))
        elif chunk < inf:
            chunk = max(chunk, self._least)
            budget = min(budget, decodes + chunk)
            longest = min(chunk, self._longest or chunk)
            scheduler.scheduler_config.long_prefill_token_threshold = int(longest)
        budget = max(budget, decodes, self._least)
        if budget < self._budget:
            scheduler.max_num_scheduled_tokens = int(budget)

    def _decodes(self, plan: Plan) -> int:
        """Tokens that its decodes take in this step, with the drafts there are: fewer than the engine could
        make, where it found none or drafts less in a large batch.
        """
        decode, ledger, requests = plan.decode, self._ledger, self._requests
        if decode is NONE:
            return 0
        if isinstance(decode, Decodes) and not self._books.speculates:
            return ledger.rolling + len(ledger.held)
        ids = ledger.decoding.keys() if isinstance(decode, Decodes) else ledger.decoding.keys() & decode
        return sum([_tokens_due(requests[id]) for id in ids]) if self._books.speculates else len(ids)

    def _with_room_for_adapters(self, visible: list[Request]) -> list[Request]:
        """LoRA adapters count in vLLM for one step; held decodes would trip its check in the next."""
        most = self._scheduler.lora_config.max_loras
        running = self._scheduler.running
        adapters = {request.lora_request.lora_int_id for request in running if request.lora_request}
        kept: list[Request] = []
        others: list[Request] = []
        for request in visible:
            wanted = adapters | {request.lora_request.lora_int_id} if request.lora_request else adapters
            if len(wanted) > most:
                others.append(request)
            else:
                adapters = wanted
                kept.append(request)
        self._books.set_aside(others)
        return kept

    def _prompts_last(self, halfway: list[Entry]) -> None:
        """Decodes come first in a step: half-done prompts go behind them, in the order of the plan."""
        running = self._scheduler.running
        tail = [self._requests[entry.id] for entry in halfway]
        if running[-len(tail) :] == tail:
            return
        self._order = list(running)
        moved = set(tail)
        running[:] = [request for request in self._order if request not in moved] + tail


def _least_piece(scheduler: Any, decode_width: int) -> int:
    """Tokens of a prompt below which vLLM runs none of it, or fails.

    It pads the last token of a prompt to the width of a decode with drafts: cut to less, that is an error of
    its own; with less left of the budget it waits for ever. A hybrid model's pieces are rounded down to whole
    blocks, those before a drafter that reads ahead by as much as it reads.
    """
    least = max(decode_width, getattr(scheduler, "num_prefill_lookahead", 0))
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        least = max(least, scheduler.cache_config.block_size)
    return least


def _tokens_due(request: Request) -> int:
    """What vLLM will schedule of a decode; nothing once tokens in flight are certain to be its last."""
    ahead: int = request.num_output_placeholders
    computed: int = request.num_computed_tokens
    if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
        return 0
    due: int = request.num_tokens + len(request.spec_token_ids) + ahead - computed
    return max(0, due)
