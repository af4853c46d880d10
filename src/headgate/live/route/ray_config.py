"""What `HeadgateRouter` is told in `request_router_kwargs`: JSON, with the tables of `headgate route`."""

from __future__ import annotations

from typing import Any, Literal

from headgate.core.errors import InputError
from headgate.live.route.config import GateConfig, checked_as
from headgate.live.route.policy import made
from headgate.live.route.units import Count, Seconds
from headgate.methods.balance.prefix import KnowsPrefixes

SEATS = 256  # of a replica, for a first plan, where nobody says


class RayConfig(GateConfig):
    """Router, classes and queues as in the file of `headgate route`, and what is Ray's own.

    `prompts_at_once` is for deployments that tell the gate of first tokens (`ray_replica.Reports`). Without
    it a replica may have all its seats in prompts, because nobody would say that one is done.
    """

    seats: Count | None = None  # requests a replica serves at once (default: its max_ongoing_requests)
    prompts_at_once: Count | None = None
    gate: Literal["shared", "local"] = "shared"  # one for all proxies, or one in each
    timeout: Seconds = 2.0  # a gate actor that is silent for so long is lost

    @property
    def fewest_seats(self) -> int:
        return self.seats or SEATS


def ray_config(given: dict[str, Any]) -> RayConfig:
    """Checked, its router policy included; a mistake is one line."""
    config = checked_as(RayConfig, given, "request_router_kwargs: ")
    for each in config.classes:
        if each.match.key:
            raise InputError(
                f"request_router_kwargs: class {each.name}: Ray has no keys; match by header, model, "
                "field or prompt"
            )
    if isinstance(made(config, 1), KnowsPrefixes):
        raise InputError(
            f"request_router_kwargs: router {config.router.name} reads prompts, which no router in Ray sees; "
            "choose affinity or least-loaded"
        )
    return config
