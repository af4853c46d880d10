"""A vLLM engine in this process, to be measured: how it is started, and what a card says of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headgate.core.errors import InputError
from headgate.cost.fit.steps import About
from headgate.cost.likeness import shape_of

SCHEDULER = "headgate.vllm.scheduler"
SETTINGS = {"policy": "vllm", "watchdog": "1h", "metrics": False}  # the probe takes over when all is ready


@dataclass(frozen=True)
class WantedEngine:
    """What engine to start. Everything that changes step times should be as it will be when serving."""

    model: str  # a name or folder vLLM knows, or a config.json whose weights are then made up
    slots: int  # requests that may run at once (`max_num_seqs`)
    budget: int  # tokens in one step (`max_num_batched_tokens`)
    longest: int  # tokens of one request (`max_model_len`)
    dummy: bool = False  # make weights up; the times of dense models do not depend on them
    graphs: int | None = None  # largest batch with a CUDA graph; None: as vLLM decides
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's `LLM`


def start(wanted: WantedEngine) -> Any:
    """The engine, with our scheduler inside."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be within reach
    model, dummy = wanted.model, wanted.dummy
    if Path(model).name == "config.json" and Path(model).is_file():
        model, dummy = str(Path(model).parent), True
    words: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if dummy else "auto",
        "max_model_len": wanted.longest,
        "max_num_seqs": wanted.slots,
        "max_num_batched_tokens": wanted.budget,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
        "scheduler_cls": SCHEDULER,
        "additional_config": {"headgate": dict(SETTINGS)},
    }
    if wanted.graphs is not None:
        words["compilation_config"] = {"max_cudagraph_capture_size": wanted.graphs}
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(f"vLLM cannot be imported ({error}); install it, 0.26 to 0.33") from None
    return LLM(**{**words, **wanted.more})


def core_of(llm: Any) -> Any:
    """The engine core of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core


def about(llm: Any, wanted: WantedEngine, name: str, decodes: int) -> About:
    """What the card is to say of the engine; `decodes` is the largest batch that is measured."""
    import torch
    import vllm

    config, scheduler = llm.llm_engine.vllm_config, core_of(llm).scheduler
    graphs = config.compilation_config.max_cudagraph_capture_size
    settings = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "weights": "made up" if config.load_config.load_format == "dummy" else "loaded",
        "asynchronous scheduling": str(bool(config.scheduler_config.async_scheduling)),
        "V2 model runner": str(bool(getattr(config, "use_v2_model_runner", False))),
        "largest CUDA graph": "none" if config.model_config.enforce_eager else str(graphs),
        "prefix caching": str(bool(config.cache_config.enable_prefix_caching)),
        "tensor parallel": str(config.parallel_config.tensor_parallel_size),
        "quantization": str(config.model_config.quantization),
    }
    return About(
        name=name,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        model=str(wanted.more.get("served_model_name", Path(wanted.model).name)),
        kv_tokens=int(scheduler._headgate.ledger.kv_total),
        max_model_len=wanted.longest,
        max_running=decodes,
        max_batch_tokens=wanted.budget,
        block=int(scheduler.block_size),
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        settings=settings,
        model_shape=shape_of(config.model_config.hf_text_config),
        date=datetime.now(UTC).date().isoformat(),
        source="headgate calibrate",
    )
