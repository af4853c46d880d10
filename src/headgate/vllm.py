"""`--scheduler-cls headgate.vllm.scheduler`: vLLM's own scheduler with a headgate policy inside."""

from __future__ import annotations

from typing import Any


def scheduler(**given: Any) -> Any:
    """What vLLM calls in place of its scheduler class; `given` are the arguments of that class."""
    try:
        from headgate.live.vllm.factory import make_scheduler
    except (ImportError, AttributeError):
        _refuse()
        raise
    return make_scheduler(given)


def _refuse() -> None:
    """A module or a name that we import from vLLM is gone: one line that says so."""
    from headgate.core.errors import InputError
    from headgate.live.vllm.seams import faults, refusal, version

    changes = faults()
    if changes:
        raise InputError(refusal(version(), changes))


__all__ = ["scheduler"]
