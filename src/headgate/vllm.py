"""`--scheduler-cls headgate.vllm.scheduler`: vLLM's own scheduler with a headgate policy inside."""

from __future__ import annotations

from typing import Any


def scheduler(**given: Any) -> Any:
    """What vLLM calls in place of its scheduler class; `given` are the arguments of that class."""
    try:
        from headgate.live.vllm.factory import make_scheduler
    except (ImportError, AttributeError):  # is a name that we import from vLLM gone? One line that says so
        from headgate.core.errors import InputError
        from headgate.live.vllm.seams import RELEASES, faults, version

        if changes := faults():
            raise InputError(RELEASES.problem(version(), changes))  # noqa: B904
        raise
    return make_scheduler(given)


__all__ = ["scheduler"]
