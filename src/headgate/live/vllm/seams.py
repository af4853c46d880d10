"""Which vLLM is installed, and what of it we rely on: a release that changes it fails in one clear place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from headgate.live.files import Releases, package_folder, package_version

OLDEST, NEWEST = (0, 26), (0, 33)  # releases this package was tried with
RELEASES = Releases("vLLM", OLDEST, NEWEST, "pass --force (force: true)")
MODULES = {
    "scheduler": "vllm.v1.core.sched.scheduler",
    "async": "vllm.v1.core.sched.async_scheduler",
    "queues": "vllm.v1.core.sched.request_queue",
    "output": "vllm.v1.core.sched.output",
    "request": "vllm.v1.request",
    "caches": "vllm.v1.core.kv_cache_coordinator",
    "interface": "vllm.v1.core.sched.interface",
}
# Methods we call or override, with the arguments we pass by position or read by name.
METHODS = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "add_request": ("request",),
    "_preempt_request": ("request", "timestamp"),
    "_free_request": ("request",),
    "_handle_stopped_request": ("request",),
    "_is_blocked_waiting_status": ("status",),
    "finish_requests": ("request_ids", "finished_status"),
    "reset_prefix_cache": ("reset_running_requests",),
}
# All that these may ask for: ours, which stand before them, pass on nothing else.
PASSED_ON = {
    "schedule": ("self", "throttle_prefills"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "add_request": ("self", "request"),
    "_handle_stopped_request": ("self", "request"),
}
# Attributes its constructor must set.
SET_AT_START = (
    "requests", "running", "waiting", "policy", "lora_config", "vllm_config", "scheduler_config",
    "cache_config", "kv_cache_config", "kv_cache_manager", "block_size", "num_spec_tokens", "max_model_len",
    "max_num_running_reqs", "max_num_scheduled_tokens", "current_step", "prefill_capacity_bound",
    "num_waiting_for_streaming_input", "_pause_state",
)  # fmt: skip
PROMOTE = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")  # one of them
QUEUE = (
    "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests",
    "remove_request", "remove_requests", "__bool__", "__len__", "__iter__",
)  # fmt: skip
# Attributes `schedule` must read for our knobs to work.
READ_BY_SCHEDULE = (
    "current_step", "next_decode_eligible_step", "max_num_scheduled_tokens", "running", "waiting",
    "long_prefill_token_threshold", "_pause_state", "prefill_capacity_bound",
    "num_waiting_for_streaming_input",
)  # fmt: skip
REQUEST = (
    "num_computed_tokens", "is_prefill_chunk", "next_decode_eligible_step", "lora_request",
    "max_tokens", "priority", "arrival_time", "status", "block_hashes", "num_preemptions", "spec_token_ids",
    "num_output_placeholders", "num_prompt_tokens",
)  # fmt: skip
MEMBERS = {
    ("interface", "PauseState"): ("UNPAUSED", "PAUSED_ALL"),
    ("request", "RequestStatus"): (
        "WAITING", "PREEMPTED", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_IGNORED",
        "FINISHED_REPETITION",
    ),
}  # fmt: skip
LOOKUP = ("block_hashes", "max_cache_hit_length")  # arguments of the prefix cache's look-up
OUTPUT = {
    "SchedulerOutput": (
        "num_scheduled_tokens",
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "scheduled_spec_decode_tokens",
    ),
    "CachedRequestData": ("resumed_req_ids",),
    "NewRequestData": ("req_id",),
}


def installed() -> str | None:
    folder = package_folder("vllm")
    return None if folder is None else package_version("vllm", folder)


def version() -> str:
    return str(import_module("vllm.version").__version__)


def engine_number(parallel: Any) -> int:
    """`data_parallel_rank` is reset to 0 in models without experts; `data_parallel_index` stays."""
    number = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if number is None else number)


def lockstep(config: Any) -> int:
    """All data-parallel ranks where experts are spread over them: idle ones run dummy batches."""
    ranks = int(getattr(config.parallel_config, "data_parallel_size", 1) or 1)
    experts = getattr(config.parallel_config, "is_moe_model", None)
    if experts is None:
        experts = getattr(config.model_config, "is_moe", False)
    return ranks if experts else 1


def _unsaid(kind: Any, owner: str, names: tuple[str, ...]) -> list[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        source = ""
    return [name for name in names if not re.search(rf"{owner}\.{name}\b", source)]


def faults() -> list[str]:
    try:
        modules = {name: import_module(path) for name, path in MODULES.items()}
    except ImportError as error:
        return [f"cannot import {error.name}: {error}"]
    lacking: list[str] = []
    base = getattr(modules["scheduler"], "Scheduler", None)
    if base is None or not hasattr(modules["async"], "AsyncScheduler"):
        return ["no Scheduler or no AsyncScheduler class"]
    lacking += _methods(base)
    unset = [name for name in _unsaid(base.__init__, "self", SET_AT_START) if not hasattr(base, name)]
    lacking += [f"Scheduler no longer has {name}" for name in unset]
    unread = _unsaid(getattr(base, "schedule", None), "", READ_BY_SCHEDULE)
    lacking += [f"Scheduler.schedule no longer reads {name}" for name in unread]
    queue = getattr(modules["queues"], "RequestQueue", None)
    lacking += [f"RequestQueue lacks {name}" for name in QUEUE if not hasattr(queue, name)]
    lacking += [
        f"RequestQueue asks for {name}, which our queue lacks"
        for name in sorted(getattr(queue, "__abstractmethods__", ()))
        if name not in QUEUE
    ]
    lookup = getattr(getattr(modules["caches"], "KVCacheCoordinator", None), "find_longest_cache_hit", None)
    if lookup is None or list(inspect.signature(lookup).parameters)[1:] != list(LOOKUP):
        lacking.append(f"KVCacheCoordinator.find_longest_cache_hit does not take {', '.join(LOOKUP)}")
    unset = _unsaid(getattr(modules["request"], "Request", None), "self", REQUEST)
    lacking += [f"Request lacks {name}" for name in unset]
    for (module, name), members in MEMBERS.items():
        kind = getattr(modules[module], name, None)
        lacking += [f"{name} lacks {member}" for member in members if not hasattr(kind, member)]
    for name, fields in OUTPUT.items():
        kind = getattr(modules["output"], name, None)
        known = getattr(kind, "__annotations__", {})
        lacking += [f"{name} lacks {field}" for field in fields if field not in known]
    return lacking


def _methods(base: type) -> Iterator[str]:
    for name, wanted in METHODS.items():
        method = getattr(base, name, None)
        if method is None:
            yield f"Scheduler lacks {name}"
            continue
        has = inspect.signature(method).parameters
        for argument in wanted:
            if argument not in has:
                yield f"Scheduler.{name} lacks the argument {argument}"
        known = PASSED_ON.get(name, has)
        yield from (f"Scheduler.{name} asks for {argument}" for argument in has if argument not in known)
    if not any(hasattr(base, name) for name in PROMOTE):
        yield f"Scheduler has none of {', '.join(PROMOTE)}"
