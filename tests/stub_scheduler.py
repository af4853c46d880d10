"""A scheduler with the names and habits of vLLM's, small enough to read: the plug-in runs without vLLM.

It keeps its own truth (queues, blocks, tokens), composes steps from the knobs vLLM's scheduler reads, and may
compose the next step before the tokens of this one are known (`asynchronous`). `plug_in()` loads the modules
of the plug-in on top of it, whether vLLM is installed or not.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from stub_requests import ListQueue, PauseState, Request, RequestQueue, RequestStatus


class StubScheduler:
    """Composes steps as vLLM does, as far as the plug-in can tell."""

    def __init__(
        self,
        slots: int = 8,
        budget: int = 256,
        blocks: int = 101,
        block: int = 16,
        asynchronous: bool = False,
        by_priority: bool = False,
        chunked: bool = True,
        max_loras: int | None = None,
        interval: int = 1,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: Any = ListQueue(by_priority)
        self.kv_holding_waiting: Any = ListQueue(by_priority)
        self.policy = SimpleNamespace(value="priority" if by_priority else "fcfs")
        self.max_num_running_reqs, self.max_num_scheduled_tokens = slots, budget
        self.block_size, self.num_spec_tokens = block, 0
        self.cache_config = SimpleNamespace(num_gpu_blocks=blocks, block_size=block)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.kv_cache_manager = SimpleNamespace(block_pool=self)
        self.scheduler_config = SimpleNamespace(
            long_prefill_token_threshold=0, enable_chunked_prefill=chunked
        )
        self.lora_config = SimpleNamespace(max_loras=max_loras) if max_loras else None
        self._pause_state = PauseState.UNPAUSED
        self.prefill_capacity_bound = False
        self.num_waiting_for_streaming_input = 0
        self.current_step = 0
        self.local_prefill_interval = interval  # steps between two with prompts, while others decode
        self.last_prefill = -interval
        self.asynchronous = asynchronous
        self.blocks: dict[str, int] = {}
        self.ready: set[str] = set()  # blocked requests that may be promoted
        self.gone: dict[str, tuple[RequestStatus, int]] = {}

    # -- KV ---------------------------------------------------------------------------------------

    def get_num_free_blocks(self) -> int:
        return int(self.cache_config.num_gpu_blocks - 1 - sum(self.blocks.values()))

    def allocate(self, request: Request, tokens: int) -> bool:
        have = self.blocks.get(request.request_id, 0)
        need = -(-(request.num_computed_tokens + tokens) // self.block_size) - have
        if need > self.get_num_free_blocks():
            return False
        self.blocks[request.request_id] = have + need
        return True

    # -- comings and goings -----------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_request(self, name: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        request = self.requests[name]
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
            self.kv_holding_waiting.remove_requests([request])
        request.status = status
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        self.blocks.pop(request.request_id, None)
        self.gone[request.request_id] = request.status, request.num_output_tokens
        del self.requests[request.request_id]

    def _handle_stopped_request(self, request: Request) -> bool:
        return True

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self.blocks.pop(request.request_id, None)
        request.status = RequestStatus.PREEMPTED
        request.stale += request.placeholders
        request.num_computed_tokens = request.placeholders = 0
        request.is_prefill_chunk = False
        request.num_preemptions += 1
        self.waiting.prepend_request(request)

    def _is_blocked_waiting_status(self, status: RequestStatus) -> bool:
        return status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self.ready:
            request.status = RequestStatus.WAITING
        return request.status is RequestStatus.WAITING

    # -- steps ------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.current_step += 1
        throttle_prefills |= self.current_step - self.last_prefill < self.local_prefill_interval
        budget = 0 if self._pause_state is PauseState.PAUSED_ALL else self.max_num_scheduled_tokens
        scheduled: dict[str, int] = {}
        budget, preempted = self._run_running(budget, scheduled, throttle_prefills)
        new, resumed = [], set()
        throttle = throttle_prefills and any(not r.is_prefill_chunk for r in self.running)
        if not preempted and not throttle and self._pause_state is PauseState.UNPAUSED:
            new, resumed = self._run_waiting(budget, scheduled)
        if new or resumed:
            self.last_prefill = self.current_step
        samples = self._after(scheduled)
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            samples=samples,
        )

    def _run_running(self, budget: int, scheduled: dict[str, int], throttled: bool) -> tuple[int, bool]:
        preempted = False
        for request in list(self.running):
            if budget <= 0 or request not in self.running:
                continue
            if self.current_step < request.next_decode_eligible_step or (
                throttled and request.is_prefill_chunk and any(not r.is_prefill_chunk for r in self.running)
            ):
                continue
            if request.num_output_tokens + request.placeholders >= request.max_tokens:
                continue
            tokens = self._piece(request, budget)
            while tokens > 0 and not self.allocate(request, tokens):
                victim = self.running.pop()
                budget += scheduled.pop(victim.request_id, 0)
                self._preempt_request(victim, 0.0)
                preempted = True
                if victim is request:
                    break
            if tokens > 0 and request in self.running:
                scheduled[request.request_id] = tokens
                budget -= tokens
        return budget, preempted

    def _run_waiting(self, budget: int, scheduled: dict[str, int]) -> tuple[list[str], set[str]]:
        new: list[str] = []
        resumed: set[str] = set()
        while budget > 0 and len(self.running) < self.max_num_running_reqs:
            queue = self.kv_holding_waiting or self.waiting
            if not queue:
                break
            request = queue.peek_request()
            blocked = self._is_blocked_waiting_status(request.status)
            if blocked and not self._try_promote_blocked_waiting_request(request):
                queue.pop_request()
                self.waiting.prepend_request(request)
                break
            tokens = self._piece(request, budget)
            whole = request.num_tokens - request.num_computed_tokens
            if not self.scheduler_config.enable_chunked_prefill and whole > budget:
                break
            if not self.allocate(request, tokens):
                break
            queue.pop_request()
            (resumed.add if request.status is RequestStatus.PREEMPTED else new.append)(request.request_id)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            scheduled[request.request_id] = tokens
            budget -= tokens
            if self.lora_config:
                used = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
                assert len(used) <= self.lora_config.max_loras
        return new, resumed

    def _piece(self, request: Request, budget: int) -> int:
        tokens = request.num_tokens + request.placeholders - request.num_computed_tokens
        longest = self.scheduler_config.long_prefill_token_threshold
        if 0 < longest < tokens:
            tokens = longest
        return min(tokens, budget)

    def _after(self, scheduled: dict[str, int]) -> set[str]:
        samples = set()
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens + request.placeholders
            if not request.is_prefill_chunk:
                samples.add(name)
                request.placeholders += self.asynchronous
        return samples

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        for name in scheduler_output.samples:
            request = self.requests.get(name)
            if request is None:
                continue
            if request.stale:
                request.stale -= 1
                continue
            request.placeholders -= self.asynchronous
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.output:
                capped = request.num_output_tokens >= request.max_tokens
                kinds = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
                request.status = kinds[capped]
                self.running.remove(request)
                if self._handle_stopped_request(request):
                    self._free_request(request)


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.v1": {},
    "vllm.v1.request": {"Request": Request, "RequestStatus": RequestStatus},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.interface": {"PauseState": PauseState},
    "vllm.v1.core.sched.request_queue": {"RequestQueue": RequestQueue},
}
OURS = [f"headgate.live.vllm.{name}" for name in ("queues", "request_map", "knobs", "plugin")]


@cache
def plug_in() -> SimpleNamespace:
    """The plug-in's modules, loaded over this stub; the process's other modules are left as they were."""
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "vllm"}
    kept |= {name: sys.modules.pop(name) for name in OURS if name in sys.modules}
    package = import_module("headgate.live.vllm")
    try:
        for name, names in MODULES.items():
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(names)
        found = {name.rpartition(".")[2]: import_module(name) for name in OURS}
    finally:
        for name in [*MODULES, *OURS]:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        for name in OURS:
            short = name.rpartition(".")[2]
            if name in kept:
                setattr(package, short, kept[name])
            elif hasattr(package, short):
                delattr(package, short)
    return SimpleNamespace(**found)
