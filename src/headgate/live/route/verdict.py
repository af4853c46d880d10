"""What the first bytes of an engine's answer mean: a token, a refusal, or an error to try elsewhere."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import msgspec

RETRIED = frozenset((429, 502, 503, 504))


class Fault(Enum):
    """How an upstream call failed; the values are labels of metrics."""

    CONNECT = "connect"
    RESET = "reset"
    STATUS = "status"
    BUSY = "busy"  # a full queue: 503 or 429
    ERROR_EVENT = "error-event"
    ABORT = "abort"  # an engine that shuts down
    EMPTY = "empty"  # ended before anything came
    FIRST_TOKEN = "first-token"  # too late
    IDLE = "idle"
    GARBAGE = "garbage"  # no HTTP, or an answer larger than allowed
    CUT = "cut"  # by the router's own end
    NO_PARAMS = "no-params"  # a prefill without KV parameters


TRIPS = frozenset(
    (Fault.CONNECT, Fault.RESET, Fault.STATUS, Fault.ERROR_EVENT, Fault.ABORT, Fault.EMPTY, Fault.FIRST_TOKEN,
     Fault.IDLE, Fault.GARBAGE)
)  # fmt: skip


class LegError(Exception):
    """One upstream call failed. `status` and `body` are the engine's own answer where it gave one."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        status: int = 0,
        body: bytes = b"",
        content_type: str = "application/json",
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.fault, self.message, self.status, self.body = fault, message, status, body
        self.content_type, self.retry = content_type, retry
        self.retry_after: str | None = None  # as the engine said it

    @property
    def trips(self) -> bool:
        """Whether the breaker counts it."""
        return self.fault in TRIPS and (self.status == 0 or self.status >= 500)

    @property
    def answered(self) -> bool:
        """Whether the engine itself said so, in a whole answer: it lives."""
        return self.fault in (Fault.STATUS, Fault.ERROR_EVENT)

    @property
    def doubtful(self) -> bool:
        """Whether it may be the request's own: any engine would answer so, as vLLM does with 500 where it
        cannot fetch an image. Another engine's answer to the same request tells.
        """
        return self.answered and self.trips and self.status not in RETRIED


class Usage(NamedTuple):
    """Tokens of one request as its engine counted them."""

    prompt: int
    output: int
    cached: int = 0


_ANY = msgspec.json.Decoder()


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object, or an empty one for anything else."""
    try:
        found = _ANY.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def usage_of(data: bytes | None) -> Usage | None:
    """The usage an event or a body tells, None where it tells none."""
    found = decoded(data).get("usage") if data else None
    if not isinstance(found, dict):
        return None
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    output = found.get("completion_tokens", found.get("output_tokens", 0))
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(prompt=_tokens(prompt), output=_tokens(output), cached=_tokens(cached))


def _tokens(told: object) -> int:
    """A number of tokens; 0 where what an engine told is none."""
    return told if isinstance(told, int) and told >= 0 else 0


def judge_status(
    status: int, body: bytes, content_type: str, retry_500: bool, retry_after: str | None = None
) -> LegError | None:
    """A status other than 2xx as a fault. One that is not retried is passed on as it is: None."""
    if status in RETRIED:
        busy = status == 429 or (status == 503 and b'"Service Unavailable"' in body)
        fault = Fault.BUSY if busy else Fault.STATUS
        found = LegError(fault, f"the engine answered {status}", status, body, content_type)
        found.retry_after = retry_after
        return found
    if status >= 500 and retry_500:
        return LegError(Fault.STATUS, f"the engine answered {status}", status, body, content_type)
    if 300 <= status < 400 or status < 200:
        return LegError(Fault.GARBAGE, f"the engine answered {status}")
    return None


def judge_event(data: bytes) -> LegError | None:
    """The first event of a stream as a fault; None for a token or for what is passed on as it is."""
    if data == b"[DONE]":
        return LegError(Fault.EMPTY, "the stream ended before its first token")
    if b'"error"' in data[:64]:
        error = decoded(data).get("error")
        if isinstance(error, dict):
            code = error.get("code")
            code = code if isinstance(code, int) and 400 <= code < 600 else 500
            if code >= 500 or code == 429:
                return LegError(Fault.ERROR_EVENT, f"the engine's stream began with error {code}", 0)
    if b'"abort"' in data and aborted(decoded(data)):
        return LegError(Fault.ABORT, "the engine aborted the request before its first token")
    return None


def judge_body(body: bytes) -> LegError | None:
    """A whole answer with status 200: an engine that shuts down answers with no text and `abort`."""
    if b'"abort"' in body and aborted(decoded(body)):
        return LegError(Fault.ABORT, "the engine aborted the request before its first token")
    return None


def aborted(answer: dict[str, Any]) -> bool:
    """Whether all choices say `abort` and none has text."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(each, dict) and each.get("finish_reason") == "abort" and not _text(each)
        for each in choices
    )


def is_empty(data: bytes) -> bool:
    """Whether an event brings neither text nor an end: the role chunk that may come before a token."""
    if b'"delta"' not in data or b'"role"' not in data:
        return False
    choices = decoded(data).get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(each, dict) and not each.get("finish_reason") and not _text(each) for each in choices
    )


def _text(choice: dict[str, Any]) -> bool:
    """Whether a choice has any content at all."""
    if choice.get("text"):
        return True
    inside = choice.get("delta") or choice.get("message") or {}
    return isinstance(inside, dict) and any(value for name, value in inside.items() if name != "role")
