"""What an answer rests on, said in its first lines: card, engine, longest request, arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headgate.cost.card import Card, load_card, renamed
from headgate.cost.error_bar import throughput_error
from headgate.experiment.asynchrony import composes_ahead, engine_kind
from headgate.experiment.build import DEFAULT_CLIENTS, make_engine
from headgate.experiment.conflicts import at_once
from headgate.experiment.settings import Experiment

FORMULAS = "formulas of step times, no run"
CLOSED = f"{DEFAULT_CLIENTS} clients in a closed loop"
SATURATED = "a queue that never empties"


def arrivals_said(settings: Experiment, otherwise: str = CLOSED) -> str:
    """How requests come; `otherwise` where no setting says so."""
    if settings.stages:
        return "a load that changes from stage to stage"
    if at_once(settings):
        return "all requests there at the start"
    if settings.clients:
        return f"{settings.clients:,} clients in a closed loop"
    if settings.rate:
        name = settings.arrivals or ("gamma" if settings.burstiness else "poisson")
        law = {"poisson": "Poisson", "constant": "evenly spaced"}.get(name, f"{name}")
        return f"{law} arrivals, {settings.rate:,.4g} requests/s"
    if settings.trace:
        faster = f", {settings.scale_rate:g} times as fast" if settings.scale_rate else ""
        return f"arrivals as recorded{faster}"
    return otherwise


def tried_arrivals(as_recorded: bool, rate: float | None = None) -> str:
    """How requests come in a search: at one rate, or at the rates it tries."""
    law = "arrivals as recorded, faster or slower" if as_recorded else "Poisson arrivals"
    return f"{law}, {'at the rates tried' if rate is None else f'{rate:,.4g} requests/s'}"


def assumed(
    settings: Experiment, arrivals: str, *, fleet: bool = False, run: bool = True, limits: bool = True
) -> str:
    """One line for a plan. Without `run` nothing is simulated; without `limits` they are its answer."""
    card = load_card(settings.card)
    engine = make_engine(settings, card)
    kind = engine_kind(composes_ahead(settings.asynchronous, card.host), fleet) if run else FORMULAS
    return said([card_said(card)], [kind], [engine.limits], [arrivals], limits, renamed(settings.card))


def card_said(card: Card) -> str:
    """Its name, its model and its GPU, and how far off it may be where it was not measured."""
    off = f"; derived, throughput ±{100 * throughput_error(card):.0f} %" if card.expected_error else ""
    return f"{card.name} ({card.model} on {card.gpu}{off})"


def said(
    cards: Iterable[str],
    kinds: Iterable[str],
    engines: Iterable[Mapping[str, Any]],
    arrivals: Iterable[str],
    limits: bool = True,
    renaming: str = "",
) -> str:
    """The line, with every value that occurs where runs differ."""
    each = list(engines)
    names = {"running": "seats", "batch_tokens": "tokens a step", "max_model_len": "tokens a request at most"}
    parts = [_either(cards), _either(kinds)]
    for key, word in names.items():
        if limits or key == "max_model_len":
            value = _either(f"{one[key]:,}" for one in each if isinstance(one.get(key), int))
            parts.append(f"{value} {word}" if value else "")
    shown = ", ".join(filter(None, parts))
    if not shown:
        return ""
    come = _either(arrivals)
    return f"Card {shown}{f'; {come}' if come else ''}.{f' Note: {renaming}.' if renaming else ''}"


def _either(values: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(value for value in values if value))
