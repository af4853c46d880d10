"""SGLang's real `Scheduler` on a CPU, without weights or kernels: only the worker is ours.

All that decides is SGLang's: the constructor, the radix cache, the KV allocators, `PrefillAdder`,
`get_next_batch_to_run`, `process_batch_result` and both event loops. Requests enter where `ingest_requests`
would bring them. Time is virtual: a launched step takes what it costs.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.managers import scheduler as schedulers
from sglang.srt.managers import tp_worker as workers
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from headgate.cost.model import Shape, StepCost

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
GOES_ON = 7  # a token
MOST_TURNS = 200_000


class Step(NamedTuple):
    """One launched step: tokens of each prompt in it, by name and in order, and how many decodes."""

    prompts: tuple[tuple[str, int], ...]
    decodes: int


class EmptyKV(KVCache):
    """Of the right size; stores nothing."""

    def __init__(self, size: int, page: int) -> None:
        super().__init__(size, page, torch.bfloat16, 1, "cpu", False)

    def get_key_buffer(self, layer_id): ...
    def get_value_buffer(self, layer_id): ...
    def get_kv_buffer(self, layer_id): ...
    def set_kv_buffer(self, *args, **kwargs): ...


class Runner:
    """What the scheduler reads of a model runner; all else is None."""

    def __init__(self, worker: Worker, slots: int, kv: int, page: int, context: int) -> None:
        self.device = "cpu"
        self.req_to_token_pool = ReqToTokenPool(slots, context + 4, "cpu", False)
        self.token_to_kv_pool = EmptyKV(kv, page)
        given = {
            "dtype": torch.bfloat16,
            "device": "cpu",
            "kvcache": self.token_to_kv_pool,
            "need_sort": False,
        }
        self.token_to_kv_pool_allocator = (
            TokenToKVPoolAllocator(kv, **given)
            if page == 1
            else PagedTokenToKVPoolAllocator(kv, page, **given)
        )
        self.memory_pool_config = object()
        self.max_running_requests = slots
        self.max_total_num_tokens = self.logical_max_total_num_tokens = kv
        self.effective_logical_max_total_num_tokens = kv
        self.model_config = worker.model_config
        self.forward_stream = torch.get_device_module("cpu").Stream()
        self.attn_backend = SimpleNamespace(needs_cpu_seq_lens=True)
        self.model = SimpleNamespace()
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, **_: batch)
        self.mtp_draft_device_pools = self.mtp_draft_mamba_pools = ()
        self.weight_load_mem_usage = 0.0
        self.prefill_aware_swa = self.is_hybrid_swa = False
        self.sliding_window_size = None

    def prewarm_sampling(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Worker(workers.TpModelWorker):
    """Answers every batch with one token for each request."""

    size: Any = None  # slots, kv, page, context
    preloaded_weights_bytes, weight_load_time = 0, 0.0
    graph_memory_usage: ClassVar[dict[str, Any]] = {}
    graph_time_usage: ClassVar[dict[str, Any]] = {}

    def __init__(self, server_args, gpu_id, nccl_port, **_):
        self.server_args, self.gpu_id, self.nccl_port = server_args, gpu_id, nccl_port
        self.is_draft_worker = self.is_multi_layer_eagle = False
        self.context_length = None
        self._init_model_config()
        self._model_runner = Runner(self, *self.size)
        self.device, self.random_seed, self.dllm_algorithm = "cpu", 0, None
        self.tokenizer = self.processor = self.hicache_layer_transfer_counter = None
        self.launched: Callable[[Any], None] = lambda batch: None
        self.token: Callable[[Any], int] = lambda request: GOES_ON

    def init_attention_backends(self): ...
    def init_cuda_graphs(self, capture_decode_cuda_graph=True): ...
    def get_pad_input_ids_func(self): ...

    def forward_batch_generation(self, batch, *args, **kwargs):
        self.launched(batch)
        tokens = torch.tensor([self.token(request) for request in batch.reqs], dtype=torch.int64)
        return GenerationBatchResult(next_token_ids=tokens, can_run_cuda_graph=False)


class Bench:
    """One scheduler, of `kind`; `cost` says how long a step takes."""

    def __init__(
        self,
        kind: type[Any] | None = None,
        cost: StepCost | None = None,
        slots: int = 16,
        kv: int = 65536,
        page: int = 1,
        context: int = 16384,
        overlap: bool = False,
        radix: bool = False,
        rank: int = 0,
        ports: PortArgs | None = None,
        **flags: Any,
    ) -> None:
        folder = tempfile.mkdtemp(prefix="headgate-sglang-")
        Path(folder, "config.json").write_text(json.dumps(TINY))
        # A scheduler that has ended seems stuck to SGLang's watchdog, which then signals the parent process.
        flags = {"chunked_prefill_size": 512, "watchdog_timeout": 1e8, **flags}
        args = ServerArgs(
            model_path=folder, device="cpu", skip_tokenizer_init=True, load_format="dummy", page_size=page,
            max_running_requests=slots, max_total_tokens=kv, context_length=context, mem_fraction_static=0.5,
            disable_overlap_schedule=not overlap, disable_radix_cache=not radix,
            attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True, **flags,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        Worker.size = (slots, kv, page, context)
        workers.TpModelWorker = Worker
        self.now = 0.0
        self.cost = cost
        self.steps: list[Step] = []
        self.ends: list[float] = []  # of the steps
        self.flights: deque[Any] = deque()  # launched, their tokens not yet known
        self.sent: dict[str, float] = {}  # when
        self.finished: dict[str, int] = {}  # after so many steps
        self.aborted: dict[str, Any] = {}  # what its client was told
        self.hooks: dict[int, Callable[[], None]] = {}  # called when so many steps have been launched
        self.scheduler = (kind or schedulers.Scheduler)(args, ports or PortArgs.init_new(args))
        _one_runtime()
        self.scheduler.tp_worker.launched = self._launched
        channels = self.scheduler.ipc_channels
        channels.send_to_detokenizer.send_output = self._answered
        channels.send_to_tokenizer.send_output = self._told
        self._process = self.scheduler.process_batch_result
        self.scheduler.process_batch_result = self._ended

    def _launched(self, batch: Any) -> None:
        beside = {*(batch.decoding_reqs or ())}
        prompts, rows = (), batch.reqs
        if batch.forward_mode.is_extend():
            pieces = zip(batch.reqs, batch.extend_lens, strict=True)
            prompts = tuple((request.rid, int(n)) for request, n in pieces if request not in beside)
            rows = [request for request in batch.reqs if request in beside]
        self.steps.append(Step(prompts, len(rows)))
        if self.cost is not None:
            late = {*self.flights[-1].reqs} if self.flights else set()  # their newest token is not here yet
            context = sum(len(r.origin_input_ids) + len(r.output_ids) + (r in late) for r in rows)
            self.ends.append(
                max(self.now, self.ends[-1] if self.ends else 0.0)
                + self.cost.seconds(Shape(len(rows), context, sum(n for _, n in prompts)))
            )
            self.flights.append(batch.copy())
        hook = self.hooks.pop(len(self.steps), None)
        if hook is not None:
            hook()

    def _ended(self, batch: Any, result: Any) -> None:
        """Its tokens come when it ends; with overlap the next step has been launched by then."""
        if self.flights:
            self.now = max(self.now, self.ends[-len(self.flights)])
            self.flights.popleft()
        self._process(batch, result)

    def _answered(self, output: Any, *args: Any, **kwargs: Any) -> None:
        pairs = zip(getattr(output, "rids", ()), getattr(output, "finished_reasons", ()), strict=False)
        for rid, reason in pairs:
            if reason is not None:
                self.finished[rid] = len(self.steps)

    def _told(self, output: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(output, "rid", None):
            self.aborted[output.rid] = output.finished_reason

    def request(
        self, rid: str, prompt: int | list[int], output: int, **more: Any
    ) -> TokenizedGenerateReqInput:
        """`prompt`: token ids, or how many (which no other request shares)."""
        sampling = {name: more.pop(name) for name in ("custom_params", "ignore_eos", "regex") if name in more}
        if isinstance(prompt, int):
            number = int("".join(filter(str.isdigit, rid)) or 0)
            prompt = [3 + number % 990, 3 + number // 990, *[3 + i * i % 991 for i in range(prompt)]][:prompt]
        params = SamplingParams(max_new_tokens=output, temperature=0.0, **sampling)
        params.normalize(None)
        return TokenizedGenerateReqInput(
            rid=rid, input_text="", input_ids=array("q", prompt), mm_inputs=None, sampling_params=params,
            return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
            stream=False,
            **{"input_embeds": None, "token_type_ids": None, **more},
        )  # fmt: skip

    def serve(self, requests: list[tuple[float, Any]]) -> None:
        """Serve (arrival, request) until each has finished or its client was told that it has not."""
        scheduler, due = self.scheduler, sorted(requests, key=lambda pair: pair[0])
        self.sent.update((request.rid, when) for when, request in due)
        due.reverse()
        target = len(self.finished.keys() | self.aborted.keys()) + len(requests)
        turns = idle_turns = 0

        def ingest(stop_at_pause: bool = False) -> list[Any]:
            nonlocal turns, idle_turns
            turns += 1
            idle = scheduler.is_fully_idle() and not scheduler.result_queue
            idle_turns = idle_turns + 1 if idle else 0
            if idle_turns > 1 and due and due[-1][0] > self.now:  # SGLang has noticed that it is idle
                self.now = due[-1][0]
            new = []
            while due and due[-1][0] <= self.now:
                new.append(due.pop()[1])
            scheduler.process_input_requests(new)
            over = len(self.finished.keys() | self.aborted.keys()) >= target
            if turns > MOST_TURNS:
                raise AssertionError(f"{target} requests, {len(self.finished)} finished")
            scheduler.gracefully_exit = over and scheduler.is_fully_idle()
            return new

        self.loop(ingest)

    def loop(self, ingest: Callable[..., list[Any]]) -> None:
        scheduler = self.scheduler
        scheduler.ingest_requests = ingest
        scheduler.gracefully_exit = False
        scheduler._war_barrier_enabled = False
        scheduler.schedule_stream.synchronize = lambda: None
        scheduler.metrics_reporter.start_scheduler_time_accounting()
        loop = scheduler.event_loop_overlap if scheduler.enable_overlap else scheduler.event_loop_normal
        loop()

    def check_whole(self) -> None:
        """Nothing was lost: SGLang's own checks at each idle have raised nothing, and KV is free."""
        scheduler = self.scheduler
        free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
        assert free == scheduler.max_total_num_tokens
        assert scheduler.req_to_token_pool.available_size() == scheduler.req_to_token_pool.size


def _one_runtime() -> None:
    """SGLang allows one scheduler a process; a second shares the groups of the first."""
    schedulers.bootstrap.init_parallel_runtime = lambda **_: None
