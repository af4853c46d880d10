"""What the router itself answers, in OpenAI's shape."""

from __future__ import annotations

import json
from typing import NamedTuple

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    502: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
    508: "server_error",
}


class RefusedError(Exception):
    """A request the router answers itself; `reason` is a short label for metrics."""

    def __init__(self, status: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after = status, reason, message, retry_after
        self.key = ""  # whose key it came with
        self.tries = 0  # engines that were tried
        self.waited = 0.0  # seconds in the queue
        self.written = False  # is it in the access log?


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_object(status: int, message: str, code: str | int | None = None) -> dict[str, object]:
    """`{"error": ...}` as OpenAI's clients read it."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {"message": message, "type": kind, "param": None, "code": status if code is None else code}
    }


NAMED = {"Server": "headgate"}  # else aiohttp names itself and its version


def answer(error: RefusedError) -> Answer:
    """A refusal as a response."""
    headers = {"Content-Type": "application/json", **own_headers(error.tries, error.waited)}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return Answer(error.status, headers, json.dumps(error_object(error.status, error.message)).encode())


def own_headers(tries: int, waited: float) -> dict[str, str]:
    """What every answer says: engines tried, and milliseconds in the queue."""
    return {
        **NAMED,
        "x-headgate-tries": str(tries),
        "x-headgate-wait-ms": f"{1000 * waited:.1f}",
    }


ANTHROPIC_TYPES = {503: "overloaded_error", 504: "timeout_error"}


def error_event(status: int, message: str, path: str = "", torn: bool = False, number: int = 0) -> bytes:
    """The event that ends a broken stream; nothing follows it. Its shape is what clients of the path read.

    OpenAI's client takes any event with an `error`, Anthropic's only one that is named so. A torn event is
    closed first, so that this one is read by itself. `number` is that of the event, for /v1/responses.
    """
    error: dict[str, object] = {"message": message, "type": "server_error", "param": None, "code": status}
    body: dict[str, object] = {"error": error}
    name = b"event: error\n"
    if path == "/v1/messages":
        error = {"type": ANTHROPIC_TYPES.get(status, "api_error"), "message": message}
        body = {"type": "error", "error": error}
    elif path == "/v1/responses":
        told = {"code": "server_error", "message": message, "param": None, "sequence_number": number}
        body = {"type": "error", **told, **body}
    else:
        name = b""
    return (b"\n\n" if torn else b"") + name + b"data: " + json.dumps(body).encode() + b"\n\n"
