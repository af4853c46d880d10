"""The router policy of a live router: made by name, replaced on reload, planned anew while it runs."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from headgate.core.errors import InputError
from headgate.core.fleet import RoutePolicy
from headgate.core.request import Request
from headgate.cost.card import load_card
from headgate.cost.likeness import error_bar
from headgate.live.route.config import GateConfig
from headgate.live.route.gate.gate import Gate
from headgate.live.route.gate.queue import Content, Ticket
from headgate.methods.balance.prefix import KnowsPrefixes
from headgate.methods.balance.prefix_index import Sharing
from headgate.methods.fluid.flows import Flow, Instance, TokenPrices, pace_of
from headgate.methods.fluid.online import INNER, Online
from headgate.methods.make import make_router, split_name

if TYPE_CHECKING:
    from headgate.methods.fluid.plan import FluidPlan

STEP_TOKENS = 8192  # of an engine's step, where it is not known
PROMPTS = 16  # at once, where nothing is known of prompts
KV_TOKENS = 400_000  # of an engine without a card: what an index of its prefixes remembers
BLOCK = 16


class LivePolicy:
    def __init__(self, config: GateConfig, engines: int) -> None:
        self.config = config
        self.router = live_router(config, engines)

    def check(self, new: GateConfig, engines: int) -> None:
        if new.router != self.config.router or new.classes != self.config.classes:
            live_router(new, engines)

    def swap(self, new: GateConfig, engines: int, gate: Gate) -> None:
        self.config, self.router = new, live_router(new, engines)
        gate.swap(self.router)

    def prompts_at_once(self, slots: int) -> int:
        means = [each.prompt for each in (*self.config.classes, self.config.default) if each.prompt]
        guess = round(STEP_TOKENS / (sum(means) / len(means))) if means else PROMPTS
        return min(max(1, guess), slots)

    def described(self, now: float) -> dict[str, Any] | None:
        if not isinstance(self.router, Online):
            return None
        plan, engines = self.router.plan, self.router.engines
        columns = zip(plan.instance.flows, plan.served, plan.shadows.arrival, strict=True)
        return {
            "age_s": round(now - self.router.planned, 1),
            "engines": engines,
            "failed": self.router.failed,
            "revenue": plan.revenue * engines,
            "prefilling": plan.prefilling,
            "classes": {
                flow.name: {
                    "rate": flow.rate * engines,
                    "prompt": flow.prompt,
                    "output": flow.output,
                    "cached": flow.cached,
                    "impatience": flow.impatience,
                    "served": served * engines,
                    "worth": worth,
                }
                for flow, served, worth in columns
            },
        }


def rests_on(config: GateConfig, slots: Collection[int]) -> str:
    name = config.router.card
    card = None if name is None else load_card(name)
    planned = f"card {card.name} ({card.model} on {card.gpu})" if card else "no card"
    each = " or ".join(f"{number:,}" for number in sorted(set(slots))) or "no"
    return f"router {config.router.name}, {planned}, {each} slots an engine"


def live_router(config: GateConfig, engines: int) -> RoutePolicy:
    name, own = split_name(config.router.name, "router")
    settings: dict[str, Any] = {**own, **config.router.settings}
    if config.router.order:
        settings["order"] = "/".join(config.router.order)
    if name in INNER and not settings:  # plans need the traffic, which is estimated while it runs
        return Online(first_plan(config, engines), engines, random.random, name, config.router.replan)
    given = {
        "engines": lambda: engines,
        "draw": lambda: random.random,
        "plan": lambda: first_plan(config, engines),
        "sharing": lambda: live_sharing(config),
    }
    router = make_router(name, given, settings)
    if isinstance(router, KnowsPrefixes) and router.exact:
        raise InputError(f"router {name}: only simulated engines answer what they cache; drop exact")
    return router


def live_sharing(config: GateConfig) -> Sharing:
    card = None if config.router.card is None else load_card(config.router.card)
    return Sharing(
        content=lambda request: None if (known := _content(request)) is None else known.pieces,
        cost=None if card is None else card.cost,
        kv_tokens=KV_TOKENS if card is None else card.kv_tokens,
        block=BLOCK,
        slots=config.fewest_slots,
        session=lambda request: None if (known := _content(request)) is None else known.session,
        measure=lambda request: request.prompt if (known := _content(request)) is None else known.tokens,
    )


def _content(request: Request) -> Content | None:
    assert isinstance(request, Ticket)
    return request.content


# -- the plan a router begins with

log = logging.getLogger("headgate.route")
PROMPT, OUTPUT, RATE = 512.0, 256.0, 1.0  # where the configuration says nothing of any class
OTHERS = 0.05  # of the rates that are given: the rate of a class without one


def first_plan(config: GateConfig, engines: int) -> FluidPlan:
    """Solved once; the online router replaces it as soon as enough requests of a class were seen."""
    from headgate.methods.fluid.planner import plan_fluid  # the solver takes a while to import

    router = config.router
    if router.card is None:
        raise InputError(
            f"router {router.name} plans and needs the speed of its engines; give --card NAME or card = "
            "NAME in [router] (see headgate doctor), or choose a router such as least-loaded"
        )
    card = load_card(router.card)
    for line in error_bar(card):
        log.warning("%s", line)
    flows = _flows(config, engines)
    total = sum(flow.rate for flow in flows)
    prompt = sum(flow.rate * flow.prompt for flow in flows) / total
    outputs = sum(flow.rate * flow.output for flow in flows)
    context = sum(flow.rate * flow.output * (flow.prompt + flow.output / 2) for flow in flows) / outputs
    slots = max(1, min(config.fewest_slots, int(card.kv_tokens / max(context, 1.0))))
    pace = pace_of(card.cost, slots, min(STEP_TOKENS, card.max_batch_tokens), prompt, context)
    prices = TokenPrices(router.prices.prompt, router.prices.output)
    return plan_fluid(Instance(flows, pace, prices).checked())


def _flows(config: GateConfig, engines: int) -> tuple[Flow, ...]:
    """What is not said of a class is as in the mean of the others; none waits longer than `queue_ttl`."""
    classes = (config.default, *config.classes)
    rates = [each.rate for each in classes if each.rate]
    rate = OTHERS * sum(rates) if rates else RATE
    prompt = _mean([each.prompt for each in classes], PROMPT)
    output = _mean([each.output for each in classes], OUTPUT)
    ttl = config.limits.queue_ttl
    return tuple(
        Flow(
            each.name,
            each.prompt or prompt,
            each.output or output,
            (each.rate or rate) / engines,
            1 / min(each.patience or ttl, ttl),
        )
        for each in classes
    )


def _mean(values: list[float | None], unsaid: float) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else unsaid
