"""An OpenAI-compatible vLLM without a GPU: the simulator's engine on a wall clock."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.live.emulate.api import answer, chat_answer
    from headgate.live.emulate.server import Emulators, emulated

HOMES = {"answer": "api", "chat_answer": "api", "Emulators": "server", "emulated": "server"}
__all__ = ["Emulators", "answer", "chat_answer", "emulated"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the command line knows the options without a web server."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
