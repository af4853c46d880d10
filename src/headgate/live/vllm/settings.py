"""The flag of vLLM's own that may hold our settings."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.live.engine import settings as neutral
from headgate.live.engine.settings import KEY, Settings

ADDITIONAL_CONFIG = "--additional-config"


def read_settings(additional_config: object = None, file: str | None = None) -> Settings:
    return neutral.read_settings(file, own_table(additional_config), ADDITIONAL_CONFIG)


def own_table(additional_config: object) -> object:
    return additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
