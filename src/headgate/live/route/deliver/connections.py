"""Connections to engines, kept open between calls, and what the first bytes of an answer mean."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping

from headgate.live.route.request import TURN, Body

log = logging.getLogger("headgate.route")
KEEP_ALIVE = 4.0  # seconds: below the 5 s after which vLLM's server closes an idle connection
NOT_HTTP = "the engine's answer is not HTTP"
GOODBYE = b"HTTP/1.1 408"  # what proxies say before they close an idle connection


class Connections:
    def __init__(self, tls: ssl.SSLContext | bool) -> None:
        self._tls = tls
        self._pools: dict[str, IdleConnections] = {}

    def idle(self, url: str) -> EngineConnection | None:
        return self._pool(url).take()

    def post(
        self, connection: EngineConnection, url: str, path: str, body: Body, headers: CIMultiDict[str]
    ) -> EngineAnswer:
        pool = self._pool(url)
        return connection.send(_asked(pool.address, path, headers, len(body)), body, pool)

    def _pool(self, url: str) -> IdleConnections:
        return self._pools.get(url) or self._pools.setdefault(url, IdleConnections(url))

    def forget_idle(self, seconds: float = KEEP_ALIVE) -> None:
        oldest = asyncio.get_running_loop().time() - seconds
        for pool in self._pools.values():
            while pool.idle and pool.idle[0].idle_since <= oldest:
                pool.idle.popleft().close()

    async def connected(self, url: str, limit: float) -> EngineConnection:
        address, loop = self._pool(url).address, asyncio.get_running_loop()
        if address.secure and self._tls is True:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(limit):
                tls = self._tls if address.secure else None
                _, connection = await loop.create_connection(
                    EngineConnection, address.host, address.port, ssl=tls
                )
        except TimeoutError:
            raise LegError(Fault.CONNECT, "the engine could not be reached in time") from None
        except (OSError, UnicodeError):
            raise LegError(Fault.CONNECT, "the engine could not be reached") from None
        return connection


HEADS = 1 << 16  # bytes of an answer's head, or of what follows its last chunk
INTERIM = 32  # answers such as 100 and 103 before the one that counts
SIZE_LINE = 256  # bytes of the line before a chunk
MOST_TOKENS = 1 << 28  # of one request: what an engine says beyond is not true
FULL = 1 << 17  # bytes of an answer above which no more is read until some are taken
STATUS = re.compile(rb"HTTP/1[.]([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\0-\x08\x0a-\x1f\x7f]*)")
SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t -~]*)?")
NO_HEADERS: MultiMapping[str] = CIMultiDictProxy(CIMultiDict())
LENGTH = re.compile("[0-9]{1,15}")


def _asked(address: Address, path: str, headers: CIMultiDict[str], length: int) -> bytes:
    lines = [f"POST {address.path}{path} HTTP/1.1", f"Host: {address.named}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {length}", "", ""]
    head = "\r\n".join(lines)
    if head.count("\r") != len(lines) - 1 or head.count("\n") != len(lines) - 1 or "\0" in head:
        raise LegError(Fault.GARBAGE, "a header holds a line's end", retry=False)  # no parser lets it through
    return head.encode("utf-8", "surrogateescape")


@lru_cache(64)
def _head_of(head: bytes) -> tuple[int, bool, CIMultiDictProxy[str]]:
    """Status, whether it is HTTP/1.1, and headers. The answers of a second have a few heads between them."""
    first, *lines = head.split(b"\r\n")
    said = STATUS.fullmatch(first)
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines:
        match = HEADER.fullmatch(line)
        if match is None or said is None:
            raise LegError(Fault.GARBAGE, NOT_HTTP)
        headers.add(match[1].decode(), match[2].strip(b" \t").decode("utf-8", "surrogateescape"))
    if said is None:
        raise LegError(Fault.GARBAGE, NOT_HTTP)
    return int(said[2]), said[1] == b"1", CIMultiDictProxy(headers)


@lru_cache(1024)  # most events are as long as another one was
def _size(line: bytes) -> int:
    size = SIZE.fullmatch(line)
    if size is None:
        raise LegError(Fault.GARBAGE, NOT_HTTP)
    return int(size[1], 16)


class EngineAnswer:
    __slots__ = ("_paused", "_pool", "_waiter", "connection", "ended", "error", "headers", "on_data",
                 "parts", "status")  # fmt: skip

    def __init__(self, connection: EngineConnection, pool: IdleConnections) -> None:
        self.status = 0  # before its head is there
        self.headers: MultiMapping[str] = NO_HEADERS
        self.connection = connection
        self.parts: list[bytes] = []  # of the body, not taken yet
        self.ended = False  # its last byte has come
        self.error: Exception | None = None
        self.on_data: Callable[[], None] | None = None  # called after each read of the socket, and at the end
        self._pool: IdleConnections | None = pool
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False

    @property
    def at_end(self) -> bool:
        return self.ended and not self.parts

    async def has_head(self) -> None:
        while not self.status:
            self._raise()
            await self._wait()

    async def read(self) -> bytes:
        while not self.parts:
            self._raise()
            if self.ended:
                return b""
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        parts = self.parts
        if self._paused:
            self._paused = False
            self.connection.resume()
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data

    def told(self) -> None:
        if self.on_data is not None:
            self.on_data()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if len(self.parts) > 1 and not self._paused and sum(map(len, self.parts)) > FULL:
            self._paused = self.connection.pause()

    def fail(self, error: Exception) -> None:
        if not self.ended and self.error is None:
            self.error = error
            self.told()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _raise(self) -> None:
        """No frame of the traceback may hold the error, which would be a cycle."""
        error = self.error
        if isinstance(error, LegError):
            raise LegError(error.fault, error.message)
        if error is not None:
            raise type(error)(*error.args)

    def keep(self) -> None:
        """Its body was read to the end: the connection may be used again where both sides allow it."""
        pool, self._pool, connection = self._pool, None, self.connection
        if pool is None:
            return
        if connection.has_more:
            pool.distrust()
        if connection.is_reusable and pool.trusted:
            connection.answer = None
            pool.put(connection)
        else:
            connection.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool = None
            self.parts.clear()
            if self.error is None:
                self.error = ConnectionResetError("the connection is closed")
                self.told()
            self.connection.close()


class EngineConnection(asyncio.Protocol):
    """One connection: requests go out, answers are parsed. Whatever is not plainly HTTP/1 ends it.

    What stands in the way of one reading is refused: a length and chunks at once, two lengths, any coding
    but `chunked`, folded lines, bare line feeds.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: EngineAnswer | None = None
        self.pool: IdleConnections | None = None  # in which it waits for its next call
        self.idle_since = 0.0
        self.has_more = False  # bytes have followed the answer that was read
        self._buffer = b""  # not parsed yet
        self._read: Callable[[EngineAnswer, bytes], bytes] = self._head
        self._left = 0  # bytes that the body, or its chunk, still has; before the head: interim answers
        self._keeps = False  # both sides will use the connection again

    def send(self, head: bytes, body: Body, pool: IdleConnections) -> EngineAnswer:
        assert self.transport is not None
        self.answer = answer = EngineAnswer(self, pool)
        self._read, self._left = self._head, 0
        if len(body) > TURN:
            self.transport.write(head)
            self.transport.write(body)
        else:
            self.transport.write(head + body)
        return answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is not None and answer.error is not None:
            return
        if answer is None or answer.ended:  # nothing was asked, or all was answered
            self.has_more = True
            if self.pool is not None and not data.startswith(GOODBYE):
                self.pool.distrust()
            self.close()
            return
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        try:
            while data and not answer.ended:
                before = self._read
                data = before(answer, data)
                if self._read is before:
                    break
            if answer.ended:
                self.has_more = bool(data)
            else:
                self._buffer = data
        except LegError as error:
            error.__traceback__ = None
            self._end(error if not answer.status else ConnectionResetError(error.message))
            return
        answer.told()

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self.answer
        if exc is None and self._read == self._until_end and answer is not None and answer.error is None:
            answer.ended = True  # else it was closed here, and may lack its end
            answer.told()
        self._end(exc if isinstance(exc, OSError) else ConnectionResetError("the connection is closed"))
        self.transport = self.answer = None  # no cycle may stay for the collector
        self._read = lambda answer, data: data

    def _end(self, error: Exception) -> None:
        if self.answer is not None:
            self.answer.fail(error)
        self.close()

    def close(self) -> None:
        """Hang up at once: what an engine has not read yet is not waited for, nor kept."""
        if self.transport is not None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            else:
                self.transport.close()

    def pause(self) -> bool:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        return True

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def is_connected(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        transport = self.transport
        idle = self.is_connected and transport is not None and not transport.get_write_buffer_size()
        return idle and self._keeps and not self.has_more

    # -- parts of an answer; each returns what it has not used, and says which part is next

    def _head(self, answer: EngineAnswer, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > HEADS:
            if len(data) > HEADS:
                raise LegError(Fault.GARBAGE, NOT_HTTP)
            return data
        status, newer, headers = _head_of(data[:end])
        data = data[end + 4 :]
        if status < 200 and status != 101:
            self._read, self._left = self._head, self._left + 1
            if self._left > INTERIM:
                raise LegError(Fault.GARBAGE, NOT_HTTP)
            return data
        self._frame(answer, status, headers, newer)
        answer.status, answer.headers = status, headers
        return data

    def _frame(self, answer: EngineAnswer, status: int, headers: MultiMapping[str], newer: bool) -> None:
        lengths, codings = headers.getall("Content-Length", []), headers.getall("Transfer-Encoding", [])
        self._keeps = newer and "close" not in ",".join(headers.getall("Connection", ())).lower()
        if codings:
            if lengths or not newer or len(codings) > 1 or codings[0].lower() != "chunked":
                raise LegError(Fault.GARBAGE, NOT_HTTP)
            self._read, self._left = self._chunks, 0
        elif lengths:
            if len(lengths) > 1 or LENGTH.fullmatch(lengths[0]) is None:
                raise LegError(Fault.GARBAGE, NOT_HTTP)
            self._read, self._left = self._length, int(lengths[0])
        else:
            self._read, self._keeps = self._until_end, False
        if status in (101, 204, 304):
            answer.ended, self._keeps = True, False  # what is announced for it may yet come
        elif lengths and not self._left:
            answer.ended = True

    def _length(self, answer: EngineAnswer, data: bytes) -> bytes:
        part, rest = data[: self._left], data[self._left :]
        answer.parts.append(part)
        self._left -= len(part)
        answer.ended = not self._left
        return rest

    def _until_end(self, answer: EngineAnswer, data: bytes) -> bytes:
        answer.parts.append(data)
        return b""

    def _chunks(self, answer: EngineAnswer, data: bytes) -> bytes:
        """`_left` is what a chunk has left, with the end of its line."""
        at, end, parts = 0, len(data), answer.parts
        while at < end:
            left = self._left
            if not left:
                line = data.find(b"\r\n", at, at + SIZE_LINE)
                if line < 0:
                    if end - at >= SIZE_LINE:
                        raise LegError(Fault.GARBAGE, NOT_HTTP)
                    return data[at:]
                left = _size(data[at:line])
                if not left:
                    self._read = self._trailer
                    return data[line:]
                at, left = line + 2, left + 2
            if end - at >= left:
                if data[at + left - 2 : at + left] != b"\r\n":
                    raise LegError(Fault.GARBAGE, NOT_HTTP)
                if left > 2:
                    parts.append(data[at : at + left - 2])
                at, self._left = at + left, 0
            else:
                more = min(end - at, left - 2)
                if more:
                    parts.append(data[at : at + more])
                self._left = left - more
                return data[at + more :]
        return b""

    def _trailer(self, answer: EngineAnswer, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > HEADS:
                raise LegError(Fault.GARBAGE, NOT_HTTP)
            return data
        answer.ended = True
        return data[end + 4 :]


class IdleConnections:
    """Where bytes have followed an answer once, the next could be taken for the answer to another client's
    request: from then on every call to that engine has a connection of its own.
    """

    def __init__(self, url: str) -> None:
        self.idle: deque[EngineConnection] = deque()
        self.trusted = True
        self.address, self._url = _address(url), url

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
            if connection.idle_since > oldest and connection.is_connected:
                return connection
            connection.close()
        return None


class Address(NamedTuple):
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
    """`send` takes what was parsed and whether it is the last of the stream; it returns what is still to be
    written. Where that is something, and when the stream has ended or failed, the task goes on.
    """

    def __init__(self, answer: EngineAnswer, send: Callable[[bytes, bool], bytes]) -> None:
        self._answer, self._send = answer, send
        self._left = b""
        self._woken: asyncio.Future[None] | None = None

    async def run(self) -> bytes:
        self._left = b""
        if not self._poured():
            self._woken = asyncio.get_running_loop().create_future()
            self._answer.on_data = self._on_data
            try:
                await self._woken
            finally:
                self._answer.on_data = self._woken = None
        return self._left

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _on_data(self) -> None:
        if self._poured():
            self._answer.on_data = None
            self.wake()

    def _poured(self) -> bool:
        answer = self._answer
        if answer.parts:
            self._left = self._send(answer.take(), answer.ended)
        return bool(self._left) or answer.ended or answer.error is not None


# -- a token, a refusal, or an error to try elsewhere

RETRIED = frozenset((429, 502, 503, 504))


class Fault(Enum):
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
        return self.fault in (Fault.STATUS, Fault.ERROR_EVENT)

    @property
    def doubtful(self) -> bool:
        """Whether it may be the request's own: any engine would answer so, as vLLM does with 500 where it
        cannot fetch an image. Another engine's answer to the same request tells.
        """
        return self.answered and self.trips and self.status not in RETRIED


class Usage(NamedTuple):
    prompt: int
    output: int
    cached: int = 0


_ANY = msgspec.json.Decoder()


def decoded(data: bytes) -> dict[str, Any]:
    try:
        value = _ANY.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


AUDIO_TOKENS = 50  # a second, where an engine tells seconds


def usage_of(data: bytes | None) -> Usage | None:
    """None where it tells none. OpenAI's newer interface has it in the response, Anthropic's first event in
    the message. Anthropic counts what a cache had beside the input, the others within it.
    """
    told = decoded(data) if data else {}
    inside = told.get("response") or told.get("message")
    usage = told.get("usage") or (inside.get("usage") if isinstance(inside, dict) else None)
    if not isinstance(usage, dict):
        return None
    output = _tokens(usage.get("completion_tokens", usage.get("output_tokens")))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _tokens(details.get("cached_tokens")) if isinstance(details, dict) else 0
    prompt = _tokens(usage.get("prompt_tokens", usage.get("input_tokens")))
    if usage.get("type") == "duration":
        prompt = AUDIO_TOKENS * _tokens(usage.get("seconds"))
    elif "cache_read_input_tokens" in usage:
        cached = _tokens(usage["cache_read_input_tokens"])
        prompt += cached + _tokens(usage.get("cache_creation_input_tokens"))
    return Usage(prompt=prompt, output=output, cached=cached)


def _tokens(told: object) -> int:
    return told if isinstance(told, int) and 0 <= told <= MOST_TOKENS else 0


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
    if b'"abort"' in body and _all_choices(decoded(body), lambda one: one.get("finish_reason") == "abort"):
        return LegError(Fault.ABORT, "the engine aborted the request before its first token")
    return None


def is_empty(data: bytes) -> bool:
    """Whether an event brings neither text nor an end: the role chunk that may come before a token."""
    if b'"delta"' not in data or b'"role"' not in data:
        return False
    return _all_choices(decoded(data), lambda choice: not choice.get("finish_reason"))


def _all_choices(answer: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> bool:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and holds(choice) and not _text(choice) for choice in choices)


def _text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    inside = choice.get("delta") or choice.get("message") or {}
    return isinstance(inside, dict) and any(value for name, value in inside.items() if name != "role")
