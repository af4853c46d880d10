"""Whether an answer makes progress: an engine that falls silent, or a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Progress:
    """One timer per answer. A silent engine is cut after `idle` seconds, a client after `stall`.

    `writing` is set while the router waits for the client. The timer looks again when the limit could be
    over, so that an event costs two assignments and no timer.
    """

    __slots__ = ("_handle", "_idle", "_last", "_loop", "_on_idle", "_on_stall", "_stall", "silent", "stalled",
                 "writing")  # fmt: skip

    def __init__(
        self,
        idle: float,
        stall: float,
        on_idle: Callable[[], None],
        on_stall: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.silent = self.stalled = self.writing = False
        self._loop = asyncio.get_running_loop() if loop is None else loop
        self._idle, self._stall, self._on_idle, self._on_stall = idle, stall, on_idle, on_stall
        self._last = self._loop.time()
        self._handle = self._loop.call_later(min(idle, stall), self._check)

    def touch(self) -> None:
        """The other side begins to be waited for."""
        self._last = self._loop.time()

    def stop(self) -> None:
        """The answer has ended."""
        self._handle.cancel()

    def _check(self) -> None:
        limit = self._stall if self.writing else self._idle
        left = self._last + limit - self._loop.time()
        if left > 0.001:
            self._handle = self._loop.call_later(min(left, self._stall), self._check)
        elif self.writing:
            self.stalled = True
            self._on_stall()
        else:
            self.silent = True
            self._on_idle()
