"""docs/settings.md names every setting of the router's file, with its default."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headgate.live.route.config import (
    Addresses,
    Class,
    Config,
    Discovery,
    EngineAt,
    FrontSettings,
    Health,
    Kv,
    Replicas,
    RouteLimits,
    Router,
    ScalingTable,
    Tenants,
)
from headgate.settings_base import SettingsModel

PAGE = (Path(__file__).parents[4] / "docs" / "settings.md").read_text("utf-8")
TABLES: dict[str, type[SettingsModel]] = {
    "[front]": FrontSettings, "[limits]": RouteLimits, "[router]": Router, "[[classes]]": Class,
    "[[engines]]": EngineAt, "[tenants]": Tenants, "[addresses]": Addresses, "[replicas]": Replicas,
    "[discovery]": Discovery, "[health]": Health, "[kv]": Kv, "[scaling]": ScalingTable,
}  # fmt: skip


def defaults(table: str) -> dict[str, str]:
    """The rows of a table of the page: names and what stands as their defaults."""
    rows = PAGE.split(f"| `{table}` | default | meaning |\n|---|---|---|\n")[1].split("\n\n")[0]
    found: dict[str, str] = {}
    for row in rows.splitlines():
        names, values = row.split(" | ")[:2]
        named = re.findall(r"`([a-z_0-9]+)`", names)
        found |= zip(named, re.findall(r"`[^`]*`|-", values), strict=True)
    return found


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_and_its_default(table: str) -> None:
    model, page = TABLES[table], defaults(table)
    assert set(page) == set(model.model_fields)
    given: dict[str, Any] = {
        name: tomllib.loads(f"x = {text.strip('`')}")["x"] for name, text in page.items() if text != "-"
    }
    needed = {name: "http://a:1" if name == "url" else "a" for name in ("url", "name") if name not in given}
    needed = {name: value for name, value in needed.items() if name in model.model_fields}
    plain = model.model_validate(needed)
    assert model.model_validate(needed | given, context=True) == plain
    for name, text in page.items():
        assert (text == "-") == (name in needed or getattr(plain, name) is None), name


def test_no_table_is_missing() -> None:
    assert {name.strip("[]") for name in TABLES} | {"default"} == set(Config.model_fields)
