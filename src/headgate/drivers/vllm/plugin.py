"""A plan becomes the few knobs vLLM's own `schedule` reads; that is called once, and the knobs go back."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from headgate.core.ledger import Entry
from headgate.core.plan import ALL, NONE, Decodes, Plan
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.drivers.flight import Chunk, Flight
from headgate.drivers.live import Live, told
from headgate.drivers.vllm.queues import GatedQueue
from headgate.drivers.vllm.seams import PROMOTE

logger = init_logger("vllm.headgate")  # vLLM shows only loggers under its own name

QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")  # which of them exist depends on the release
ENDS = {
    RequestStatus.FINISHED_STOPPED: End.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: End.LIMIT,
    RequestStatus.FINISHED_IGNORED: End.REFUSED,
}
DECODES_ONLY = Plan(ALL)

Promises = Callable[[Request], tuple[str, Slo, int | None]]  # kind, promises, guess


class Duties(NamedTuple):
    """What the factory hands over."""

    policy: BatchPolicy | None
    observers: tuple[Observer, ...]
    watchdog: float
    promises: Promises
    renew: Callable[[], BatchPolicy | None]  # another policy, when the settings have changed


class Headgate:
    """Mixed into vLLM's `Scheduler` and `AsyncScheduler`. All our attributes begin with `_headgate`.

    A decode is held by `next_decode_eligible_step`; who may enter, and in which order, by the gate of the
    waiting queues; the token budget and the chunk by the two numbers `schedule` reads. Nothing of vLLM's
    own code is repeated, and when our part fails it is left out: requests are vLLM's throughout.
    """

    def _headgate_begin(self: Any, duties: Duties) -> None:
        """Called once, when vLLM's own constructor has run."""
        width = 1 + self.num_spec_tokens
        block = self.block_size
        limits = Limits(self.max_num_scheduled_tokens, self._headgate_seats(), block, width)
        self._headgate_groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        total = (self.cache_config.num_gpu_blocks - 1) * block // self._headgate_groups  # one is never used
        self._headgate = Live(
            duties.policy,
            limits,
            total,
            duties.observers,
            watchdog=duties.watchdog,
            evict=self._headgate_evict,
        )
        self._headgate_duties = duties
        self._headgate_broken = False
        self._headgate_entries: dict[str, Entry] = {}
        self._headgate_requests: dict[int, Request] = {}
        self._headgate_unready: dict[str, Request] = {}  # blocked, or between two inputs of a session
        self._headgate_flights: dict[int, tuple[Flight, dict[str, int]]] = {}
        self._headgate_next = 0
        self._headgate_by_priority = self.policy.value == "priority"
        self._headgate_promote = next(getattr(self, name) for name in PROMOTE if hasattr(self, name))
        names = [name for name in QUEUES if hasattr(self, name)]
        for name in names:
            setattr(self, name, GatedQueue(getattr(self, name)))
        self._headgate_queues = [getattr(self, name) for name in names]

    # -- what vLLM calls ----------------------------------------------------------------------------

    def add_request(self: Any, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if not known and not self._headgate_broken:
            self._headgate_guarded(self._headgate_arrive, request)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._headgate_broken or self._pause_state == PauseState.PAUSED_ALL:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        throttled = bool(args[0] if args else kwargs.get("throttle_prefills", False))
        budget, chunk = self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold
        order = self._headgate_guarded(self._headgate_prepare, throttled)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = budget
            self.scheduler_config.long_prefill_token_threshold = chunk
            for queue in self._headgate_queues:
                queue.open()
            if order is not None:
                self._headgate_reorder(order)
        if not self._headgate_broken:
            self._headgate_guarded(self._headgate_ran, output)
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        flight = self._headgate_flights.pop(id(scheduler_output), None)
        if flight is not None and not self._headgate_broken:
            self._headgate_guarded(self._headgate.done, flight[0], self._headgate_kv_held())
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if flight is not None and self.num_spec_tokens and not self._headgate_broken:
            self._headgate_guarded(self._headgate_recount, flight[1])
        return result

    def _preempt_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        entry = self._headgate_entries.get(request.request_id)
        if entry is not None and not self._headgate_broken:
            self._headgate_guarded(self._headgate.evicted, entry)

    def _free_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        if not self._headgate_broken:
            self._headgate_guarded(self._headgate_left, request, ENDS.get(request.status, End.ABORTED))
        return result

    def _handle_stopped_request(self: Any, request: Request) -> bool:
        finished: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not finished and not self._headgate_broken:  # a session that waits for its next input
            self._headgate_guarded(self._headgate_left, request, End.STOPPED)
            self._headgate_unready[request.request_id] = request
        return finished

    # -- our part -----------------------------------------------------------------------------------

    def _headgate_guarded(self: Any, part: Callable[..., Any], *args: Any) -> Any:
        """Do our part; if it fails, never again."""
        try:
            return part(*args)
        except Exception as error:
            logger.exception("headgate failed; vLLM goes on without it")
            self._headgate_broken = True
            for queue in self._headgate_queues:
                queue.open()
            self._headgate.fall(f"internal error: {told(error)}")
            return None

    def _headgate_arrive(self: Any, request: Request) -> None:
        """A new request: the policy hears of it as soon as it can run."""
        if self._is_blocked_waiting_status(request.status):
            self._headgate_unready[request.request_id] = request
            return
        live = self._headgate
        kind, slo, guess = self._headgate_duties.promises(request)
        waited = max(0.0, time.time() - request.arrival_time)  # the front end stamps wall-clock time
        entry = Entry(
            live.ledger,
            self._headgate_next,
            live.now - waited,
            max(1, request.num_tokens - request.num_computed_tokens),
            request.max_tokens,
            kind,
            guess,
            request.priority,
            slo,
        )
        self._headgate_next += 1
        self._headgate_entries[request.request_id] = entry
        self._headgate_requests[entry.id] = request
        live.arrive(entry)
        if self._headgate_by_priority:
            self._headgate_sort()

    def _headgate_sort(self: Any) -> None:
        """`--scheduling-policy priority`: the queue policies see is in vLLM's order of urgency."""
        waiting, requests = self._headgate.ledger.waiting, self._headgate_requests
        for id in sorted(waiting, key=lambda id: (requests[id].priority, requests[id].arrival_time, id)):
            waiting.move_to_end(id)

    def _headgate_left(self: Any, request: Request, how: End) -> None:
        name = request.request_id
        self._headgate_unready.pop(name, None)
        entry = self._headgate_entries.pop(name, None)
        if entry is None:
            return
        del self._headgate_requests[entry.id]
        live = self._headgate
        live.ledger.recount(entry, request.num_output_tokens)
        live.left(entry, how)
        for _, scheduled in self._headgate_flights.values():
            if name in scheduled:
                live.wasted(scheduled[name])

    def _headgate_prepare(self: Any, throttled: bool) -> list[Request] | None:
        """Ask for the plan and set the knobs; the order of `running` to restore, where it had to change."""
        live, ledger = self._headgate, self._headgate.ledger
        if self._headgate_unready:
            self._headgate_look_again()
        if live.policy is not None and live.lease.ended:
            policy = self._headgate_duties.renew()
            if policy is not None:
                live.take_over(policy)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        plan = live.begin(self._headgate_room(free), self._headgate_short(free))
        if plan is None:
            return None
        if throttled and ledger.decoding:
            plan = DECODES_ONLY
        prompts = [ledger.prefilling[id] for id in plan.prefill if id in ledger.prefilling]
        fresh = [id for id in plan.prefill if id in ledger.waiting]
        self._headgate_hold(plan, prompts)
        self._headgate_limit(plan)
        visible = [self._headgate_requests[id] for id in fresh]
        if visible and self.lora_config:
            visible = self._headgate_adapters(visible)
        for queue in self._headgate_queues:
            queue.shut(visible)
        if prompts and plan.decode is not NONE:
            return self._headgate_prompts_last(prompts)
        return None

    def _headgate_look_again(self: Any) -> None:
        """Who was blocked may be ready now; only then does the policy hear of it."""
        for name, request in list(self._headgate_unready.items()):
            blocked = self._is_blocked_waiting_status(request.status)
            if not blocked or self._headgate_promote(request):
                del self._headgate_unready[name]
                self._headgate_arrive(request)

    def _headgate_hold(self: Any, plan: Plan, prompts: list[Entry]) -> None:
        """Who is running and not in the plan sits this step out."""
        ledger, requests = self._headgate.ledger, self._headgate_requests
        decode, until = plan.decode, self.current_step + 2
        if decode is NONE:
            named = {requests[entry.id] for entry in prompts}
            held = [request for request in self.running if request not in named]
        else:
            held = [requests[id] for id in ledger.prefilling if id not in plan.prefill]
            if not isinstance(decode, Decodes):
                held += [requests[id] for id in ledger.decoding if id not in decode]
        for request in held:
            if request.next_decode_eligible_step < until:
                request.next_decode_eligible_step = until

    def _headgate_limit(self: Any, plan: Plan) -> None:
        """Tokens of the step, and of its prompts."""
        budget, chunk = plan.budget, plan.chunk
        if chunk < inf and self.scheduler_config.enable_chunked_prefill:
            ledger = self._headgate.ledger
            decodes = 0 if plan.decode is NONE else ledger.rolling
            budget = min(budget, decodes * ledger.limits.decode_width + chunk)
            own = self.scheduler_config.long_prefill_token_threshold
            self.scheduler_config.long_prefill_token_threshold = int(min(chunk, own or chunk))
        if budget < self.max_num_scheduled_tokens:
            self.max_num_scheduled_tokens = int(budget)

    def _headgate_adapters(self: Any, visible: list[Request]) -> list[Request]:
        """Leave out whoever would bring more adapters among the running than vLLM can keep.

        vLLM counts those of one step only; held decodes would trip its own check in the next.
        """
        most = self.lora_config.max_loras
        adapters = {request.lora_request.lora_int_id for request in self.running if request.lora_request}
        kept = []
        for request in visible:
            if request.lora_request:
                if len(adapters | {request.lora_request.lora_int_id}) > most:
                    continue
                adapters.add(request.lora_request.lora_int_id)
            kept.append(request)
        return kept

    def _headgate_prompts_last(self: Any, prompts: list[Entry]) -> list[Request] | None:
        """Decodes come first in a step: move half-done prompts behind them, in the order of the plan."""
        tail = [self._headgate_requests[entry.id] for entry in prompts]
        if self.running[-len(tail) :] == tail:
            return None
        before = list(self.running)
        moved = set(tail)
        self.running[:] = [request for request in before if request not in moved] + tail
        return before

    def _headgate_reorder(self: Any, before: list[Request]) -> None:
        """Back to the order of admission, which decides whom vLLM preempts."""
        rank = {request: place for place, request in enumerate(before)}
        self.running.sort(key=lambda request: rank.get(request, len(rank)))

    def _headgate_ran(self: Any, output: Any) -> None:
        """Read from vLLM's answer what really runs."""
        live, entries, scheduled = self._headgate, self._headgate_entries, output.num_scheduled_tokens
        for name in self._headgate_new(output):
            entry = entries[name]
            if entry.evictions:
                live.ledger.recount(entry, self.requests[name].num_output_tokens)
            live.admitted(entry, self.requests[name].num_computed_tokens - scheduled[name])
        chunks = []
        for entry in live.ledger.prefilling.values():
            request = self._headgate_requests[entry.id]
            tokens = scheduled.get(request.request_id)
            if tokens:
                computed = request.num_computed_tokens
                left = request.num_tokens - computed if request.is_prefill_chunk else 0
                chunks.append(Chunk(entry, tokens, computed - tokens, left))
        decodes = len(scheduled) - len(chunks)
        flight = live.ran(
            tuple(chunks),
            decodes,
            lambda: [
                entry.id
                for entry in map(entries.__getitem__, scheduled)
                if entry.id in live.ledger.decoding
            ],
        )
        if flight is not None:
            self._headgate_flights[id(output)] = flight, scheduled

    def _headgate_new(self: Any, output: Any) -> list[str]:
        """Who got a seat in this step."""
        fresh = [data.req_id for data in output.scheduled_new_reqs]
        return [*fresh, *output.scheduled_cached_reqs.resumed_req_ids]

    def _headgate_recount(self: Any, scheduled: dict[str, int]) -> None:
        """With speculation a decode may get several tokens in a step."""
        ledger = self._headgate.ledger
        for name in scheduled:
            entry = self._headgate_entries.get(name)
            if entry is not None and entry.id in ledger.decoding:
                request = self.requests[name]
                ledger.recount(entry, request.num_output_tokens + (request.num_output_placeholders > 0))

    def _headgate_evict(self: Any, entry: Entry) -> None:
        """The plan drops its KV: vLLM preempts it, and `_preempt_request` tells the ledger."""
        request = self._headgate_requests[entry.id]
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    # -- memory and seats -----------------------------------------------------------------------------

    def _headgate_seats(self: Any) -> int:
        return int(getattr(self, "max_num_active_reqs", self.max_num_running_reqs))

    def _headgate_room(self: Any, free: int) -> int:
        """Free KV in tokens, less what vLLM keeps back from new requests."""
        spare = free - getattr(self.kv_cache_manager, "watermark_blocks", 0)
        return int(max(0, spare) * self.block_size // self._headgate_groups)

    def _headgate_short(self: Any, free: int) -> bool:
        """May the next decode step lack a block? Then the policy is asked before vLLM preempts somebody."""
        ledger = self._headgate.ledger
        return bool(free < ledger.rolling * self._headgate_groups)

    def _headgate_kv_held(self: Any) -> int:
        pool = self.kv_cache_manager.block_pool
        used = self.cache_config.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return int(used * self.block_size // self._headgate_groups)
