"""Connections to engines: aiohttp's client protocol and strict parser, kept open between calls.

A session of aiohttp would spend much of a short request's CPU on proxies, cookies, redirects and kinds of
bodies that a router does not have.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import _EXC_SENTINEL
from aiohttp.http import HttpProcessingError, StreamWriter
from multidict import CIMultiDict, CIMultiDictProxy

from headgate.live.route.body import TURN, Body
from headgate.live.route.verdict import Fault, LegError

log = logging.getLogger("headgate.route")
KEEP_ALIVE = 4.0  # seconds: below the 5 s after which vLLM's server closes an idle connection
GOODBYE = b"HTTP/1.1 408"  # what proxies say before they close an idle connection


class EngineConnection(ResponseHandler):
    """One connection. `on_read` is called after each read of the socket was parsed, and when it is lost."""

    on_read: Callable[[], None] | None = None
    idle_since = 0.0
    pool: Pool | None = None  # in which it waits for its next call

    def data_received(self, data: bytes) -> None:
        if self.pool is not None:  # nobody has asked for anything
            if not data.startswith(GOODBYE):
                self.pool.distrust()
            self.close()
            return
        super().data_received(data)
        if data and self.on_read is not None:  # without data it is a parser that goes on after a pause
            self.on_read()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.on_read is not None:
            self.on_read()

    def set_exception(self, exc: BaseException, exc_cause: BaseException = _EXC_SENTINEL) -> None:
        """Bytes that are no HTTP end the body too, which would be waited for otherwise."""
        super().set_exception(exc, exc_cause)
        if self._payload is not None and not self._payload.is_eof() and self._payload.exception() is None:
            self._payload.set_exception(aiohttp.ClientPayloadError("the body is not HTTP"))

    def close(self) -> None:
        """Hang up at once: what an engine has not read yet is not waited for, nor kept."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().close()

    @property
    def has_more(self) -> bool:
        """Whether another answer has come behind the one that was read."""
        return bool(self._buffer)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Streams ask for it after every read; without a pause there is nothing to do."""
        if self._reading_paused:
            super().resume_reading(resume_parser)


class Pool:
    """Idle connections of one engine.

    Where bytes have followed an answer once, the next could be taken for the answer to another client's
    request: from then on every call to that engine has a connection of its own.
    """

    def __init__(self, url: str) -> None:
        self.idle: deque[EngineConnection] = deque()
        self.trusted = True
        self._url = url

    def distrust(self) -> None:
        """Bytes have followed an answer."""
        if self.trusted:
            log.error("engine %s sends more than one answer: each call has its own connection now", self._url)
        self.trusted = False
        while self.idle:
            self.idle.pop().close()

    def put(self, connection: EngineConnection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        connection.pool = self
        self.idle.append(connection)

    def take(self) -> EngineConnection | None:
        """One that may be used again."""
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE
        while self.idle:
            connection = self.idle.pop()
            connection.pool = None
            if connection.idle_since > oldest and connection.is_connected() and not connection.should_close:
                return connection
            connection.close()
        return None


class Answer:
    """An engine's answer whose head was read. `close` ends it and its connection, `keep` only the answer."""

    def __init__(
        self,
        status: int,
        headers: CIMultiDictProxy[str],
        content: aiohttp.StreamReader,
        connection: EngineConnection,
        pool: Pool,
    ) -> None:
        self.status, self.headers, self.content, self.connection = status, headers, content, connection
        self._pool: Pool | None = pool

    def keep(self) -> None:
        """Its body was read to the end: the connection may be used again where both sides allow it."""
        pool, self._pool, connection = self._pool, None, self.connection
        if pool is None:
            return
        transport = connection.transport
        if connection.has_more:
            pool.distrust()
        closing = transport is None or connection.should_close or transport.get_write_buffer_size()
        if closing or not pool.trusted:
            connection.close()
        else:
            pool.put(connection)

    def close(self) -> None:
        """Hang up; whoever reads the body gets an error."""
        if self._pool is not None:
            self._pool = None
            if self.content.exception() is None:
                self.content.set_exception(aiohttp.ClientConnectionError("the connection is closed"))
            self.connection.close()


class Address(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    secure: bool
    named: str  # in the header `Host`
    path: str


def _address(url: str) -> Address:
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    return Address(host, parts.port or (443 if secure else 80), secure, parts.netloc, parts.path)


class Connections:
    """The connections of a router to its engines, by address."""

    def __init__(self, tls: ssl.SSLContext | bool) -> None:
        self._tls = tls
        self._addresses: dict[str, Address] = {}
        self._pools: dict[str, Pool] = {}

    async def post(
        self, url: str, path: str, body: Body, headers: CIMultiDict[str], connect: float
    ) -> Answer:
        """Send a request and wait for the head of its answer; connecting may take `connect` seconds."""
        address = self._addresses.get(url) or self._addresses.setdefault(url, _address(url))
        pool = self._pools.get(url) or self._pools.setdefault(url, Pool(url))
        connection = pool.take()
        if connection is None:  # it has a length, so that `or` will not do
            connection = await self._connected(address, connect)
        try:
            connection.set_response_params(read_until_eof=True, auto_decompress=False)
            headers["Host"], headers["Content-Length"] = address.named, str(len(body))
            writer = StreamWriter(connection, asyncio.get_running_loop())
            await writer.write_headers(f"POST {address.path}{path} HTTP/1.1", headers)
            if len(body) > TURN:
                writer.send_headers()  # else both are copied into one
            await writer.write(body, drain=False)
            while True:
                message, content = await connection.read()
                if not 100 <= message.code < 200 or message.code == 101:
                    return Answer(message.code, message.headers, content, connection, pool)
        except HttpProcessingError:
            connection.close()
            raise LegError(Fault.GARBAGE, "the engine's answer is not HTTP") from None
        except BaseException:
            connection.close()
            raise

    def forget_idle(self, seconds: float = KEEP_ALIVE) -> None:
        """Close those that were not used for so long."""
        oldest = asyncio.get_running_loop().time() - seconds
        for pool in self._pools.values():
            while pool.idle and pool.idle[0].idle_since <= oldest:
                pool.idle.popleft().close()

    async def _connected(self, address: Address, limit: float) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if address.secure and self._tls is True:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    partial(EngineConnection, loop),
                    address.host,
                    address.port,
                    ssl=self._tls if address.secure else None,
                )
        except TimeoutError:
            raise LegError(Fault.CONNECT, "the engine could not be reached in time") from None
        except (OSError, UnicodeError):
            raise LegError(Fault.CONNECT, "the engine could not be reached") from None
        return connection
