"""What a virtual engine is made of: a step cost and limits, from a card where a user changes some."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from headgate.core.durations import duration
from headgate.core.errors import InputError, unknown
from headgate.cost.card import Card
from headgate.cost.laws.speculation import MOST_DRAFTS, Acceptance
from headgate.cost.laws.terms import DraftTerms
from headgate.cost.laws.work import WorkCost
from headgate.cost.model import StepCost

# Whose KV goes first where decodes find none; the one with the shortest output then waits behind all others.
NEWEST, SHORTEST = "newest", "shortest"
RETRACTION = {"vllm": NEWEST, "sglang": SHORTEST}  # of an engine as it comes


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
        return dict(self.classes).get(kind, self.accept)

    @property
    def burst(self) -> float:
        """Tokens that a decode step delivers on average, of the class with the most."""
        laws = (self.accept, *(law for _, law in self.classes))
        return max(law.tokens(self.drafts) for law in laws)

    def said(self) -> dict[str, object]:
        laws = {name: _law(law) for name, law in self.classes}
        own = {"drafts": self.drafts, "ahead": self.ahead, **_law(self.accept)}
        return {**own, "classes": laws} if laws else own


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
    retraction: str = NEWEST

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
        left_out = ("cost", "prefix_cache", "speculation", "retraction")
        return {name: value for name, value in self._asdict().items() if name not in left_out}

    def checked(self) -> Engine:
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


# -- speculative decoding

DRAFT_LAUNCH = 0.2e-3  # s a pass of a drafter that was not measured takes beside a layer of the model
USUAL_LAYERS = 36


class SpeculateSettings(NamedTuple):
    """What --speculate says; None: the card's, or assumed."""

    drafts: int
    accept: float | None = None
    spread: float | None = None
    draft: float | None = None
    draft_per_decode: float | None = None
    speculating: float | None = None
    method: str | None = None


def speculate_settings(text: str) -> SpeculateSettings:
    drafts, *rest = text.split(":", 1)
    if not drafts.strip().isdecimal() or not 0 <= int(drafts) <= MOST_DRAFTS:
        raise InputError(
            f"--speculate {text!r}: expect a number of drafts from 0 to {MOST_DRAFTS}, such as 3:accept=0.7"
        )
    values: dict[str, Any] = {}
    for part in rest[0].split(",") if rest else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in SpeculateSettings._fields[1:] or not equals:
            raise unknown("word of --speculate", name, SpeculateSettings._fields[1:])
        if name in values:
            raise InputError(f"--speculate: {name} is given twice; drop one of the two")
        values[name] = value if name == "method" else _speculate_number(name, value)
    return SpeculateSettings(int(drafts), **values)


def _speculate_number(name: str, value: str) -> float:
    try:
        number = float(value) if name in ("accept", "spread") else duration(value, None)
    except ValueError:
        number = -1.0
    most = {"accept": 1.0, "spread": inf}.get(name, 1.0)
    if not 0 <= number <= most or (name == "spread" and not number):
        raise InputError(f"--speculate: {name} is {value!r}; expect a number from 0 to {most:g}")
    return number


def drafting_of(card: Card, asked: SpeculateSettings) -> DraftTerms:
    """What drafts take: as asked, else as the card was measured, else assumed."""
    assert card.work is not None
    terms = card.speculation
    if terms is None:
        layers = (card.provenance.model_shape or {}).get("layers", USUAL_LAYERS)
        work = card.work
        draft = DRAFT_LAUNCH + (work.constant + work.per_token * work.least_tokens) / layers
        terms = DraftTerms(max(1, asked.drafts), draft, work.per_token / layers + work.per_decode)
    words = ("draft", "draft_per_decode", "speculating", "method")
    given = {name: value for name in words if (value := getattr(asked, name)) is not None}
    try:
        return replace(terms, drafts=max(1, asked.drafts), **given)
    except ValueError as error:
        raise InputError(f"--speculate: {error}") from None


def priced_by_token(card: Card, cost: StepCost) -> WorkCost:
    if not isinstance(cost, WorkCost):
        raise InputError(
            f"card {card.name} prices decodes, not tokens, so drafts have no price; choose a calibrated "
            "(cal-...) or derived card"
        )
    return cost


def with_speculation(
    engine: Engine,
    card: Card,
    text: str,
    classes: tuple[tuple[str, Acceptance], ...] = (),
    every_class: bool = False,
) -> Engine:
    """The engine as --speculate says. `classes` have laws of their own; `every_class`: no other is needed."""
    asked = speculate_settings(text)
    cost = priced_by_token(card, engine.cost)
    if not asked.drafts:
        return engine
    if engine.retraction == SHORTEST:
        raise InputError("--speculate: drafts are simulated as vLLM runs them; drop it, or --engine sglang")
    most = card.speculation.drafts if card.speculation else MOST_DRAFTS
    if asked.drafts > most:
        raise InputError(f"--speculate {asked.drafts}: card {card.name} was measured up to {most} drafts")
    if asked.accept is None and not every_class:
        raise InputError(
            f"--speculate {text} needs the share of drafts that are accepted: write "
            f"{asked.drafts}:accept=0.7, or accept in each [[classes]] table (vLLM counts them: "
            "spec_decode_num_accepted_tokens_per_pos)"
        )
    drafting = drafting_of(card, asked)
    common = Acceptance(asked.accept or 0.0, asked.spread or inf)
    speculation = Speculation(asked.drafts, common, drafting.ahead, classes)
    return engine._replace(cost=cost.speculating(drafting), speculation=speculation).checked()
