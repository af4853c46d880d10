"""The scheduler plug-in for SGLang."""

from __future__ import annotations

from headgate.live.engine.process import EngineNames

SGLANG = EngineNames(
    name="sglang",
    title="SGLang",
    slots="max_running_requests",
    budget="chunked_prefill_size",
    longest="context_length",
    plug_ins="SGLang's plug-ins (SGLANG_PLUGINS) and SGLang runs with --enable-metrics",
    priorities="--enable-priority-scheduling",
)
LOADED = "HEADGATE_LOADED"  # the environment variable that names a file; it is there when our scheduler runs
