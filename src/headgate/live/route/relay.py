"""One upstream call: bytes pass untouched, events are seen, time is limited, hang-ups reach the engine."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple, Protocol

import aiohttp
from multidict import CIMultiDict

from headgate.live.route.answers import error_object
from headgate.live.route.body import Body
from headgate.live.route.client_writer import ClientWriter
from headgate.live.route.connections import Answer, Connections
from headgate.live.route.events import LAST_EVENTS, EventScanner
from headgate.live.route.headers import connection_names, to_client
from headgate.live.route.progress import Progress
from headgate.live.route.tap import Tap
from headgate.live.route.verdict import (
    Fault,
    LegError,
    Usage,
    is_empty,
    judge_body,
    judge_event,
    judge_status,
    usage_of,
)

ERROR_BODY = 1 << 20  # bytes of an engine's error that are passed on
HELD_EVENTS = 2  # events without text that are held back at most


class Times(NamedTuple):
    """Limits of one call, in seconds and bytes."""

    connect: float
    first_token: float
    idle: float
    answer_buffer: int
    event: int
    retry_500: bool = False


class Counted(Protocol):
    """Whoever wants to know how far a stream is."""

    generated: int


class Leg:
    """A call to one engine. `start` returns with its first token or whole answer; `pump` passes the rest.

    Until `start` has returned the client has seen nothing and the request may be tried elsewhere.
    """

    def __init__(self, connections: Connections, url: str, path: str, times: Times) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.streaming = False
        self.scans = False  # are its events read? Those of a compressed stream are not
        self.whole = False  # the answer is complete in `head`
        self.head = b""  # to be sent to the client first
        self.scanner = EventScanner(times.event, path)
        self._connections, self._url, self._path, self._times = connections, url, path, times
        self._answer: Answer | None = None
        self._usage: Usage | None = None
        self._sent_rest = False
        self._cut = ""  # why we broke it off ourselves
        self._timer: asyncio.Timeout | None = None
        self._tap: Tap | None = None

    async def start(self, body: Body, headers: CIMultiDict[str], first_token: float | None = None) -> None:
        """Send the request and wait for its first token; raises LegError."""
        if self._cut:
            raise LegError(Fault.CUT, self._cut, retry=False)
        limit = self._times.first_token if first_token is None else first_token
        try:
            async with asyncio.timeout(limit) as self._timer:
                await self._send(body, headers)
                await self._begin()
        except TimeoutError:
            raise self._broken(Fault.FIRST_TOKEN, f"no token within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            error.__traceback__ = None  # the body keeps the error, a frame of the traceback keeps the body
            raise self._broken(
                Fault.RESET, "the engine closed the connection before its first token"
            ) from None
        except LegError:
            self.close()
            raise

    async def pump(self, client: ClientWriter, progress: Progress, counted: Counted) -> bytes:
        """Pass the rest on as it comes, up to the last bytes, which are returned.

        Raises LegError when the engine breaks off or falls silent. `counted` is told the events so far, from
        which lengths are estimated while the request runs.
        """
        assert self._answer is not None
        try:
            last = await self._copy(self._answer, client, progress, counted)
        except (aiohttp.ClientError, OSError) as error:
            error.__traceback__ = None
            if progress.writing:
                raise ConnectionResetError("the client is gone") from error
            if progress.silent and not self._cut:
                raise LegError(Fault.IDLE, f"no token for {self._times.idle:g} s", 504) from None
            raise self._broken(Fault.RESET, "the engine closed the connection before the end") from None
        progress.writing = True
        progress.touch()
        rest = self.scanner.rest()
        self._sent_rest = bool(rest)
        last += rest
        if self.scans and not self.scanner.done and self._path in LAST_EVENTS:
            await client.write(last)
            raise LegError(Fault.RESET, "the engine ended the stream too early", 502)
        return last

    async def _copy(
        self, answer: Answer, client: ClientWriter, progress: Progress, counted: Counted
    ) -> bytes:
        scanner, scans, write_now = self.scanner, self.scans, client.now
        feed, touch, content = scanner.feed, progress.touch, answer.content

        def send(chunk: bytes, last: bool) -> bytes:
            touch()
            passed = feed(chunk) if scans else chunk
            counted.generated = scanner.events
            return passed if last or (passed and not write_now(passed)) else b""

        self._tap = tap = Tap(answer, send)
        progress.writing = False
        touch()
        try:
            while True:
                left = await tap.run()
                if content.at_eof():
                    return left
                if not left:
                    raise content.exception() or aiohttp.ClientConnectionError("the connection is closed")
                progress.writing = True
                await client.write(left)
                progress.writing = False
                touch()
        finally:
            self._tap = None  # it knows `progress`, which knows this leg: no cycle may stay for the collector

    @property
    def usage(self) -> Usage | None:
        """What the engine counted, None if it did not say."""
        return self._usage or usage_of(self.scanner.usage)

    @property
    def torn(self) -> bool:
        """Whether the client has half an event."""
        return self.scanner.torn or self._sent_rest

    def break_off(self, why: str) -> None:
        """Cut the call; whoever reads it gets a LegError that says why."""
        self._cut = why
        if self._answer is not None:
            self._close()
        elif self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the call. A connection whose answer was read to its end is used again, any other is closed."""
        if self._answer is not None:
            if self._answer.content.at_eof() and self._answer.content.exception() is None:
                self._answer.keep()
            else:
                self._close()

    def _close(self) -> None:
        assert self._answer is not None
        self._answer.close()
        if self._tap is not None:
            self._tap.wake()

    async def _send(self, body: Body, headers: CIMultiDict[str]) -> None:
        self._answer = found = await self._connections.post(
            self._url, self._path, body, headers, self._times.connect
        )
        self.status = found.status
        self.headers = to_client(found.headers.items(), connection_names(found.headers))

    async def _begin(self) -> None:
        assert self._answer is not None
        kind = self._answer.headers.get("Content-Type", "")
        plain = self._answer.headers.get("Content-Encoding", "identity") == "identity"
        if not 200 <= self.status < 300:
            await self._read_error(kind)
        elif kind.startswith("text/event-stream"):
            self.streaming, self.scans = True, plain
            await (self._first_event() if plain else self._first_bytes())
        elif kind.startswith("text/"):  # a page of something before the engine
            raise LegError(Fault.GARBAGE, "the engine's answer is a text, not JSON or events")
        else:
            await self._read_answer(plain)

    async def _read_error(self, kind: str) -> None:
        body = await self._read_up_to(ERROR_BODY)
        if body is None:
            # vLLM repeats what it does not understand: the length follows the request, not the engine
            message = f"the engine's error {self.status} is larger than {ERROR_BODY} bytes"
            told = json.dumps(error_object(self.status, message)).encode()
            raise LegError(Fault.STATUS, message, self.status, told, retry=False)
        after = self.headers.get("Retry-After")
        _raise(judge_status(self.status, body, kind, self._times.retry_500, after))
        self.head, self.whole = body, True

    async def _read_answer(self, plain: bool) -> None:
        """The whole answer, or as much as may be kept; the rest is then passed on as it comes."""
        body = await self._read_up_to(self._times.answer_buffer)
        if body is None:
            return
        if plain:
            _raise(judge_body(body))
        self.head, self.whole = body, True
        self._usage = usage_of(body) if plain and self._path.startswith("/v1/") else None

    async def _read_up_to(self, most: int) -> bytes | None:
        """The body if it is no larger; otherwise what was read is put into `head` and None is returned."""
        assert self._answer is not None
        parts, many = [], 0
        async for chunk in self._answer.content.iter_any():
            parts.append(chunk)
            many += len(chunk)
            if many > most:
                self.head = b"".join(parts)
                return None
        return b"".join(parts)

    async def _first_bytes(self) -> None:
        assert self._answer is not None
        self.head = await self._answer.content.readany()

    async def _first_event(self) -> None:
        """Read until the first event that says something; an event without text is held back with it."""
        assert self._answer is not None
        content, scanner, held = self._answer.content, self.scanner, bytearray()
        while True:
            chunk = await content.readany()
            if not chunk and content.at_eof():
                raise LegError(Fault.EMPTY, "the stream ended before its first token")
            held += scanner.feed(chunk)
            if scanner.first is None:
                if len(held) > self._times.event:
                    raise LegError(Fault.GARBAGE, "the stream brings comments and no token")
                continue
            _raise(judge_event(scanner.first))
            if scanner.events >= HELD_EVENTS or scanner.done or not is_empty(scanner.first):
                if scanner.events > 1 and is_empty(scanner.first):
                    self._judge_second(bytes(held))
                self.head = bytes(held)
                return

    def _judge_second(self, held: bytes) -> None:
        """The event after a role chunk: an engine that shuts down aborts there."""
        pieces = [piece[6:] for piece in held.split(b"\n\n") if piece.startswith(b"data: ")]
        if len(pieces) > 1 and pieces[1] != b"[DONE]":
            _raise(judge_event(pieces[1]))

    def _broken(self, fault: Fault, message: str) -> LegError:
        self.close()
        if self._cut:
            return LegError(Fault.CUT, self._cut, retry=False)
        return LegError(fault, message)


def _raise(fault: LegError | None) -> None:
    """Raise it, if there is one. No frame of its traceback may hold it, which would be a cycle."""
    try:
        if fault is not None:
            raise fault
    finally:
        del fault
