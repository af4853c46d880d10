"""In vLLM's front end: what its engines count, on /metrics, where nothing was set up for that."""

from __future__ import annotations

from headgate.live.engine.process import show_left_metrics


def install() -> None:
    """VLLM calls it in each of its processes, as one of its plug-ins (`vllm.general_plugins`)."""
    show_left_metrics()
