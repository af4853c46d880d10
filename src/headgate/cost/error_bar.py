"""How far a card that was not measured may be off, as commands print it."""

from __future__ import annotations

from headgate.cost.card import Card

NARROW = "a minute of traffic narrows it: headgate calibrate --from-bench FILE --like CARD"


def error_bar(card: Card) -> list[str]:
    """One line for a derived card, none for others."""
    found = card.expected_error
    if found is None:
        return []
    kinds = (("decodes", found.decode), ("prompts", found.prefill), ("mixed", found.mixed))
    steps = ", ".join(f"{name} {_percent(bar)}" for name, bar in kinds)
    return [
        f"card {card.name} is derived, not measured: expect step times within {steps}, and throughput within "
        f"{_percent(found.throughput)}; {NARROW}"
    ]


def throughput_error(card: Card) -> float:
    """Relative; 0 for a card that was measured."""
    return card.expected_error.throughput if card.expected_error else 0.0


def _percent(bar: float) -> str:
    return f"±{100 * bar:.0f} %"
