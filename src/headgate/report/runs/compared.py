"""What runs that are compared differ in, in words: policies, routers, both, or the engine around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from headgate.record.tables import Run


class Compared(NamedTuple):
    """One of those that are compared, several, and the head of the column that names them."""

    one: str
    many: str
    head: str


POLICIES = Compared("policy", "policies", "policy")
ROUTERS = Compared("router", "routers", "router")
BOTH = Compared("combination", "combinations of router and policy", "router, policy")
SETUPS = Compared("setup", "setups", "setup")


def compared(runs: Iterable[Run]) -> Compared:
    """Runs of different engines are setups, whatever else differs; of one engine, routers or policies."""
    meta = [run.meta for run in runs]

    def differ(*words: str) -> bool:
        return len({repr([_plain(one.get(word)) for word in words]) for one in meta}) > 1

    if differ("engine", "engines", "asynchronous", "card"):
        return SETUPS
    if not differ("router", "router_parameters"):
        return POLICIES
    return BOTH if differ("policy", "parameters") else ROUTERS


def _plain(value: Any) -> Any:
    """Settings in one order, and what is not said as what is off."""
    return sorted(value.items()) if isinstance(value, dict) else value or None
