"""Which SGLang is installed, and what of it we rely on: a release that changes it fails in one clear place.

Reads source; nothing of SGLang is imported: it takes half a minute, and fails without its kernels.
"""

from __future__ import annotations

import ast
from pathlib import Path

from headgate.live.files import Releases, package_folder, package_version

OLDEST, NEWEST = (0, 5, 22), (0, 5, 23)  # releases this package was tried with
RELEASES = Releases("SGLang", OLDEST, NEWEST, "set force: true")
SCHEDULER, POLICY, BATCH, PLUGINS, CACHE = (
    "srt/managers/scheduler.py",
    "srt/managers/schedule_policy.py",
    "srt/managers/schedule_batch.py",
    "srt/plugins/__init__.py",
    "srt/mem_cache/base_prefix_cache.py",
)
# Methods that we call or override, with the arguments that we pass or read by name.
METHODS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    SCHEDULER: {
        "Scheduler": {
            "__init__": ("server_args", "port_args"),
            "get_next_batch_to_run": ("running_batch", "last_batch"),
            "get_new_batch_prefill": ("running_batch",),
            "_should_defer_prefill": (),
            "update_running_batch": ("batch",),
            "get_prefill_adder_class": (),
            "process_batch_result": ("batch", "result"),
            "_add_request_to_queue": ("req", "is_retracted"),
            "abort_request": ("recv_req",),
            "continue_generation": ("recv_req",),
            "_release_aborted_request": ("req",),
            "get_num_allocatable_reqs": ("running_bs",),
            "_reqs_finishing_inflight": ("batch",),
            "release_host_resources": (),
        }
    },
    POLICY: {
        "PrefillAdder": {
            "_get_running_request_total_token_offset": ("req",),
            "_select_prefill_admission": ("req", "total_tokens"),
            "_request_slot_reserve_for_req": ("req", "extend_input_len"),
            "add_one_req": ("req",),
            "add_chunked_req": ("req",),
            "budget_state": (),
        },
        "SchedulePolicy": {"calc_priority": ("waiting_queue",), "shortest_prefill_chunk_limit": ()},
    },
    BATCH: {
        "ScheduleBatch": {
            "release_req": ("idx",),
            "filter_batch": ("keep_indices",),
            "new_tokens_required_next_decode": ("selected_indices",),
        }
    },
    CACHE: {"BasePrefixCache": {"match_prefix": ("params",), "evictable_size": (), "lock": (), "unlock": ()}},
}
# Names that a function must still read or call for our values to have an effect.
READS = {
    (SCHEDULER, "get_next_batch_to_run"): (
        "_should_defer_prefill", "get_new_batch_prefill", "update_running_batch", "chunked_req",
    ),
    (SCHEDULER, "_get_new_batch_prefill_raw"): (
        "waiting_queue", "calc_priority", "chunked_prefill_size", "is_mixed_chunk", "get_prefill_adder_class",
        "batch_is_full", "shortest_prefill_chunk_limit", "min_free_slots_delayer", "decoding_reqs",
        "enable_priority_preemption",
    ),
    (SCHEDULER, "run_scheduler_process"): ("load_plugins", "Scheduler"),
    (SCHEDULER, "event_loop_overlap"): ("result_queue", "get_next_batch_to_run", "process_batch_result"),
    (POLICY, "_select_prefill_admission"): ("exact_chunk_fill",),
    (PLUGINS, "load_plugins"): ("GENERAL_PLUGINS_GROUP",),
}  # fmt: skip
# Names of which each file must speak.
WORDS = {
    SCHEDULER: ("_make_abort_req", "beam_coordinator", "grammar_manager", "truncation_align_size"),
    BATCH: (
        "full_untruncated_fill_ids",
        "extend_end",
        "prefix_len",
        "extend_lens",
        "_compute_max_prefix_len",
    ),
    POLICY: ("CLIP_MAX_NEW_TOKENS", "per_req_token_overhead", "memory_budget"),
    PLUGINS: ("sglang.srt.plugins",),
    CACHE: ("MatchPrefixParams", "device_prefix_len", "last_device_node"),
}


def home() -> Path | None:
    return package_folder("sglang")


def installed(folder: Path | None = None) -> str | None:
    folder = folder or home()
    return None if folder is None else package_version("sglang", folder)


def problem(folder: Path | None = None) -> str | None:
    """Why the installed SGLang cannot be used, in one line that names the seams and the remedy."""
    folder = folder or home()
    if folder is None:
        return "SGLang is not installed here; install it into the environment of headgate"
    return RELEASES.problem(installed(folder) or "", faults(folder))


def faults(folder: Path) -> list[str]:
    """Every name we rely on that this SGLang lacks; empty when all is well."""
    texts = {name: folder / name for name in (SCHEDULER, POLICY, BATCH, PLUGINS, CACHE)}
    missing = [f"no {name}" for name, path in texts.items() if not path.is_file()]
    if missing:
        return missing
    sources = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    lacking: list[str] = []
    for file, classes in METHODS.items():
        kinds = {node.name: node for node in ast.walk(trees[file]) if isinstance(node, ast.ClassDef)}
        for name, methods in classes.items():
            lacking += _methods(name, kinds.get(name), methods)
    for (file, function), names in READS.items():
        node = next((n for n in ast.walk(trees[file]) if getattr(n, "name", "") == function), None)
        text = ast.unparse(node) if node is not None else ""
        lacking += [f"{function} no longer reads {name}" for name in names if name not in text]
    for file, words in WORDS.items():
        lacking += [f"{file} has no {word}" for word in words if word not in sources[file]]
    return lacking


def _methods(name: str, kind: ast.ClassDef | None, methods: dict[str, tuple[str, ...]]) -> list[str]:
    if kind is None:
        return [f"no class {name}"]
    has = {node.name: node.args for node in kind.body if isinstance(node, ast.FunctionDef)}
    lacking = []
    for method, wanted in methods.items():
        if method not in has:
            lacking.append(f"{name} lacks {method}")
            continue
        arguments = {argument.arg for argument in (*has[method].args, *has[method].kwonlyargs)}
        lacking += [f"{name}.{method} lacks the argument {word}" for word in wanted if word not in arguments]
    return lacking
