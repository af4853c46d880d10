"""A short run at the rate a plan found: how much of its step time lies outside what the card measured."""

from __future__ import annotations

from headgate.experiment.coverage import warning
from headgate.experiment.run import Prepared, carry_out
from headgate.experiment.settings import Experiment
from headgate.methods.make import split_name

OTHER_LOADS = ("scale_rate", "clients", "arrivals", "burstiness", "engines")
MIXED = "mixed"  # what plans without a policy of their own are probed with
REQUESTS = 500  # enough to see long prompts, few enough to take no time


def outside_said(settings: Experiment, policy: str, rate: float) -> str:
    """One sentence where it is a good part of it, else ""; of one engine, without promises."""
    if not rate > 0:
        return ""
    load = dict.fromkeys(OTHER_LOADS) | {"rate": rate, "all_at_once": False, "stages": ()}
    words = settings.model_copy(update={**load, "requests": None if settings.trace else REQUESTS})
    prepared = Prepared(words)
    prepared.keep_first(REQUESTS)
    name, values = split_name(policy)
    said = warning(carry_out(prepared, name, {**words.set, **values}, label=policy))
    return f"Not measured: {said}." if said else ""
