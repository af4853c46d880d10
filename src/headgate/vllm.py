"""`--scheduler-cls headgate.vllm.scheduler`: vLLM's own scheduler with a headgate policy inside."""

from __future__ import annotations

from typing import Any


def scheduler(**given: Any) -> Any:
    """What vLLM calls in place of its scheduler class; `given` are the arguments of that class."""
    from headgate.live.vllm.factory import make_scheduler

    return make_scheduler(given)


__all__ = ["scheduler"]
