"""A new configuration for a running router: what may change, and what changes."""

from __future__ import annotations

from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.live.route.config import Config, EngineAt, Front

FIXED = tuple(
    name
    for name in Front.model_fields
    if name not in ("key_file", "body_limit", "body_timeout", "pass_authorization", "allow_kv_params",
                    "show_engine", "drain_delay", "drain_timeout")
)  # fmt: skip


class Changes(NamedTuple):
    """What a reload does, engines by URL."""

    added: tuple[EngineAt, ...]
    retired: tuple[str, ...]
    changed: tuple[EngineAt, ...]
    tables: tuple[str, ...]  # other tables that differ

    @property
    def lines(self) -> list[str]:
        said = [f"engine {each.url} is added with {each.seats} seats" for each in self.added]
        said += [f"engine {url} is drained and retired" for url in self.retired]
        said += [f"engine {each.url} has new settings" for each in self.changed]
        return said + [f"[{table}] has new settings" for table in self.tables] or ["nothing changes"]


def changes(old: Config, new: Config) -> Changes:
    """What is different. Refuses what a running process cannot change."""
    for name in FIXED:
        if getattr(old.front, name) != getattr(new.front, name):
            raise InputError(f"front.{name} cannot change while the router runs; restart it")
    if {each.name for each in old.classes} - {each.name for each in new.classes}:
        gone = sorted({each.name for each in old.classes} - {each.name for each in new.classes})
        raise InputError(f"class {gone[0]!r} cannot be dropped while the router runs; restart it")
    before = {each.url: each for each in old.engines}
    after = {each.url: each for each in new.engines}
    return Changes(
        tuple(each for url, each in after.items() if url not in before),
        tuple(url for url in before if url not in after),
        tuple(each for url, each in after.items() if url in before and before[url] != each),
        tuple(
            table
            for table in ("front", "limits", "router", "classes", "default", "kv", "discovery", "health")
            if getattr(old, table) != getattr(new, table)
        ),
    )
