"""Whether a simulated engine composes its steps ahead, as vLLM's does, and how much of that a run has."""

from __future__ import annotations

from headgate.cost.card import Card
from headgate.cost.laws.host import HostTerms
from headgate.experiment.settings import Experiment

IN_FLEETS = (
    "--asynchronous in a fleet is a part of it: arrivals and seats are known a step late, but tokens are "
    "seen and KV comes free at once; one engine without --engines has all of it"
)
WITHOUT_HOST = (
    "--asynchronous: card {} does not say how long the host takes, so tokens are seen as soon as the GPU has "
    "them; the cal-... cards and those of headgate calibrate say it"
)


def composes_ahead(asked: bool | None, host: HostTerms | None) -> bool:
    """As asked; where nobody says, as vLLM does if the card knows its host, for only then is it measured."""
    return host is not None if asked is None else asked


def engine_kind(asynchronous: bool, fleet: bool) -> str:
    """What the first lines of an answer call the engine."""
    if not asynchronous:
        return "synchronous engine"
    return "engines asynchronous in part" if fleet else "asynchronous engine"


def partly(settings: Experiment, card: Card, fleet: bool) -> list[str]:
    """A note where an asynchronous engine was asked for and the run has less than all of it."""
    if not settings.asynchronous:
        return []
    if fleet:
        return [IN_FLEETS]
    return [] if card.host else [WITHOUT_HOST.format(card.name)]
