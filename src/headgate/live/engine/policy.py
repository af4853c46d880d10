"""The policy that the settings name, for an engine of given limits."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, cast

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.cost.card import Card, load_card
from headgate.cost.laws.terms import DraftTerms
from headgate.cost.likeness import Likeness, doubts, refusals
from headgate.cost.model import StepCost
from headgate.live.engine.process import LOG, EngineNames
from headgate.live.engine.settings import AUTO, Settings
from headgate.methods.make import installed_class, make_policy, policy_class, policy_parameters
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine, priced_by_token

CAN_BE_ANYTHING: dict[str, Any] = {"kv_tokens": 1 << 24, "block": 16, "max_model_len": 1 << 20}
UNKNOWN = Likeness()
MOST_TOKENS, MOST_REQUESTS = 1 << 20, 1 << 16  # where the engine's limits are not known yet


def build_policy(
    settings: Settings,
    names: EngineNames,
    like: Likeness = UNKNOWN,
    graph: int | None = None,
    width: int = 1,
    **engine_limits: int,
) -> tuple[BatchPolicy, dict[str, Any]]:
    """`graph`: the engine's largest CUDA graph, where known; `width`: of a decode, drafts included;
    `engine_limits`: those of an `Engine`.
    """
    engine = Engine(cast(StepCost, None), **engine_limits)  # type: ignore[arg-type]
    if (card := load_named(settings.card)) is not None:
        wrong = refusals(card, like)
        if wrong and not settings.any_card:
            raise InputError(wrong[0])
        limits = {
            names.budget: (engine.batch_tokens, card.max_batch_tokens),
            names.slots: (engine.running, card.max_running),
            names.longest: (engine.max_model_len, card.max_model_len),
        }
        beyond = [
            f"{name} is {ours}, card {card.name} was made for up to {theirs}; "
            "its prices are extrapolated beyond"
            for name, (ours, theirs) in limits.items()
            if ours > theirs
        ]
        for warning in (*wrong, *doubts(card, like), *beyond):
            LOG.warning("headgate: %s", warning)
    cost = cast(StepCost, card.cost if card else None)
    if card is not None and width > 1:
        drafting = replace(card.speculation or DraftTerms(width - 1), drafts=width - 1)
        cost = priced_by_token(card, cost).speculating(drafting)
    if card is not None and graph:
        cost = cost.graphed(graph)
        if settings.named()[0] == "keep":
            from headgate.methods.keep.learned import confined  # other policies do without

            if narrow := confined(cost, settings.tightest()):
                LOG.warning("headgate: %s", narrow)
    return _make(settings, names, card, engine._replace(cost=cost))


def check_policy(
    settings: Settings,
    names: EngineNames,
    batch_tokens: int | None = None,
    running: int | None = None,
    where: str = "",
) -> None:
    """`where` the settings are from, which a mistake in them names."""
    try:
        _check(settings, names, batch_tokens, running)
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def _check(settings: Settings, names: EngineNames, batch_tokens: int | None, running: int | None) -> None:
    card, name = load_named(settings.card), settings.named()[0]
    own = name.endswith(".py") or ".py:" in name  # it may set Plan.reject
    if settings.refuse and not own and (name == names.name or "refuse" not in policy_parameters(name)):
        raise InputError(
            f"--refuse {settings.refuse}, but policy {name} refuses nothing; choose --policy keep or drop it"
        )
    if settings.policy == names.name:
        return
    tokens = batch_tokens or max(MOST_TOKENS, running or 0)
    slots = min(running or MOST_REQUESTS, tokens)
    cost = cast(StepCost, card.cost if card else None)
    engine = Engine(cost, batch_tokens=tokens, running=slots, **CAN_BE_ANYTHING)
    _make(settings, names, card, engine)


def _make(
    settings: Settings, names: EngineNames, card: Card | None, engine: Engine
) -> tuple[BatchPolicy, dict[str, Any]]:
    name, words = settings.named()
    if name not in BATCH and ".py" not in name:  # which names an engine has beside ours is known here
        known = (*BATCH, AUTO, names.name)
        installed_class(name, "policy", BatchPolicy, known)  # type: ignore[type-abstract]
    if whose := getattr(policy_class(name), "own_scheduling_of", ""):
        raise InputError(
            f"policy {name} is {whose}'s own scheduling, for the simulator; choose another, or serve with "
            f"--engine {name} --policy {name} and {whose}'s own flags instead of {name}:PARAMETER=VALUE"
        )
    cost = inspect.signature(policy_class(name)).parameters.get("cost")
    if card is None and cost is not None and cost.default is cost.empty:
        raise InputError(
            f"policy {name} needs to know what steps cost; name a card, such as --card cal-h200-qwen3-8b "
            "(in a file: card), or choose a policy that needs none, such as mixed or eb"
        )
    limits = {"slots": (names.slots, engine.running), "budget": (names.budget, engine.batch_tokens)}
    for word, (limit, most) in limits.items():
        if str(words.get(word, "")).isdigit() and int(words[word]) > most:
            flag = "--" + limit.replace("_", "-")
            raise InputError(
                f"policy {name}: {word}={words[word]} exceeds the engine's {most}; lower it or raise {flag}"
            )
    return make_policy(name, words, engine)


def load_named(name: str | None) -> Card | None:
    return load_card(name) if name else None
