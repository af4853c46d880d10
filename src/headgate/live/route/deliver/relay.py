"""One call to an engine: bytes pass untouched, events are seen, time is limited, hang-ups reach it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Protocol

from aiohttp import web
from multidict import CIMultiDict

from headgate.live.route.config import RouteLimits
from headgate.live.route.deliver.connections import (
    Connections,
    EngineAnswer,
    Fault,
    LegError,
    Tap,
    Usage,
    decoded,
    is_empty,
    judge_body,
    judge_event,
    judge_status,
    usage_of,
)
from headgate.live.route.request import APIS, NO_API, Body, error_object, to_client

ERROR_BODY = 1 << 20  # bytes of an engine's error that are passed on
HELD_EVENTS = 2  # events without text that are held back at most


class CountsEvents(Protocol):
    generated: int


class Leg:
    """Until `start` has returned the client has seen nothing and the request may be tried elsewhere."""

    def __init__(
        self, connections: Connections, url: str, path: str, limits: RouteLimits, retry_500: bool = False
    ) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.streaming = False
        self.scans = False  # are its events read? Those of a compressed stream are not
        self.whole = False  # the answer is complete in `head`
        self.head = b""  # to be sent to the client first
        self.scanner = EventScanner(limits.event, path)
        self._connections, self._url, self._path, self._limits = connections, url, path, limits
        self._retry_500 = limits.retry_500 or retry_500
        self._answer: EngineAnswer | None = None
        self._usage: Usage | None = None
        self._sent_rest = False
        self._cut = ""  # why we broke it off ourselves
        self._connecting: asyncio.Timeout | None = None
        self._tap: Tap | None = None

    async def start(self, body: Body, headers: CIMultiDict[str], first_token: float | None = None) -> None:
        if self._cut:
            raise LegError(Fault.CUT, self._cut, retry=False)
        limit = self._limits.first_token if first_token is None else first_token
        loop = asyncio.get_running_loop()
        deadline, late = loop.time() + limit, None
        try:
            answer = await self._send(body, headers, limit)
            late = loop.call_at(deadline, answer.fail, TimeoutError())
            await answer.has_head()
            self.status, self.headers = answer.status, to_client(answer.headers)
            await self._begin(answer)
        except TimeoutError:
            raise self._broken(Fault.FIRST_TOKEN, f"no token within {limit:g} s") from None
        except OSError as error:
            error.__traceback__ = None  # the body keeps the error, a frame of the traceback keeps the body
            raise self._broken(
                Fault.RESET, "the engine closed the connection before its first token"
            ) from None
        except LegError:
            self.close()
            raise
        finally:
            if late is not None:
                late.cancel()

    async def pump(self, client: ClientWriter, progress: Progress, counted: CountsEvents) -> bytes:
        """Up to the last bytes, which are returned; raises LegError. `counted` is told the events so far."""
        assert self._answer is not None
        try:
            last = await self._copy(self._answer, client, progress, counted)
        except OSError as error:
            error.__traceback__ = None
            if progress.writing:
                raise ConnectionResetError("the client is gone") from error
            if progress.silent and not self._cut:
                raise LegError(Fault.IDLE, f"no token for {self._limits.idle:g} s", 504) from None
            raise self._broken(Fault.RESET, "the engine closed the connection before the end") from None
        progress.writing = True
        progress.touch()
        rest = self.scanner.rest()
        self._sent_rest = bool(rest)
        last += rest
        if self.scans and not self.scanner.done and APIS.get(self._path, NO_API).streams:
            await client.write(last)
            raise LegError(Fault.RESET, "the engine ended the stream too early", 502)
        return last

    async def _copy(
        self, answer: EngineAnswer, client: ClientWriter, progress: Progress, counted: CountsEvents
    ) -> bytes:
        scanner, scans, write_now = self.scanner, self.scans, client.now
        feed, touch, time = scanner.feed, progress.touch, progress.time

        def send(chunk: bytes, last: bool) -> bytes:
            progress.last = time()
            passed = feed(chunk) if scans else chunk
            counted.generated = scanner.events
            return passed if last or (passed and not write_now(passed)) else b""

        self._tap = tap = Tap(answer, send)
        progress.writing = False
        touch()
        try:
            while True:
                left = await tap.run()
                if answer.at_end:
                    return left
                if not left:
                    raise ConnectionResetError("the connection is closed")
                progress.writing = True
                await client.write(left)
                progress.writing = False
                touch()
        finally:
            self._tap = None  # it knows `progress`, which knows this leg: no cycle may stay for the collector

    @property
    def has_ended(self) -> bool:
        return self._answer is not None and self._answer.ended

    @property
    def usage(self) -> Usage | None:
        return self._usage or usage_of(self.scanner.usage)

    @property
    def torn(self) -> bool:
        return self.scanner.torn or self._sent_rest

    def break_off(self, why: str) -> None:
        self._cut = why
        if self._answer is not None:
            self._close()
        elif self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        if self._answer is not None:
            if self._answer.at_end and self._answer.error is None:
                self._answer.keep()
            else:
                self._close()

    def _close(self) -> None:
        assert self._answer is not None
        self._answer.close()
        if self._tap is not None:
            self._tap.wake()

    async def _send(self, body: Body, headers: CIMultiDict[str], limit: float) -> EngineAnswer:
        connections, url = self._connections, self._url
        connection = connections.idle(url)
        if connection is None:
            async with asyncio.timeout(limit) as self._connecting:
                connection = await connections.connected(url, self._limits.connect)
            self._connecting = None
        try:
            self._answer = connections.post(connection, url, self._path, body, headers)
        except BaseException:
            connection.close()
            raise
        return self._answer

    async def _begin(self, answer: EngineAnswer) -> None:
        kind = answer.headers.get("Content-Type", "")
        plain = answer.headers.get("Content-Encoding", "identity") == "identity"
        if not 200 <= self.status < 300:
            await self._read_error(kind)
        elif kind.startswith("text/event-stream"):
            self.streaming, self.scans = True, plain
            if plain:
                await self._first_event()
            else:
                self.head = await answer.read()
        elif kind.startswith("text/"):  # a page of something before the engine
            raise LegError(Fault.GARBAGE, "the engine's answer is a text, not JSON or events")
        else:
            await self._read_answer(plain)

    async def _read_error(self, kind: str) -> None:
        body = await self._read_up_to(ERROR_BODY)
        if body is None:
            # vLLM repeats what it does not understand: the length follows the request, not the engine
            message = f"the engine's error {self.status} is larger than {ERROR_BODY} bytes"
            error = json.dumps(error_object(self.status, message, self._path)).encode()
            raise LegError(Fault.STATUS, message, self.status, error, retry=False)
        after = self.headers.get("Retry-After")
        _raise(judge_status(self.status, body, kind, self._retry_500, after))
        self.head, self.whole = body, True

    async def _read_answer(self, plain: bool) -> None:
        body = await self._read_up_to(self._limits.answer_buffer)
        if body is None:
            return
        if plain:
            _raise(judge_body(body))
        self.head, self.whole = body, True
        self._usage = usage_of(body) if plain and b'"usage"' in body else None

    async def _read_up_to(self, most: int) -> bytes | None:
        assert self._answer is not None
        parts, many = [], 0
        while chunk := await self._answer.read():
            parts.append(chunk)
            many += len(chunk)
            if many > most:
                self.head = b"".join(parts)
                return None
        return b"".join(parts)

    async def _first_event(self) -> None:
        assert self._answer is not None
        answer, scanner, held = self._answer, self.scanner, bytearray()
        while True:
            chunk = await answer.read()
            if not chunk:
                raise LegError(Fault.EMPTY, "the stream ended before its first token")
            held += scanner.feed(chunk)
            if scanner.first is None:
                if len(held) <= self._limits.event:
                    continue
                if not scanner.events:
                    raise LegError(Fault.GARBAGE, "the stream brings comments and no token")
                self.head = bytes(held)  # events before the first token repeat much of the request
                return
            if scanner.failed and scanner.first == scanner.error:
                raise LegError(Fault.ERROR_EVENT, "the engine's stream began with an error", 0)
            _raise(judge_event(scanner.first))
            if scanner.events >= HELD_EVENTS or scanner.done or not is_empty(scanner.first):
                if scanner.events > 1 and is_empty(scanner.first):
                    self._judge_second(bytes(held))
                self.head = bytes(held)
                return

    def _judge_second(self, held: bytes) -> None:
        pieces = [piece[6:] for piece in held.split(b"\n\n") if piece.startswith(b"data: ")]
        if len(pieces) > 1 and pieces[1] != b"[DONE]":
            _raise(judge_event(pieces[1]))

    def _broken(self, fault: Fault, message: str) -> LegError:
        self.close()
        return LegError(Fault.CUT, self._cut, retry=False) if self._cut else LegError(fault, message)


def _raise(fault: LegError | None) -> None:
    """Raise it, if there is one. No frame of its traceback may hold it, which would be a cycle."""
    try:
        if fault is not None:
            raise fault
    finally:
        del fault


# -- server-sent events, seen while their bytes pass

EVENT_CAP = 1 << 20  # bytes of one event that are kept; a longer one is passed on unread
DONE = b"[DONE]"
HEAD = 256  # bytes of an event passed on unread in which its name is looked for
ERROR_HEAD = 48  # an error event names its one key within so many bytes
FAILURES = frozenset((b"error", b"response.failed"))


class EventScanner:
    """Finds the ends of events in a stream of bytes, wherever it is cut.

    `feed` returns the bytes that may be passed on: whole events only, so that a stream whose engine dies can
    still be ended with a well-formed error event. A tail longer than `cap` is passed on as it is. Streams
    with carriage returns are passed on at once: the end of an event is not known before the next byte.
    """

    __slots__ = (
        "_cap", "_ends", "_head", "_last", "_opens", "_raw", "_skipping", "_tail",
        "done", "error", "events", "first", "usage",
    )  # fmt: skip

    def __init__(self, cap: int = EVENT_CAP, path: str = "") -> None:
        api = APIS.get(path, NO_API)
        self._ends, self._opens = api.ends, api.opens
        self.events = 0  # events with data
        self.done = False  # `[DONE]` came, or what else ends a stream of this path
        self.error: bytes | None = None  # the data of the newest event that looks like an error
        self.usage: bytes | None = None  # the data of the newest event with a usage object
        self.first: bytes | None = None  # the data of the first event that tells of the engine's work
        self._cap = cap
        self._tail = bytearray()  # of an event not yet ended, line ends as LF
        self._raw = False  # a carriage return was seen: nothing is held back
        self._last = 0  # the newest byte, where CR and LF may belong together
        self._skipping = False  # inside an event longer than the cap
        self._head = b""  # the first lines of that one, where its name is

    @property
    def torn(self) -> bool:
        return self._skipping or (self._raw and bool(self._tail))

    def feed(self, chunk: bytes) -> bytes:
        if (
            not self._ends
            and chunk.startswith(b"data: {")
            and chunk.endswith(b"\n\n")
            and chunk.count(b"\n") == 2
            and self.first is not None
            and not (self._tail or self._skipping or self._raw)
            and not (b"\r" in chunk or b'"usage"' in chunk or b'"error"' in chunk)
        ):
            self.events += 1  # one event with a token, as most reads of a socket bring
            return chunk
        if self._raw or b"\r" in chunk:
            return self._feed_raw(chunk)
        if not self._tail and not self._skipping and chunk.endswith(b"\n\n"):
            self._read(chunk)
            return chunk
        return self._feed_parts(chunk)

    def rest(self) -> bytes:
        """What is held back of an event that never ended. The last counts also without its empty line."""
        piece = bytes(self._tail).rstrip(b"\n")
        if piece and not self._skipping and self._is_last(piece, payload(_data_lines(piece))):
            self.done = True
        return b"" if self._raw or self._skipping else bytes(self._tail)

    def _feed_parts(self, chunk: bytes) -> bytes:
        if self._skipping:
            return self._skip(chunk)
        tail = self._tail
        start = max(len(tail) - 1, 0)
        tail += chunk
        end = tail.rfind(b"\n\n", start)
        if end < 0:
            return self._give_up() if len(tail) > self._cap else b""
        whole = bytes(tail[: end + 2])
        del tail[: end + 2]
        self._read(whole)
        return whole + self._give_up() if len(tail) > self._cap else whole

    def _give_up(self) -> bytes:
        passed = bytes(self._tail)
        self._head = passed[:HEAD].rpartition(b"\n")[0]
        self._tail.clear()
        self._tail += passed[-1:]
        self._skipping = True
        self.first = self.first or b""
        return passed

    def _skip(self, chunk: bytes) -> bytes:
        joined = bytes(self._tail) + chunk
        end = joined.find(b"\n\n")
        self._tail.clear()
        if end < 0:
            self._tail += joined[-1:]
            return chunk
        self._skipping = False
        self.events += 1
        if self._is_last(self._head, b""):
            self.done = True
        cut = end + 2 - (len(joined) - len(chunk))
        return chunk[:cut] + (self.feed(chunk[cut:]) if cut < len(chunk) else b"")

    def _feed_raw(self, chunk: bytes) -> bytes:
        held = b"" if self._raw or self._skipping else bytes(self._tail)
        self._raw = True
        plain = chunk[1:] if self._last == 13 and chunk[:1] == b"\n" else chunk
        self._last = chunk[-1] if chunk else self._last
        self._feed_parts(plain.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        return held + chunk

    def _read(self, whole: bytes) -> None:
        for piece in whole.split(b"\n\n"):
            if piece:
                self._event(piece)

    def _event(self, piece: bytes) -> None:
        data = piece
        if b"\n" in piece or not piece.startswith(b"data:"):
            data = _data_lines(piece)
            if not data:
                return
        self.events += 1
        if self.first is None and not (self._opens and _name(piece) in self._opens):
            self.first = payload(data)
        if b'"usage"' in data and b'"usage":null' not in data:
            self.usage = payload(data)
        elif b'"error"' in data[:ERROR_HEAD]:
            self.error = payload(data)
        if self._is_last(piece, payload(data)):
            self.done = True

    def _is_last(self, piece: bytes, data: bytes) -> bool:
        if data.strip() == DONE:
            return True
        if not self._ends:
            return False
        name = _name(piece)
        if not name and any(each in data for each in self._ends):
            name = str(decoded(data).get("type")).encode()
        if name in FAILURES:
            self.error = data
        return name in self._ends

    @property
    def failed(self) -> bool:
        return bool(self._ends) and self.done and self.error is not None


def _data_lines(piece: bytes) -> bytes:
    lines = [payload(line) for line in piece.split(b"\n") if line.startswith(b"data:")]
    return b"data: " + b"\n".join(lines) if lines else b""


def _name(piece: bytes) -> bytes:
    names = [line[6:].strip() for line in piece.split(b"\n") if line.startswith(b"event:")]
    return names[-1] if names else b""


def payload(line: bytes) -> bytes:
    return line[6:] if line[5:6] == b" " else line[5:]


# -- to the client

HIGH = 1 << 16  # bytes not yet sent above which the router waits for the client


class Streamed(web.StreamResponse):
    _send_headers_immediately = False  # but with the first event


class ClientWriter:
    """`now` writes without a coroutine, most of the cost of an event; where it cannot, `write` waits."""

    __slots__ = ("_held", "_response", "_started", "_transport", "chunked")

    def __init__(self, response: Streamed, request: web.BaseRequest) -> None:
        self._response, self._transport = response, request.transport
        self._held = b""
        self._started = self.chunked = False

    async def begin(self, request: web.BaseRequest) -> None:
        await self._response.prepare(request)
        self.chunked = "Transfer-Encoding" in self._response.headers

    async def write(self, data: bytes) -> None:
        if data:
            held, self._held, self._started = self._held, b"", True
            await self._response.write(held + data)

    def hold(self, data: bytes) -> None:
        self._held = data

    async def end(self, data: bytes = b"") -> None:
        await self._response.write_eof(self._held + data)

    def now(self, data: bytes) -> bool:
        transport = self._transport
        if (
            transport is None
            or not self._started
            or not self.chunked
            or transport.is_closing()
            or transport.get_write_buffer_size() > HIGH
        ):
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


# -- whether an answer makes progress


class Progress:
    """A silent engine is cut after `idle` seconds, a client after `stall`. An event costs no timer."""

    __slots__ = ("_handle", "_idle", "_loop", "_on_idle", "_on_stall", "_stall", "last", "silent", "stalled",
                 "time", "writing")  # fmt: skip

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
        self.time = self._loop.time
        self.last = self.time()  # when something was last passed on
        self._handle = self._loop.call_later(min(idle, stall), self._check)

    def touch(self) -> None:
        self.last = self.time()

    def stop(self) -> None:
        self._handle.cancel()

    def _check(self) -> None:
        limit = self._stall if self.writing else self._idle
        left = self.last + limit - self.time()
        if left > 0.001:
            self._handle = self._loop.call_later(min(left, self._stall), self._check)
        elif self.writing:
            self.stalled = True
            self._on_stall()
        else:
            self.silent = True
            self._on_idle()
