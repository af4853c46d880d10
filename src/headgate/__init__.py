"""headgate decides when the prefill and decode work of an LLM run on a GPU.

The public names, by what they are for. Everything else may change without notice.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if os.environ.get("HEADGATE_PURE", "") not in ("", "0"):  # before anything else is imported
    from headgate.pure import SourcesOnly

    sys.meta_path.insert(0, SourcesOnly)

from headgate.core import version

__version__ = version.VERSION

if TYPE_CHECKING:
    from headgate.core.errors import InputError, RunError
    from headgate.core.fleet import Fleet, Move, RoutePolicy, Routing, Stage
    from headgate.core.plan import ALL, NONE, Plan, Until
    from headgate.core.policy import BatchPolicy, Observer
    from headgate.core.request import Request, Slo
    from headgate.core.view import View
    from headgate.cost.card import load_card
    from headgate.cost.model import StepCost
    from headgate.experiment.library import (
        card_engine,
        compare,
        make_policy,
        make_router,
        simulate,
        simulate_fleet,
    )
    from headgate.methods.eb.exclusive import Exclusive
    from headgate.methods.eb.hybrid import ExclusivePlus
    from headgate.methods.mixed.mixed import Mixed
    from headgate.record.tables import Run
    from headgate.sim.engine.engine import Engine
    from headgate.stats.metrics import summarise
    from headgate.workloads import Kind, Share, Workload, arrival_process, generate, length_law, read_trace

_NAMES = {
    # a policy: what it reads, what it answers; a router, the same one level up
    "core.policy": "BatchPolicy Observer",
    "core.request": "Request Slo",
    "core.view": "View",
    "core.plan": "ALL NONE Plan Until",
    "core.fleet": "Fleet Move RoutePolicy Routing Stage",
    # policies that exist
    "methods.eb.exclusive": "Exclusive",
    "methods.eb.hybrid": "ExclusivePlus",
    "methods.mixed.mixed": "Mixed",
    # engines and what their steps take; requests; runs and their figures
    "sim.engine.engine": "Engine",
    "cost.model": "StepCost",
    "cost.card": "load_card",
    "workloads": "Kind Share Workload arrival_process generate length_law read_trace",
    "experiment.library": "card_engine compare make_policy make_router simulate simulate_fleet",
    "record.tables": "Run",
    "stats.metrics": "summarise",
    # what goes wrong: in the input, in a run
    "core.errors": "InputError RunError",
}
_HOMES = {name: f"headgate.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "ALL", "NONE", "BatchPolicy", "Engine", "Exclusive", "ExclusivePlus", "Fleet", "InputError", "Kind",
    "Mixed", "Move", "Observer", "Plan", "Request", "RoutePolicy", "Routing",
    "Run", "RunError", "Share", "Slo", "Stage", "StepCost", "Until", "View", "Workload", "__version__",
    "arrival_process", "card_engine", "compare", "generate", "length_law", "load_card", "make_policy",
    "make_router", "read_trace", "simulate", "simulate_fleet", "summarise",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load what they need when they are first used, so `import headgate` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headgate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
