"""Bodies of requests: read in bounded time and size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from headgate.live.emulate.problems import ProblemError, invalid

BODY_PATIENCE = 60.0  # seconds to send a body


async def read_bytes(request: web.Request, count: Callable[[int], None]) -> bytes:
    """The body, in bounded time and size; `count` hears of its bytes as they come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            return await _pieces(request, count)
    except TimeoutError:
        raise ProblemError("The body did not come in time.", 408, type="Bad Request") from None


async def _pieces(request: web.Request, count: Callable[[int], None]) -> bytes:
    """Not `request.read()`, which would keep the body for as long as the answer takes."""
    most, found = request.client_max_size, bytearray()
    async for piece in request.content.iter_any():
        found += piece
        count(len(piece))
        if len(found) > most:
            raise ProblemError("The body is too large.", 413, type="Bad Request")
    return bytes(found)


async def read_json(request: web.Request) -> dict[str, Any]:
    """A body that is an object, for the small endpoints."""
    try:
        found = msgspec.json.decode(await read_bytes(request, lambda more: None))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"JSON decode error: {str(error)[:200]}", "body") from None
    if not isinstance(found, dict):
        raise invalid("Input should be a valid dictionary", "body")
    return found
