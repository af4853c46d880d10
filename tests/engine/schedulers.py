"""A real vLLM scheduler without a model: plain, or headgate's through its factory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from vllm.config import CacheConfig, KVTransferConfig, LoRAConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}
FACTORY = "headgate.vllm.scheduler"
for noisy in ("platforms.cpu", "config.scheduler", "v1.core.block_pool"):  # sizes no server would have
    logging.getLogger(f"vllm.{noisy}").setLevel(logging.ERROR)


class EngineShape(NamedTuple):
    """What a scheduler is told at its start."""

    block: int = 16
    blocks: int = 64  # those requests can have; vLLM keeps one more as its null block
    running: int = 16  # max_num_seqs
    budget: int = 256  # max_num_batched_tokens
    longest: int = 1024  # max_model_len
    chunked: bool = True
    caching: bool = False  # prefix caching
    priorities: bool = False
    ahead: bool = False  # asynchronous scheduling: step n+1 is planned before the output of step n
    runner: int = 1  # which model runner the output is meant for
    adapters: int = 0  # max_loras; 0: no LoRA
    drafts: int = 0  # speculative tokens per step
    drafter: bool = False  # a model makes them, which takes slots and KV of its own; else prompt look-up
    watermark: float = 0.0
    connector: bool = False  # the mock KV connector of connector.py
    flags: tuple[tuple[str, Any], ...] = ()  # others of vLLM's scheduler, as its configuration calls them


class NoGrammars:
    """Stands for the structured output manager: every token is as good as any other."""

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        return True

    def should_advance(self, request: Request, **words: Any) -> bool:  # up to vLLM 0.29
        return False

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        return tokens


@cache
def model_folder() -> str:
    """A folder with nothing but a configuration; no weights are ever read."""
    folder = mkdtemp(prefix="headgate-tiny-")
    Path(folder, "config.json").write_text(json.dumps(TINY_MODEL))
    return folder


def config(shape: EngineShape, headgate: Mapping[str, Any] | None = None) -> VllmConfig:
    """vLLM's configuration of that shape."""
    cache_config = CacheConfig(block_size=shape.block, enable_prefix_caching=shape.caching)
    cache_config.num_gpu_blocks = shape.blocks + 1
    made = VllmConfig(
        model_config=ModelConfig(
            model=model_folder(), skip_tokenizer_init=True, max_model_len=shape.longest, dtype="float32"
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=shape.longest,
            is_encoder_decoder=False,
            max_num_seqs=shape.running,
            max_num_batched_tokens=shape.budget,
            enable_chunked_prefill=shape.chunked,
            policy="priority" if shape.priorities else "fcfs",
            watermark=shape.watermark,
            scheduler_cls=FACTORY if headgate is not None else None,
            disable_hybrid_kv_cache_manager=True if shape.connector else None,
            **dict(shape.flags),
        ),
        cache_config=cache_config,
        lora_config=LoRAConfig(max_loras=shape.adapters) if shape.adapters else None,
        kv_transfer_config=_transfer() if shape.connector else None,
        additional_config={"headgate": dict(headgate)} if headgate is not None else {},
    )
    if shape.drafts:
        made.speculative_config = _drafting(made, shape)
    # The CPU platform switches it off and chooses its own sizes; there is no device here to mind.
    made.scheduler_config.async_scheduling = shape.ahead
    made.scheduler_config.enable_chunked_prefill = shape.chunked
    made.scheduler_config.max_num_batched_tokens = shape.budget
    made.cache_config.enable_prefix_caching = shape.caching
    return made


def scheduler(shape: EngineShape, headgate: Mapping[str, Any] | None = None) -> Scheduler:
    """Plain vLLM's scheduler, or with `headgate` (its options) ours, made as EngineCore makes it."""
    made = config(shape, headgate)
    attention = FullAttentionSpec(block_size=shape.block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=shape.blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    with _model_runner(shape.runner):
        built = made.scheduler_config.get_scheduler_cls()(
            vllm_config=made,
            kv_cache_config=kv,
            structured_output_manager=NoGrammars(),
            include_finished_set=False,
            log_stats=True,
            block_size=shape.block,
            hash_block_size=shape.block,
        )
    if plug_in := getattr(built, "_headgate_plug_in", None):
        for watcher in plug_in.watchers:  # a thread each, and tests make thousands
            watcher.close()
    return built


def request(
    name: str,
    prompt: list[int],
    limit: int,
    block: int = 16,
    *,
    stops: tuple[int, ...] = (),
    arrival: float = 0.0,
    priority: int = 0,
    adapter: int = 0,
    extra: Mapping[str, Any] | None = None,
    resumable: bool = False,
) -> Request:
    """A request as the engine core hands it to the scheduler."""
    _begin_hashes()
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=limit,
            stop_token_ids=list(stops),
            extra_args=dict(extra or {}) or None,
        ),
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
        lora_request=LoRARequest(f"adapter-{adapter}", adapter, f"/nowhere/{adapter}") if adapter else None,
        block_hasher=get_request_block_hasher(block, sha256),
        resumable=resumable,
    )


@cache
def _begin_hashes() -> None:
    """Once: vLLM 0.26 draws another root each time, and no request would find the blocks of another."""
    init_none_hash(sha256)


@cache
def reset_loses_drafts() -> bool:
    """VLLM 0.26: when its cache is reset while steps with drafts are in flight, it drops one later output for
    each draft. Only where requests that run are reset, too; `test_oracle` shows it on plain vLLM.
    """
    return hasattr(request("r", [0], 1), "async_tokens_to_discard")


def free_blocks(made: Scheduler) -> int:
    """Blocks nobody holds."""
    return int(made.kv_cache_manager.block_pool.get_num_free_blocks())


@contextmanager
def _model_runner(version: int) -> Iterator[None]:
    """vLLM asks the environment which model runner there is."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = str(int(version == 2))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _transfer() -> KVTransferConfig:
    return KVTransferConfig(kv_connector="RemoteKv", kv_connector_module_path="connector", kv_role="kv_both")


def _drafting(made: VllmConfig, shape: EngineShape) -> Any:
    """Prompt look-up needs no second model; of a drafter the scheduler only reads how much room it takes."""
    from vllm.config import SpeculativeConfig

    how = {"method": "ngram", "prompt_lookup_max": 2}
    if shape.drafter:
        how = {"method": "draft_model", "model": model_folder()}
    return SpeculativeConfig(
        num_speculative_tokens=shape.drafts,
        target_model_config=made.model_config,
        target_parallel_config=made.parallel_config,
        **how,
    )
