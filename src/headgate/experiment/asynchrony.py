"""How much of an asynchronous engine a simulation has: all of it, or a part, and which."""

from __future__ import annotations

from headgate.cost.card import load_card
from headgate.experiment.settings import Experiment

IN_FLEETS = (
    "--asynchronous in a fleet is a part of it: arrivals and seats are known a step late, but tokens are "
    "seen and KV comes free at once; one engine without --engines has all of it"
)
WITHOUT_HOST = (
    "--asynchronous: card {} does not say how long the host takes, so tokens are seen as soon as the GPU has "
    "them; the cal-... cards and those of headgate calibrate say it"
)


def partly(settings: Experiment, fleet: bool) -> list[str]:
    """A note where `--asynchronous` is less than what the engine does."""
    if not settings.asynchronous:
        return []
    if fleet:
        return [IN_FLEETS]
    return [] if load_card(settings.card).host else [WITHOUT_HOST.format(settings.card)]
