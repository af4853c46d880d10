"""Whether two names are of one model, as far as names tell: family, generation and size; and hub names."""

from __future__ import annotations

import re
from difflib import get_close_matches

# Families whose names say what they are; of other names nothing is concluded
FAMILIES = (
    *("qwen", "llama", "mistral", "mixtral", "gemma", "phi", "deepseek", "falcon", "olmo", "glm", "granite"),
    *("opt", "kimi", "minimax", "nemotron", "command", "dolly", "gpt-oss", "yi"),
)
# Under which name vLLM loads the models of cards; of tuned variants the one that chats
HUB = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-7b-instruct-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "gemma-2-9b": "google/gemma-2-9b-it",
    "gemma-2-27b": "google/gemma-2-27b-it",
    "gemma-3-4b": "google/gemma-3-4b-it",
    "gemma-3-12b": "google/gemma-3-12b-it",
    "gemma-3-27b": "google/gemma-3-27b-it",
}
_SIZE = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)b(?![a-z0-9])")
_FAMILY = re.compile(
    rf"(?<![a-z])({'|'.join(map(re.escape, FAMILIES))})-?([0-9]+(?:\.[0-9]+)?(?![0-9.]*b))?(?![a-z])"
)


def differ(one: str, other: str) -> bool:
    """Whether both names tell, and do not tell the same model."""
    first, second = _told(one), _told(other)
    return any(a and b and a != b for a, b in zip(first, second, strict=True))


def hub_name(model: str) -> str | None:
    """What vLLM loads it as: a name with an owner as it is, any other as the table has it; else None."""
    if "/" in model:
        return model
    known = {each.rpartition("/")[2].lower(): each for each in HUB.values()} | HUB
    return known.get(model.lower())


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
