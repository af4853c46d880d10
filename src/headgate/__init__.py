"""headgate decides when the prefill and decode work of an LLM run on a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headgate.core import version

__version__ = version.VERSION

if TYPE_CHECKING:
    from headgate.core.plan import ALL, NONE, Plan, Until
    from headgate.core.policy import BatchPolicy
    from headgate.core.view import View
    from headgate.experiment.library import card_engine, simulate
    from headgate.methods.names import Exclusive, Mixed, PrefillFirst, RequestLevel
    from headgate.record.tables import Run
    from headgate.stats.metrics import summarise
    from headgate.workloads import Workload, generate, read_trace

_HOMES = {
    "headgate.core.plan": ("ALL", "NONE", "Plan", "Until"),
    "headgate.core.policy": ("BatchPolicy",),
    "headgate.core.view": ("View",),
    "headgate.methods.names": ("Exclusive", "Mixed", "PrefillFirst", "RequestLevel"),
    "headgate.stats.metrics": ("summarise",),
    "headgate.record.tables": ("Run",),
    "headgate.experiment.library": ("card_engine", "simulate"),
    "headgate.workloads": ("Workload", "generate", "read_trace"),
}
__all__ = [
    "ALL",
    "NONE",
    "BatchPolicy",
    "Exclusive",
    "Mixed",
    "Plan",
    "PrefillFirst",
    "RequestLevel",
    "Run",
    "Until",
    "View",
    "Workload",
    "__version__",
    "card_engine",
    "generate",
    "read_trace",
    "simulate",
    "summarise",
]


def __getattr__(name: str) -> Any:
    """Public names load what they need when they are first used, so `import headgate` costs nothing."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'headgate' has no attribute {name!r}")
