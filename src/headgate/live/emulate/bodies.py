"""What a client asks for: bodies of the two completion endpoints, checked as vLLM checks them."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import msgspec

from headgate.live.emulate.problems import ProblemError, invalid, parameter

MOST_CHOICES = 128  # n times prompts of one request
LONGEST_ID = 256
INT64 = 2**63


class StreamOptions(msgspec.Struct):
    """What a stream says of itself."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct):
    """The fields that change what the emulator does; all others are accepted and ignored."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    echo: bool | None = False
    priority: int = 0
    request_id: str | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None


DECODER = msgspec.json.Decoder(Body, strict=False)


def read_body(data: bytes, chat: bool) -> Body:
    """The body of a request, its types checked."""
    try:
        body = DECODER.decode(data)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        place = where.strip("`").removeprefix("$").lstrip(".") or None
        raise invalid(what, None if place is None else f"body.{place}") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"JSON decode error: {str(error)[:200]}", "body") from None
    if chat and body.messages is None:
        raise invalid("Field required: body.messages", "body.messages")
    _check_fields(body)
    if not chat and not body.prompt:
        raise parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return body


def _check_fields(body: Body) -> None:
    """What vLLM refuses before it looks at the model: nothing is freed anywhere for such a request."""
    if body.stream_options is not None and not body.stream:
        raise parameter("Stream options can only be defined when `stream=True`.", "stream_options")
    for name in ("seed", "priority"):
        value = getattr(body, name)
        if value is not None and not -INT64 <= value < INT64:
            raise invalid(f"Input should be a 64-bit integer: body.{name}", f"body.{name}")


Check = tuple[str, Callable[[Any], bool], str]
NUMBERS: tuple[Check, ...] = (
    ("temperature", lambda v: v >= 0, "temperature must be non-negative, got {}."),
    ("top_p", lambda v: 0 < v <= 1, "top_p must be in (0, 1], got {}."),
    ("presence_penalty", lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2], got {}."),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2], got {}."),
)


def check_sampling(body: Body, limit: int) -> None:
    """What vLLM refuses after the prompt has been read; `limit` is the most output tokens."""
    for name, fine, message in NUMBERS:
        value = getattr(body, name)
        if value is not None and not (isfinite(value) and fine(value)):
            wrong = message.format(value)
            raise ProblemError(wrong) if name.endswith("penalty") else parameter(wrong, name, value)
    n = 1 if body.n is None else body.n
    if n < 1:
        raise ProblemError(f"n must be at least 1, got {n}.")
    if n > 1 and body.temperature == 0:
        raise ProblemError(f"n must be 1 when using greedy sampling, got {n}.")
    if body.min_tokens < 0:
        raise ProblemError(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.min_tokens > limit:
        raise ProblemError(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}."
        )
    if any(not stop for stop in stops_of(body)):
        raise ProblemError("stop cannot contain an empty string.")
    if body.use_beam_search:
        raise ProblemError("The emulator has no beam search; drop use_beam_search.")


def stops_of(body: Body) -> list[str]:
    """The strings that end the answer."""
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def turns_of(messages: list[Any]) -> list[tuple[str, str]]:
    """Role and text of each message of a chat."""
    if not messages:
        raise ProblemError(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    turns: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"Field required: body.messages.{place}.role", f"body.messages.{place}.role")
        turns.append((message["role"], _content(message.get("content"), place)))
    return turns


def _content(content: object, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text", "") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise invalid(f"Input should be text or parts: body.messages.{place}", f"body.messages.{place}.content")


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One or several prompts, as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if _ids(prompt):
        return [prompt]
    if all(isinstance(each, str) for each in prompt) or all(_ids(each) for each in prompt):
        if not all(prompt):
            raise parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return list(prompt)
    raise invalid("Input should be a string, token ids, or a list of these: body.prompt", "body.prompt")


def _ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and id >= 0 for id in value)
