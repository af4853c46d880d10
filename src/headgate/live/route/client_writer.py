"""Writes an answer to its client: straight to the transport while the client keeps up."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

HIGH = 1 << 16  # bytes not yet sent above which the router waits for the client


class ClientWriter:
    """`now` writes a chunk without waiting and without a coroutine, which is most of the cost of an event.

    It may be used after the first `write`, which sends the head. Where it cannot be used, or the client does
    not keep up, it says so and `write` waits.
    """

    __slots__ = ("_chunked", "_response", "_transport", "_writer", "chunked")

    def __init__(
        self, response: web.StreamResponse, writer: AbstractStreamWriter, transport: asyncio.Transport | None
    ) -> None:
        self._response, self._writer = response, writer
        self.chunked: bool = response.chunked or getattr(writer, "chunked", False)
        self._chunked = transport if self.chunked else None  # other answers are framed by their length
        self._transport: asyncio.Transport | None = None  # None before the head is sent

    async def write(self, data: bytes) -> None:
        """Write it, and wait until the client has read enough."""
        await self._response.write(data)
        self._transport = self._chunked if data else self._transport
        if self._transport is not None and self._transport.get_write_buffer_size() > HIGH:
            await self._writer.drain()

    def now(self, data: bytes) -> bool:
        """Write it at once; False: nothing was written."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > HIGH:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True
