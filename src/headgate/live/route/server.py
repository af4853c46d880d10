"""The HTTP server before clients: aiohttp's strict parser with limits it does not have by itself."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from headgate.core.errors import InputError
from headgate.live.route.config import Front

log = logging.getLogger("headgate.route.http")
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
# what is no HTTP is answered with 400; a log of it would hold a client's raw bytes
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
LINGER = 2.0  # seconds for which the rest of a refused body is read
BUFFER = 1 << 16


class GuardedServer(web.Server):
    """Closes connections whose first request head does not come in time, and those beyond the limit."""

    def __init__(self, handler: Handler, front: Front) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,  # a client that hangs up cancels its handler
            max_line_size=front.header_limit,
            max_field_size=front.header_limit,
            max_headers=front.headers,
            keepalive_timeout=front.keep_alive,
            lingering_time=LINGER,
            read_bufsize=BUFFER,
            auto_decompress=False,
            access_log=None,
            logger=log,
        )
        self.refused = 0
        self._front = front
        self._guards: dict[RequestHandler, asyncio.TimerHandle] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Start the clock of a new connection."""
        super().connection_made(handler, transport)
        if len(self._connections) > self._front.connections:
            self.refused += 1
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._guards[handler] = loop.call_later(self._front.head_timeout, self._check, handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Its clock is no longer needed."""
        self.began(handler)
        super().connection_lost(handler, exc)

    def began(self, handler: RequestHandler) -> None:
        """A whole request head came over this connection."""
        guard = self._guards.pop(handler, None)
        if guard is not None:
            guard.cancel()

    def _check(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        if self._guards.pop(handler, None) is not None:
            self.refused += 1
            transport.abort()


def server_tls(front: Front) -> ssl.SSLContext | None:
    """TLS towards clients, with client certificates where an authority is named."""
    if front.tls_cert is None or front.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(front.tls_cert, front.tls_key)
        if front.client_ca is not None:
            context.load_verify_locations(front.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"TLS of the front: {error}; check tls_cert, tls_key and client_ca") from None
    return context


def engine_tls(front: Front) -> ssl.SSLContext | bool:
    """TLS towards engines: the system's authorities, or the one that is named."""
    if front.engine_ca is None and front.engine_cert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=front.engine_ca)
        if front.engine_cert is not None:
            context.load_cert_chain(front.engine_cert, front.engine_cert_key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"TLS to engines: {error}; check engine_ca, engine_cert and engine_cert_key"
        ) from None
    return context
