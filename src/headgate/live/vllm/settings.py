"""Settings as vLLM has them: what two of them mean to it, and the flag of its own that may hold them all."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.live.engine import settings as neutral
from headgate.live.engine.settings import AUTO, DEFAULT, KEY, NAMED, PANEL, Settings
from headgate.settings_base import Switch, declared

ADDITIONAL_CONFIG = "--additional-config"


class VllmSettings(Settings):
    """The settings with vLLM's words in `--help`."""

    policy: str = declared(PANEL, f"{NAMED}; {DEFAULT}; vllm: let vLLM decide and only watch", AUTO)
    force: Switch = declared(PANEL, "try a vLLM that would be refused", False)


def read_settings(additional_config: object = None, file: str | None = None) -> Settings:
    return neutral.read_settings(file, own_table(additional_config), ADDITIONAL_CONFIG)


def own_table(additional_config: object) -> object:
    return additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
