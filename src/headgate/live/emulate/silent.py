"""Connections that send no request are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

PATIENCE = 30.0  # seconds until a new connection must have sent its first request


class Silent:
    """A timer for each new connection, which goes with the connection: it would keep the handler in memory.

    aiohttp tells its server of a lost connection, and nobody else; its handlers have no place for a timer.
    """

    def __init__(self, server: web.Server) -> None:
        self._timers: dict[Any, asyncio.TimerHandle] = {}
        lost = server.connection_lost

        def connection_lost(handler: Any, exc: BaseException | None = None) -> None:
            self._stop(handler)
            lost(handler, exc)

        server.connection_lost = connection_lost  # type: ignore[method-assign]

    def watch(self, handler: Any) -> None:
        """A new connection."""
        self._timers[handler] = asyncio.get_running_loop().call_later(PATIENCE, self._over, handler)

    def _over(self, handler: Any) -> None:
        self._stop(handler)
        under_way = getattr(handler, "_current_request", None) is not None
        silent = not under_way and not getattr(handler, "_request_count", 1)
        if silent and handler.transport is not None:
            handler.transport.close()

    def _stop(self, handler: Any) -> None:
        timer = self._timers.pop(handler, None)
        if timer is not None:
            timer.cancel()
