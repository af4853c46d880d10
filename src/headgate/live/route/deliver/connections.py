"""Connections to engines, kept open between calls, and what the first bytes of an answer mean."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import _EXC_SENTINEL
from aiohttp.http import HttpProcessingError, StreamWriter
from multidict import CIMultiDict, CIMultiDictProxy

from headgate.live.route.request import TURN, Body

log = logging.getLogger("headgate.route")
KEEP_ALIVE = 4.0  # seconds: below the 5 s after which vLLM's server closes an idle connection
GOODBYE = b"HTTP/1.1 408"  # what proxies say before they close an idle connection


class Connections:
    """The connections of a router to its engines, by address."""

    def __init__(self, tls: ssl.SSLContext | bool) -> None:
        self._tls = tls
        self._addresses: dict[str, Address] = {}
        self._pools: dict[str, IdleConnections] = {}

    async def post(
        self, url: str, path: str, body: Body, headers: CIMultiDict[str], connect: float
    ) -> EngineAnswer:
        """Send a request and wait for the head of its answer; connecting may take `connect` seconds."""
        address = self._addresses.get(url) or self._addresses.setdefault(url, _address(url))
        pool = self._pools.get(url) or self._pools.setdefault(url, IdleConnections(url))
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
                    return EngineAnswer(message.code, message.headers, content, connection, pool)
        except HttpProcessingError:
            connection.close()
            raise LegError(Fault.GARBAGE, "the engine's answer is not HTTP") from None
        except BaseException:
            connection.close()
            raise

    def forget_idle(self, seconds: float = KEEP_ALIVE) -> None:
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


class EngineAnswer:
    """An engine's answer whose head was read. `close` ends it and its connection, `keep` only the answer."""

    def __init__(
        self,
        status: int,
        headers: CIMultiDictProxy[str],
        content: aiohttp.StreamReader,
        connection: EngineConnection,
        pool: IdleConnections,
    ) -> None:
        self.status, self.headers, self.content, self.connection = status, headers, content, connection
        self._pool: IdleConnections | None = pool

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
        """Hang up; reading the body raises an error from now on."""
        if self._pool is not None:
            self._pool = None
            if self.content.exception() is None:
                self.content.set_exception(aiohttp.ClientConnectionError("the connection is closed"))
            self.connection.close()


class EngineConnection(ResponseHandler):
    """One connection. `on_read` is called after each read of the socket was parsed, and when it is lost."""

    on_read: Callable[[], None] | None = None
    idle_since = 0.0
    pool: IdleConnections | None = None  # in which it waits for its next call

    def data_received(self, data: bytes) -> None:
        if self.pool is not None:  # nothing was asked
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


class IdleConnections:
    """Idle connections of one engine.

    Where bytes have followed an answer once, the next could be taken for the answer to another client's
    request: from then on every call to that engine has a connection of its own.
    """

    def __init__(self, url: str) -> None:
        self.idle: deque[EngineConnection] = deque()
        self.trusted = True
        self._url = url

    def distrust(self) -> None:
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
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE
        while self.idle:
            connection = self.idle.pop()
            connection.pool = None
            if connection.idle_since > oldest and connection.is_connected() and not connection.should_close:
                return connection
            connection.close()
        return None


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


# -- streams, passed on where they are read


class Tap:
    """On the connection of one answer.

    `send` takes what was parsed and whether it is the last of the stream; it returns what is still to be
    written. Where that is something, and when the stream has ended or failed, the task goes on.
    """

    def __init__(self, answer: EngineAnswer, send: Callable[[bytes, bool], bytes]) -> None:
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


# -- a token, a refusal, or an error to try elsewhere

RETRIED = frozenset((429, 502, 503, 504))


class Fault(Enum):
    """How an upstream call failed; the values are labels of metrics."""

    CONNECT = "connect"
    RESET = "reset"
    STATUS = "status"
    BUSY = "busy"  # a full queue: 503 or 429
    ERROR_EVENT = "error-event"
    ABORT = "abort"  # an engine that shuts down
    EMPTY = "empty"  # ended before anything came
    FIRST_TOKEN = "first-token"  # too late
    IDLE = "idle"
    GARBAGE = "garbage"  # no HTTP, or an answer larger than allowed
    CUT = "cut"  # by the router's own end
    NO_PARAMS = "no-params"  # a prefill without KV parameters


TRIPS = frozenset(
    (Fault.CONNECT, Fault.RESET, Fault.STATUS, Fault.ERROR_EVENT, Fault.ABORT, Fault.EMPTY, Fault.FIRST_TOKEN,
     Fault.IDLE, Fault.GARBAGE)
)  # fmt: skip


class LegError(Exception):
    """One upstream call failed. `status` and `body` are the engine's own answer where it gave one."""

    def __init__(
        self,
        fault: Fault,
        message: str,
        status: int = 0,
        body: bytes = b"",
        content_type: str = "application/json",
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.fault, self.message, self.status, self.body = fault, message, status, body
        self.content_type, self.retry = content_type, retry
        self.retry_after: str | None = None  # as the engine said it

    @property
    def trips(self) -> bool:
        return self.fault in TRIPS and (self.status == 0 or self.status >= 500)

    @property
    def answered(self) -> bool:
        """Whether the engine itself said so, in a whole answer: it lives."""
        return self.fault in (Fault.STATUS, Fault.ERROR_EVENT)

    @property
    def doubtful(self) -> bool:
        """Whether it may be the request's own: any engine would answer so, as vLLM does with 500 where it
        cannot fetch an image. Another engine's answer to the same request tells.
        """
        return self.answered and self.trips and self.status not in RETRIED


class Usage(NamedTuple):
    """Tokens of one request as its engine counted them."""

    prompt: int
    output: int
    cached: int = 0


_ANY = msgspec.json.Decoder()


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object, or an empty one for anything else."""
    try:
        value = _ANY.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def usage_of(data: bytes | None) -> Usage | None:
    """The usage an event or a body tells, None where it tells none."""
    usage = decoded(data).get("usage") if data else None
    if not isinstance(usage, dict):
        return None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    output = usage.get("completion_tokens", usage.get("output_tokens", 0))
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(prompt=_tokens(prompt), output=_tokens(output), cached=_tokens(cached))


def _tokens(told: object) -> int:
    return told if isinstance(told, int) and told >= 0 else 0


def judge_status(
    status: int, body: bytes, content_type: str, retry_500: bool, retry_after: str | None = None
) -> LegError | None:
    """A status other than 2xx as a fault. One that is not retried is passed on as it is: None."""
    if status in RETRIED or (status >= 500 and retry_500):
        busy = status == 429 or (status == 503 and b'"Service Unavailable"' in body)
        kind = Fault.BUSY if busy else Fault.STATUS
        fault = LegError(kind, f"the engine answered {status}", status, body, content_type)
        fault.retry_after = retry_after if status in RETRIED else None
        return fault
    if 300 <= status < 400 or status < 200:
        return LegError(Fault.GARBAGE, f"the engine answered {status}")
    return None


def judge_event(data: bytes) -> LegError | None:
    """The first event of a stream as a fault; None for a token or for what is passed on as it is."""
    if data == b"[DONE]":
        return LegError(Fault.EMPTY, "the stream ended before its first token")
    if b'"error"' in data[:64]:
        error = decoded(data).get("error")
        if isinstance(error, dict):
            code = error.get("code")
            code = code if isinstance(code, int) and 400 <= code < 600 else 500
            if code >= 500 or code == 429:
                return LegError(Fault.ERROR_EVENT, f"the engine's stream began with error {code}", 0)
    return judge_body(data)


def judge_body(body: bytes) -> LegError | None:
    """A whole answer with status 200: an engine that shuts down answers with no text and `abort`."""
    if b'"abort"' in body and aborted(decoded(body)):
        return LegError(Fault.ABORT, "the engine aborted the request before its first token")
    return None


def aborted(answer: dict[str, Any]) -> bool:
    """Whether all choices say `abort` and none has text."""
    return _all_choices(answer, lambda choice: choice.get("finish_reason") == "abort")


def is_empty(data: bytes) -> bool:
    """Whether an event brings neither text nor an end: the role chunk that may come before a token."""
    if b'"delta"' not in data or b'"role"' not in data:
        return False
    return _all_choices(decoded(data), lambda choice: not choice.get("finish_reason"))


def _all_choices(answer: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether there are choices, none has text, and this holds for all of them."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and holds(choice) and not _text(choice) for choice in choices)


def _text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    inside = choice.get("delta") or choice.get("message") or {}
    return isinstance(inside, dict) and any(value for name, value in inside.items() if name != "role")
