"""The router policy of a live router: made by name, replaced on reload, planned anew while it runs."""

from __future__ import annotations

import random
from typing import Any

from headgate.core.errors import InputError
from headgate.core.fleet import RoutePolicy
from headgate.live.route.config import GateConfig
from headgate.live.route.first_plan import first_plan
from headgate.live.route.gate import Gate
from headgate.methods.balance.prefix import PrefixAware
from headgate.methods.fluid.online import INNER, Online
from headgate.methods.make import make_router, router_class, split_name

STEP_TOKENS = 8192  # of an engine's step, where nobody says
PROMPTS = 16  # at once, where nothing is known of prompts


class LivePolicy:
    """Owns the router policy. Routers with a plan get one that is solved again while they run."""

    def __init__(self, config: GateConfig, engines: int) -> None:
        self.config = config
        self.router = made(config, engines)

    def check(self, new: GateConfig, engines: int) -> None:
        """Refuses a configuration whose router cannot be made."""
        if new.router != self.config.router or new.classes != self.config.classes:
            made(new, engines)

    def swap(self, new: GateConfig, engines: int, gate: Gate) -> None:
        """Another router takes over what is inside."""
        self.config, self.router = new, made(new, engines)
        gate.swap(self.router)

    def prompts_at_once(self, seats: int) -> int:
        """Prompts an engine may have at once: a step's tokens over the mean prompt."""
        means = [each.prompt for each in (*self.config.classes, self.config.default) if each.prompt]
        guess = round(STEP_TOKENS / (sum(means) / len(means))) if means else PROMPTS
        return min(max(1, guess), seats)

    def described(self, now: float) -> dict[str, Any] | None:
        """The newest plan for people: classes, rates, what is served, shadow prices."""
        if not isinstance(self.router, Online):
            return None
        newest, plan = self.router.plans[-1], self.router.plan
        columns = zip(plan.instance.flows, plan.served, plan.shadows.arrival, strict=True)
        return {
            "made": round(newest.time, 3),
            "engines": newest.engines,
            "failed": self.router.failed,
            "revenue": plan.revenue * newest.engines,
            "prefilling": plan.prefilling,
            "classes": {
                flow.name: {
                    "rate": flow.rate * newest.engines,
                    "prompt": flow.prompt,
                    "output": flow.output,
                    "impatience": flow.impatience,
                    "served": served * newest.engines,
                    "worth": worth,
                }
                for flow, served, worth in columns
            },
        }


def made(config: GateConfig, engines: int) -> RoutePolicy:
    """The router of a configuration, for so many engines."""
    name, own = split_name(config.router.name, "router")
    settings: dict[str, Any] = {**own, **config.router.settings}
    if config.router.order:
        settings["order"] = "/".join(config.router.order)
    if name in INNER and not settings:  # plans need the traffic, which is estimated while it runs
        return Online(first_plan(config, engines), engines, random.random, name, config.router.replan)
    if issubclass(router_class(name), PrefixAware):
        raise InputError(
            f"router {name} is for simulated fleets: the live router hashes no prompts yet; choose affinity"
        )
    given = {
        "engines": lambda: engines,
        "draw": lambda: random.random,
        "plan": lambda: first_plan(config, engines),
    }
    return make_router(name, given, settings)
