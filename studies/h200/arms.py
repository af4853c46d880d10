"""What is compared: plain vLLM and policies, switched inside one running engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.cost.card import load_card
from headgate.methods.make import make_policy, policy_parameters, split_name
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine

PLAIN = "plain"
SPEED = (PLAIN, "eb:refill=48", "eb-online", "eb+")
SCHEDULER = "headgate.vllm.scheduler"


def limits(card: str, slots: int, budget: int, kv_tokens: int, model_len: int, block: int) -> Engine:
    """The engine as policies are told of it."""
    return Engine(load_card(card).cost, kv_tokens, model_len, budget, slots, block).checked()


def checked(arm: str, engine: Engine) -> str:
    """An arm that can be built, or one line that says why not."""
    if arm != PLAIN:
        make_policy(*split_name(arm), engine)
    return arm


def switch(scheduler: Any, arm: str, engine: Engine) -> None:
    """From the next step on the engine follows this arm. All that is known of the plug-in stands here."""
    live = getattr(scheduler, "_headgate", None)
    if live is None:
        if arm != PLAIN:
            raise SystemExit(f"arm {arm}: this engine runs without headgate; leave --no-plugin out")
        return
    live.take_over(None if arm == PLAIN else make_policy(*split_name(arm), engine)[0])


def gauges(scheduler: Any) -> Mapping[str, float]:
    """What the policy says of itself; nothing for plain vLLM."""
    live = getattr(scheduler, "_headgate", None)
    policy = None if live is None else live.policy
    return {} if policy is None else policy.gauges()


def fallen(scheduler: Any) -> str | None:
    """Why the plug-in gave up, if it did: such a run measures plain vLLM."""
    live = getattr(scheduler, "_headgate", None)
    return None if live is None or live.fallen is None else str(live.fallen)


def learns(arm: str) -> bool:
    """Does it first have to see some requests end?"""
    return arm != PLAIN and "review" in policy_parameters(split_name(arm)[0])


def every_policy(slots: int) -> list[str]:
    """One arm for every policy there is, for the comparison of tokens."""
    own = {"eb": f"eb:refill={max(1, slots // 10)}"}
    return [own.get(name, name) for name in BATCH]
