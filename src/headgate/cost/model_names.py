"""Whether two names are of one model, as far as names tell: family, generation and size."""

from __future__ import annotations

import re
from difflib import get_close_matches

# Families whose names say what they are; of other names nothing is concluded
FAMILIES = (
    *("qwen", "llama", "mistral", "mixtral", "gemma", "phi", "deepseek", "falcon", "olmo", "glm", "granite"),
    *("opt", "kimi", "minimax", "nemotron", "command", "dolly", "gpt-oss", "yi"),
)
_SIZE = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])")
_FAMILY = re.compile(
    rf"(?<![a-z])({'|'.join(map(re.escape, FAMILIES))})-?([0-9]+(?:\.[0-9]+)?(?![0-9.]*b))?(?![a-z])"
)


def differ(one: str, other: str) -> bool:
    """Whether both names tell, and do not tell the same model."""
    first, second = _told(one), _told(other)
    return any(a and b and a != b for a, b in zip(first, second, strict=True))


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that is spelt most like it, never one of another model."""
    alike = [each for each in known if not differ(name, each)]
    found = get_close_matches(name.lower(), alike, n=1, cutoff=0.5)
    return found[0] if found else None


def _told(name: str) -> tuple[str, str, str]:
    """Family, generation, size; each "" where the name does not say."""
    text = name.lower().rstrip("/")
    text = text.rpartition("/")[2] if "/" in text else text
    family, size = _FAMILY.search(text), _SIZE.search(text)
    return (family[1] if family else "", (family[2] or "") if family else "", size[1] if size else "")
