"""Requests that no engine of this size can serve: counted, named with the remedy, left out of promises."""

from __future__ import annotations

import numpy as np

from headgate.cost.card import load_card
from headgate.experiment.build import make_engine, make_workload, too_long
from headgate.experiment.settings import Experiment
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload


def servable(workload: Workload, engine: Engine) -> Workload:
    """The requests that fit; an error where there are none."""
    return (
        workload.subset(np.asarray(workload.prompt < engine.longest))
        if too_long(workload, engine)
        else workload
    )


def unservable_said(number: int, total: int, longest: int) -> str:
    """One sentence with the remedy, "" where all fit."""
    if not number:
        return ""
    return (
        f"Cannot be served: {number:,} of {total:,} requests ({100 * number / total:.3g} %) have prompts of "
        f"{longest:,} tokens or more, which is all that model length or KV allow. They are left out of every "
        "figure but their count; raise --model-len (vLLM: --max-model-len) or cut prompts with --cap-prompt."
    )


def unservable_in(settings: Experiment) -> str:
    """The same of the requests that settings describe, or of the whole trace that a plan draws from."""
    engine = make_engine(settings, load_card(settings.card))
    changed: dict[str, object] = {"requests": None} if settings.trace else {}
    if settings.turns and not settings.rate:
        changed["rate"] = 1.0  # conversations need times; lengths do not depend on them
    workload, _ = make_workload(settings.model_copy(update=changed))
    return unservable_said(too_long(workload, engine), len(workload), engine.longest)
