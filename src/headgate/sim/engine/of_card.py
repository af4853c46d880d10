"""An engine from a card, with the limits a user may change."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.cost.card import Card
from headgate.sim.engine.engine import Engine

DEFAULT_SLOTS = 256
DEFAULT_BUDGET = 8192


def engine_of_card(
    card: Card,
    slots: int | None = None,
    budget: int | None = None,
    kv_tokens: int | None = None,
    model_len: int | None = None,
    block: int | None = None,
) -> Engine:
    """The card's engine; what is left out is the card's or headgate's default."""
    slots = slots or min(DEFAULT_SLOTS, card.max_running, card.max_batch_tokens)
    if slots > card.max_running:
        raise InputError(
            f"slots={slots} is more than card {card.name} is meant for; choose at most {card.max_running}"
        )
    budget = budget or max(slots, min(DEFAULT_BUDGET, card.max_batch_tokens))
    if budget > card.max_batch_tokens:
        raise InputError(
            f"budget={budget} is more than card {card.name} is meant for; "
            f"choose at most {card.max_batch_tokens}"
        )
    length = model_len or card.max_model_len
    return Engine(
        card.cost, kv_tokens or card.kv_tokens, length, budget, slots, block or card.block
    ).checked()
