"""How far a card that was not measured may be off, as commands print it."""

from __future__ import annotations

from headgate.cost.card import DERIVED_CARD, Card

NARROW = "a minute of traffic narrows it: headgate calibrate --from-bench FILE --like CARD"
ASYNCHRONOUS = " (of an engine with asynchronous scheduling; without it, add :sync to the card's name)"


def error_bar(card: Card) -> list[str]:
    """One line for a derived card, none for others."""
    found = card.expected_error
    if found is None:
        return []
    kinds = (("decodes", found.decode), ("prompts", found.prefill), ("mixed", found.mixed))
    steps = ", ".join(f"{name} {_percent(bar)}" for name, bar in kinds)
    memory = f", KV memory within ±{100 * found.kv:.2g} %" if found.kv else ""
    return [
        f"card {card.name} is derived, not measured: expect step times within {steps}, throughput within "
        f"{_percent(found.throughput)}{memory}{_engine(card)}; {NARROW}"
    ]


def throughput_error(card: Card) -> float:
    """Relative; 0 for a card that was measured."""
    return card.expected_error.throughput if card.expected_error else 0.0


def _engine(card: Card) -> str:
    """Which engine the bars are of, where the name can say another."""
    return ASYNCHRONOUS if card.host and card.name.startswith(DERIVED_CARD) else ""


def _percent(bar: float) -> str:
    return f"±{100 * bar:.0f} %"
