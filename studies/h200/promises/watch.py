"""What the host does at each step: `--watch` of `studies.h200.promises`.

The model runs in the scheduler's process, so the scheduler can time its launches. A line goes to watch.jsonl
of the server's home for every launch that took long, asked the driver for memory, or had more requests than
any before it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

LONG = 0.012  # seconds; a launch from a CUDA graph takes a few milliseconds
FILE = "watch.jsonl"
COUNTS = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")


def scheduler(**given: Any) -> Any:
    """As `headgate.vllm.scheduler`."""
    from headgate.vllm import scheduler as make

    watch = Watch((Path(os.environ["HEADGATE_CONFIG"]).parent / FILE).open("w", buffering=1))
    new = given["vllm_config"].use_v2_model_runner  # not for every model: Qwen3's experts have the older one
    module = "vllm.v1.worker.gpu.model_runner" if new else "vllm.v1.worker.gpu_model_runner"
    runner = import_module(module).GPUModelRunner
    runner.execute_model = watch.execute(runner.execute_model)
    runner.sample_tokens = watch.sample(runner.sample_tokens)
    return make(**given)


class Watch:
    """Launches of one model."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._most = 0
        self._step: dict[str, Any] = {}
        self._began = 0.0
        self._before = (0,) * len(COUNTS)

    def execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The layers."""

        def timed(runner: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(output)
            found = original(runner, output, *args, **kwargs)
            self._step["execute"] = time.monotonic() - self._began
            return found

        return timed

    def sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The head and the sampler."""

        def timed(runner: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            found = original(runner, *args, **kwargs)
            self._step["sample"] = time.monotonic() - began
            self._end()
            return found

        return timed

    def _begin(self, output: Any) -> None:
        self._before = _counts()
        requests, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        self._began = time.monotonic()
        self._step = {"at": round(self._began, 4), "requests": requests, "tokens": tokens}

    def _end(self) -> None:
        step, after = self._step, _counts()
        changed = {name: b - a for name, a, b in zip(COUNTS, self._before, after, strict=True) if b != a}
        record = step["requests"] > self._most
        if record or changed or max(step["execute"], step["sample"]) > LONG:
            self._most = max(self._most, step["requests"])
            self._file.write(json.dumps({**step, **changed, **({"record": True} if record else {})}) + "\n")


def _counts() -> tuple[int, ...]:
    import torch

    found = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return tuple(int(found[name]) for name in COUNTS)
