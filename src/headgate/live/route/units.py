"""Durations and sizes as people write them in the router's configuration."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from headgate.settings_base import seconds

SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def size(text: str) -> int:
    """Bytes in a text such as `32MiB`, `1GB` or `4096`."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None or found[2] not in SIZES:
        raise ValueError(f"{text!r} is not a size; write 4096, 64KiB, 32MiB or 1GiB")
    return int(float(found[1]) * SIZES[found[2]])


def _size(value: object) -> object:
    return size(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_size), Field(strict=True, ge=1)]
Seconds = Annotated[float, BeforeValidator(seconds), Field(strict=True, gt=0, allow_inf_nan=False)]
Delay = Annotated[float, BeforeValidator(seconds), Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
Switch = Annotated[bool, Field(strict=True)]
