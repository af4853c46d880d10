"""Passes a stream on in the callback that read it from the engine's socket; no task wakes for an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headgate.live.route.connections import Answer


class Tap:
    """On the connection of one answer.

    `send` takes what was parsed and whether it is the last of the stream; it returns what is still to be
    written. Where that is something, and when the stream has ended or failed, the task goes on.
    """

    def __init__(self, answer: Answer, send: Callable[[bytes, bool], bytes]) -> None:
        self._content, self._connection, self._send = answer.content, answer.connection, send
        self._left = b""
        self._woken: asyncio.Future[None] | None = None

    async def run(self) -> bytes:
        """Pass on until the end, an error or a client that lags; what is left to be written."""
        self._left = b""
        self._pour()
        if not self._stopped():
            self._woken = asyncio.get_running_loop().create_future()
            self._connection.on_read = self._on_read
            try:
                await self._woken
            finally:
                self._connection.on_read = self._woken = None
        return self._left

    def wake(self) -> None:
        """The answer was closed."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _on_read(self) -> None:
        self._pour()
        if self._stopped():
            self._connection.on_read = None
            self.wake()

    def _stopped(self) -> bool:
        content = self._content
        return bool(
            self._left
            or content.at_eof()
            or content.exception() is not None
            or not self._connection.connected
        )

    def _pour(self) -> None:
        content, seen = self._content, -1
        while not self._left and content.total_bytes != seen and content.exception() is None:
            seen = content.total_bytes  # a read may let a parser go on that had stopped, which brings more
            if chunk := content.read_nowait():
                self._left = self._send(chunk, content.at_eof())
