"""The router policy of a live router: made by name, replaced on reload, planned anew while it runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from headgate.core.errors import InputError
from headgate.core.fleet import RoutePolicy
from headgate.live.route.config import Config
from headgate.live.route.job import Job
from headgate.methods.make import make_router, router_class, split_name

if TYPE_CHECKING:
    from headgate.live.route.app import RouterApp

STEP_TOKENS = 8192  # of an engine's step, where nobody says
PROMPTS = 16  # at once, where nothing is known of prompts


class LivePolicy:
    """Owns the router policy."""

    def __init__(self, config: Config, engines: int) -> None:
        self.config, self.engines = config, engines
        self.router = self._made(config, engines)

    def _made(self, config: Config, engines: int) -> RoutePolicy:
        name, settings = split_name(config.router.name, "router")
        given = {"engines": lambda: engines, "draw": lambda: random.random, "plan": lambda: self._plan(config)}
        return make_router(name, given, {**settings, **config.router.settings})

    def _plan(self, config: Config) -> Any:
        raise InputError(f"router {config.router.name} needs a plan; choose least-loaded")

    def check(self, new: Config) -> None:
        """Whether a new configuration names a router that can be made."""
        if new.router != self.config.router:
            router_class(split_name(new.router.name, "router")[0])
            self._made(new, self.engines)

    def swap(self, new: Config, app: RouterApp) -> None:
        """Another router takes over what is inside."""
        self.config = new
        self.router = self._made(new, len(app.upstreams))
        app.gate.swap(self.router)

    def prompts_at_once(self, seats: int) -> int:
        """Prompts an engine may have at once: a step's tokens over the mean prompt."""
        means = [each.prompt for each in (*self.config.classes, self.config.default) if each.prompt]
        guess = round(STEP_TOKENS / (sum(means) / len(means))) if means else PROMPTS
        return min(max(1, guess), seats)

    def start(self, app: RouterApp) -> None:
        """Plan anew from time to time."""

    def stop(self) -> None:
        """No more."""

    def ended(self, job: Job, now: float) -> None:
        """A request has ended; what was learned of it goes into the next plan."""

    def described(self, now: float) -> dict[str, Any] | None:
        """The newest plan for people."""
        return None

    def gauges(self, now: float) -> dict[str, float]:
        """The newest plan in numbers."""
        return {}
