"""Who watches a live engine: metrics with the line in the log, and the trace where one was asked for."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headgate.core.version import VERSION
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.trace import Trace
from headgate.live.vllm.fields import LOG, Settings

Watcher = Metrics | Trace


class Facts(NamedTuple):
    """What the engine is."""

    model: str
    vllm: str  # its version
    kv_tokens: int
    limits: Mapping[str, int]  # as vLLM names them
    engine: int = 0  # which of several engines side by side


def engine_number(parallel: Any) -> int:
    """Which of several data-parallel engines this is.

    vLLM resets `data_parallel_rank` to 0 in engines of models without experts; `data_parallel_index` stays.
    """
    number = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if number is None else number)


def observers(settings: Settings, parameters: Mapping[str, Any], facts: Facts) -> list[Watcher]:
    """The observers the settings ask for. A trace that cannot be written stops the start, as any setting."""
    about = {"policy": settings.policy, "card": settings.card or "none", "model": facts.model}
    found: list[Watcher] = []
    if settings.trace:
        trace = Trace(settings.trace, header(settings, parameters, facts))
        LOG.info("headgate: trace in %s", trace.path)
        found.append(trace)
    return [Metrics(settings, about, facts.kv_tokens, facts.engine), *found]


def header(settings: Settings, parameters: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """The first line of a trace: how it came about."""
    return {
        "headgate": VERSION,
        "driver": "vllm",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "policy": settings.policy,
        "parameters": dict(parameters),
        "card": settings.card,
        "model": facts.model,
        "engine": dict(facts.limits),
        "replica": facts.engine,
        "kv_tokens": facts.kv_tokens,
        "versions": {"python": platform.python_version(), "vllm": facts.vllm},
    }


def connect(watchers: Sequence[Watcher], counts: Mapping[str, int]) -> None:
    """The driver's own counts of steps."""
    for watcher in watchers:
        if isinstance(watcher, Metrics):
            watcher.counts = counts


def renewed(watchers: Sequence[Watcher], policy: str, parameters: Mapping[str, Any], now: float) -> None:
    """Another policy has taken over."""
    for watcher in watchers:
        watcher.renewed(policy, parameters, now)


def close(watchers: Sequence[Watcher]) -> None:
    """The engine ends: show and write what is left."""
    for watcher in watchers:
        watcher.close()
