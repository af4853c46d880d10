"""Passes a stream on in the callback that read it from the engine's socket; no task wakes for an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp


class Tap(asyncio.Protocol):
    """Stands before aiohttp's protocol of one call: that still parses every byte.

    `send` takes what was parsed and whether it is the last of the stream; it returns what is still to be written.
    Where that is something, the stream has ended or failed, or the connection is lost, aiohttp's protocol gets
    its place back and the task goes on.
    """

    def __init__(self, response: aiohttp.ClientResponse, send: Callable[[bytes, bool], bytes]) -> None:
        self._content, self._send = response.content, send
        self._connection, self._left = response.connection, b""
        self._woken: asyncio.Future[None] | None = None

    async def run(self) -> bytes:
        """Pass on until the end, an error or a client that lags; what is left to be written."""
        self._left = b""
        self._pour()
        if self._left or self._over() or self._connection is None:
            return self._left
        transport = self._connection.transport
        if transport is None:
            return b""
        self._transport, self._handler = transport, self._connection.protocol
        self._woken = asyncio.get_running_loop().create_future()
        transport.set_protocol(self)
        try:
            await self._woken
        finally:
            self.stop()
        return self._left

    def stop(self) -> None:
        """Give aiohttp's protocol its place back and wake the task. Again does nothing."""
        woken, self._woken = self._woken, None
        if woken is not None:
            self._transport.set_protocol(self._handler)
            if not woken.done():
                woken.set_result(None)

    def _over(self) -> bool:
        return self._content.at_eof() or self._content.exception() is not None

    def _pour(self) -> None:
        content, seen = self._content, -1
        while not self._left and content.total_bytes != seen and content.exception() is None:
            seen = content.total_bytes  # a read may let a parser go on that had stopped, which brings more
            if chunk := content.read_nowait():
                self._left = self._send(chunk, content.at_eof())

    # -- the transport's calls ---------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse, then pass on what came of it."""
        self._handler.data_received(data)
        if self._woken is None:  # parsing it ended the call
            return
        self._pour()
        if self._left or self._over():
            self.stop()

    def eof_received(self) -> None:
        self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._handler.connection_lost(exc)
        if self._woken is not None:
            self._pour()
            self.stop()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()
