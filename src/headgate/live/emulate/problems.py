"""Errors as vLLM tells them: the same status, the same JSON."""

from __future__ import annotations

import msgspec
from aiohttp import web

TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "Service Unavailable"}
BUSY = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)


class ProblemError(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, type: str = "") -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.type = type or TYPES.get(status, "Bad Request")

    def body(self) -> bytes:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": told})

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body(), content_type="application/json")


def invalid(message: str, param: str | None = None) -> ProblemError:
    """A body that is not what the endpoint takes."""
    return ProblemError(f"1 validation error:\n  {message}", 400, param, "Bad Request")


def parameter(message: str, name: str, value: object = None) -> ProblemError:
    """A field with a value that makes no sense."""
    shown = "" if value is None else f", value={value}"
    return ProblemError(f"{message} (parameter={name}{shown})", 400, name)


def busy() -> ProblemError:
    """The queue is full."""
    return ProblemError(BUSY, 503)


def detail(status: int, text: str) -> web.Response:
    """What vLLM's web framework says of paths and methods it does not know."""
    return web.json_response({"detail": text}, status=status)
