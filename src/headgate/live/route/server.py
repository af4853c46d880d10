"""The HTTP server before clients: aiohttp's strict parser with limits it does not have by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from headgate.core.errors import InputError
from headgate.live.route.addresses import client_at
from headgate.live.route.config import Front
from headgate.live.route.shares import Shares

log = logging.getLogger("headgate.route.http")
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
# what is no HTTP is answered with 400; a log of it would hold a client's raw bytes
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
LINGER = 2.0  # seconds for which the rest of a refused body is read
BUFFER = 1 << 16


class GuardedServer(web.Server):
    """Closes connections whose first request head does not come in time, and those beyond a limit.

    A connection is counted from the moment it is accepted, its TLS handshake included.
    """

    def __init__(self, handler: Handler, front: Front, tls: ssl.SSLContext | None = None) -> None:
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
        self.open = Shares(front.connections, front.client_connections)
        self._front, self._tls = front, tls
        self._clients: dict[RequestHandler, str] = {}
        self._guards: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    def __call__(self) -> RequestHandler:
        """The protocol of a connection that was accepted."""
        return super().__call__() if self._tls is None else _Accepted(self)  # type: ignore[return-value]

    def accepted(self, accepted: socket.socket, peer: object) -> None:
        """Count a connection whose TLS handshake is to come."""
        client = client_at(peer)
        if not self.open.take(client):
            self.refused += 1
            accepted.close()
            return
        task = asyncio.create_task(self._shake(accepted, client))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, accepted: socket.socket, client: str) -> None:
        handler = super().__call__()
        self._clients[handler] = client
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, accepted, ssl=self._tls, ssl_handshake_timeout=self._front.head_timeout
            )
        except OSError:  # of TLS, too: it is no handshake, or none in time
            self.refused += 1
            self._gone(handler)
        except BaseException:
            self._gone(handler)
            raise

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Start the clock of a new connection."""
        super().connection_made(handler, transport)
        if handler not in self._clients:
            client = client_at(transport.get_extra_info("peername"))
            if not self.open.take(client):
                self.refused += 1
                transport.abort()
                return
            self._clients[handler] = client
        loop = asyncio.get_running_loop()
        self._guards[handler] = loop.call_later(self._front.head_timeout, self._check, handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Its clock is no longer needed."""
        self.began(handler)
        self._gone(handler)
        super().connection_lost(handler, exc)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close all connections, those that never were any included."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await super().shutdown(timeout)

    def began(self, handler: RequestHandler) -> None:
        """A whole request head came over this connection."""
        guard = self._guards.pop(handler, None)
        if guard is not None:
            guard.cancel()

    def _gone(self, handler: RequestHandler) -> None:
        client = self._clients.pop(handler, None)
        if client is not None:
            self.open.give_back(client)

    def cut_hung_up(self) -> None:
        """End connections whose clients hung up behind what is not read yet, such as pipelined requests.

        Nothing more is read from them while requests wait, so their end is asked for. Linux tells it.
        """
        if not hasattr(select, "POLLRDHUP"):
            return
        gone = select.poll()
        paused = {}
        for handler in self._connections:
            transport = handler.transport
            if transport is not None and (handler._reading_paused or handler._buffer_paused):
                number = transport.get_extra_info("socket").fileno()
                if number >= 0:
                    paused[number] = transport
                    gone.register(number, select.POLLRDHUP)
        for number, _ in gone.poll(0) if paused else ():
            paused[number].abort()

    def _check(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        if self._guards.pop(handler, None) is not None:
            self.refused += 1
            transport.abort()


class _Accepted(asyncio.Protocol):
    """Takes a connection away from the loop before its TLS handshake.

    A server of asyncio with TLS tells nothing of a connection until its handshake is done, and nothing at all
    of one whose handshake fails.
    """

    def __init__(self, server: GuardedServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = cast(asyncio.Transport, transport)
        peer = accepted.get_extra_info("peername")
        try:
            taken = socket.socket(fileno=os.dup(accepted.get_extra_info("socket").fileno()))
        except OSError:  # no descriptor is left
            self._server.refused += 1
        else:
            self._server.accepted(taken, peer)
        accepted.abort()  # it has read nothing yet, and the other descriptor stays open


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
