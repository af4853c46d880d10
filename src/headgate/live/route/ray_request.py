"""What a router in Ray Serve sees of a request: its class, its size and the most tokens it may make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headgate.live.route.body import UNBOUNDED
from headgate.live.route.classes import Classes
from headgate.live.route.estimates import TOKENS_PER_BYTE

CLASS = "x-headgate-class"
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MOST_MESSAGES = 10_000  # whose texts are measured


def described(classes: Classes, arguments: Iterable[Any], model_id: str) -> tuple[str, int, int, int]:
    """Class, prompt tokens (estimated), output tokens at most, and priority of a request.

    An HTTP request shows its headers only: its body is still with the client. A call through a handle shows
    its arguments: a dictionary or object in OpenAI's words is measured, and so are keywords.
    """
    header, size, limit, model, field = None, 0, UNBOUNDED, model_id, None
    for each in arguments:
        headers = _headers(each)
        header = headers.get(CLASS, header)
        size = max(size, _number(headers.get("content-length")), _size(each))
        model = str(_get(each, "model") or model)[:256]
        limit = min([limit, *(n for name in LIMITS if (n := _number(_get(each, name))))])
        metadata = _get(each, "metadata")
        field = metadata.get("class", field) if isinstance(metadata, Mapping) else field
    prompt = max(1, round(size * TOKENS_PER_BYTE))
    kind = classes.of(None, header, model, field, prompt)
    return kind.name, prompt, limit, kind.priority


def _get(each: Any, name: str) -> Any:
    return each.get(name) if isinstance(each, Mapping) else getattr(each, name, None)


def _number(value: Any) -> int:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _headers(each: Any) -> dict[str, str]:
    """Of an ASGI scope (bytes), or of what Ray Serve LLM passes on (text); names in lower case."""
    scope = getattr(each, "asgi_scope", None)
    found = scope.get("headers", ()) if isinstance(scope, Mapping) else _get(each, "headers")
    pairs = found.items() if isinstance(found, Mapping) else found or ()
    return {_text(name).lower(): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _size(each: Any) -> int:
    """Bytes of its prompt or messages, roughly."""
    prompt = _get(each, "prompt")
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):  # token ids, or several prompts
        return round(len(prompt) / TOKENS_PER_BYTE)
    messages = _get(each, "messages")
    if not isinstance(messages, list):
        return 0
    contents = (_get(message, "content") for message in messages[:MOST_MESSAGES])
    return sum(len(content) for content in contents if isinstance(content, str))
