"""Which vLLM is installed, without importing it: that takes up to a minute."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

WRITTEN = re.compile(r"^__version__ = version = ['\"]([^'\"]+)", re.MULTILINE)


def installed() -> str | None:
    """Its version, "unknown" where it does not say, None where there is none.

    The file in the package goes first: CPU builds come under another name than vllm.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        file = Path(folder, "_version.py")
        found = WRITTEN.search(file.read_text(encoding="utf-8")) if file.is_file() else None
        if found:
            return found[1]
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def numbers(text: str) -> tuple[int, ...]:
    """0.32.0+cpu as (0, 32, 0); nothing where there are none."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
