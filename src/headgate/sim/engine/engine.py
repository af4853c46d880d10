"""What a virtual engine is made of: a step cost and limits, from a card where a user changes some."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.cost.card import Card
from headgate.cost.laws.speculation import Acceptance
from headgate.cost.model import StepCost

NEWEST, SHORTEST = "newest", "shortest"  # whose KV goes first where decodes find none, as in vLLM and SGLang


class Speculation(NamedTuple):
    """How an engine speculates; what the drafts take is in its step cost.

    `ahead` are KV tokens that are kept for each decode beyond those it computes. Classes that are not named
    in `classes` have the acceptance `accept`.
    """

    drafts: int
    accept: Acceptance
    ahead: int = 0
    classes: tuple[tuple[str, Acceptance], ...] = ()

    def of(self, kind: str) -> Acceptance:
        """The acceptance of a class."""
        return dict(self.classes).get(kind, self.accept)

    @property
    def burst(self) -> float:
        """Tokens that a decode step delivers on average, of the class with the most."""
        laws = [law for _, law in self.classes] or [self.accept]
        return max(law.tokens(self.drafts) for law in laws)

    def said(self) -> dict[str, object]:
        """For records; a spread that is infinite is None."""
        laws = {name: _law(law) for name, law in self.classes}
        return {
            "drafts": self.drafts,
            "ahead": self.ahead,
            **_law(self.accept),
            **({"classes": laws} if laws else {}),
        }


def _law(accept: Acceptance) -> dict[str, object]:
    return {"accept": accept.mean, "accept_spread": accept.spread if accept.spread < inf else None}


class Engine(NamedTuple):
    """A step cost and the hard limits of one engine.

    Examples:
        >>> import headgate
        >>> card = headgate.load_card("cal-h200-qwen3-8b")
        >>> limits = {"max_model_len": 8192, "batch_tokens": 4096, "running": 128}
        >>> engine = headgate.Engine(card.cost, kv_tokens=200_000, **limits)
        >>> engine.longest
        8192
    """

    cost: StepCost
    kv_tokens: int
    max_model_len: int
    batch_tokens: int
    running: int
    block: int = 16
    prefix_cache: bool = True  # keep KV of prompts and outputs, and find it where requests share content
    speculation: Speculation | None = None
    retraction: str = (
        NEWEST  # SHORTEST: the decode with the shortest output, which then waits behind all others
    )

    @property
    def width(self) -> int:
        """Tokens of the budget that a decode takes in a step."""
        return 1 + self.speculation.drafts if self.speculation else 1

    @property
    def burst(self) -> float:
        """Tokens that a decode step brings on average."""
        return self.speculation.burst if self.speculation else 1.0

    @property
    def longest(self) -> int:
        """The most tokens one request may have, prompt and output together."""
        return min(self.max_model_len, self.kv_tokens // self.block * self.block)

    @property
    def limits(self) -> dict[str, int]:
        """The numbers by name, for records."""
        left_out = ("cost", "prefix_cache", "speculation", "retraction")
        return {name: value for name, value in self._asdict().items() if name not in left_out}

    def checked(self) -> Engine:
        """The same, or an error that names what cannot be."""
        for name in ("kv_tokens", "max_model_len", "batch_tokens", "running", "block"):
            if getattr(self, name) < 1:
                raise InputError(f"engine: {name}={getattr(self, name)}; must be at least 1")
        if self.retraction not in (NEWEST, SHORTEST):
            raise unknown("retraction of the engine", self.retraction, (NEWEST, SHORTEST))
        if self.batch_tokens < self.running:
            raise InputError(
                f"engine: a budget of {self.batch_tokens} tokens is below {self.running} running requests; "
                "a step must hold a token for each decode: raise --budget or lower --slots"
            )
        if self.speculation and self.batch_tokens < self.running * self.width:
            raise InputError(
                f"engine: a budget of {self.batch_tokens} tokens is below {self.running} running requests of "
                f"{self.width} tokens each, {self.width - 1} of them drafts; raise --budget or lower --slots "
                "or --speculate"
            )
        if self.kv_tokens < self.block:
            raise InputError(
                f"engine: {self.kv_tokens} KV tokens are less than a block of {self.block}; raise --kv-tokens"
            )
        return self


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
    kv_tokens, length = kv_tokens or card.kv_tokens, model_len or card.max_model_len
    return Engine(card.cost, kv_tokens, length, budget, slots, block or card.block).checked()
