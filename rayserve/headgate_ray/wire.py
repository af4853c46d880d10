"""The shared gate over a socket of its own (a call through Ray takes several times as long), and its clients.

Frames are msgpack behind their length; the first is a secret of those who may call the actor through Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headgate.core.errors import one_line
from headgate.live.route.classes import Classes
from headgate.live.route.gate.queue import Refused
from headgate.live.route.request import TOKENS_PER_BYTE, UNBOUNDED
from headgate.live.tasks import Tasks, end_all, keep
from headgate_ray.gate import Counts, Event, Heard, Placement, RayConfig, SharedGate

HEAD = 4  # bytes of a frame's length
LONGEST = 64 << 20  # bytes of a frame
SECRET_WITHIN = 10.0  # seconds: a stranger holds no connection for longer
CALLS = ("join", "tell", "news")
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(HEAD), "big")
    if size > LONGEST:
        raise ConnectionError(f"a frame of {size} bytes")
    return _decode(await reader.readexactly(size))


def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    body = _encode(message)
    try:
        writer.write(len(body).to_bytes(HEAD, "big") + body)
    except RuntimeError as error:  # uvloop's word for a closed transport
        raise ConnectionError(str(error)) from None


class GateServer:
    def __init__(self, gate: SharedGate, secret: str) -> None:
        self._gate, self._secret = gate, secret.encode()
        self._server: asyncio.Server | None = None
        self._tasks: Tasks = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> int:
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in [*self._writers]:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(
            ConnectionError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError
        ):
            said = await asyncio.wait_for(reader.readexactly(len(self._secret)), SECRET_WITHIN)
            if hmac.compare_digest(said, self._secret):
                while True:
                    number, name, about = await _read(reader)
                    keep(self._tasks, self._answer(writer, number, name, about))
        writer.close()
        self._writers.discard(writer)

    async def _answer(self, writer: asyncio.StreamWriter, number: int, name: str, about: list[Any]) -> None:
        if name not in CALLS:
            return
        try:
            answer, error = await getattr(self._gate, name)(*about), ""
        except Exception as fault:  # its router gates alone
            answer, error = None, f"{type(fault).__name__}: {fault}"
        with suppress(ConnectionError):
            _write(writer, (number, answer, error))


class WiredGate:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.get_running_loop().create_task(self._listen())

    @classmethod
    async def open(cls, host: str, port: int, secret: str) -> WiredGate:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(secret.encode())
        return cls(reader, writer)

    async def _listen(self) -> None:
        why: Exception = ConnectionError("the gate's connection is closed")
        try:
            while True:
                number, answer, error = await _read(self._reader)
                waiting = self._calls.pop(number, None)
                if waiting is not None and not waiting.done():
                    if error:
                        waiting.set_exception(ConnectionError(error))
                    else:
                        waiting.set_result(answer)
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            why = ConnectionError(f"the gate's connection is closed: {type(error).__name__}")
        finally:
            self.close()
            for waiting in self._calls.values():
                if not waiting.done():
                    waiting.set_exception(why)

    async def _call(self, name: str, *about: Any) -> Any:
        if self._writer.is_closing():
            raise ConnectionError("the gate's connection is closed")
        self._number = number = self._number + 1
        waiting = self._calls[number] = asyncio.get_running_loop().create_future()
        _write(self._writer, (number, name, about))
        try:
            return await waiting
        finally:
            self._calls.pop(number, None)

    async def join(
        self, name: str, slots: Counts, busy: Counts, clients: int, given: dict[str, Any], deployed: float
    ) -> int:
        joined: int = await self._call("join", name, dict(slots), dict(busy), clients, given, deployed)
        return joined

    async def tell(self, name: str, events: Sequence[Event]) -> Heard | None:
        return _heard(await self._call("tell", name, events))

    async def news(self, name: str, seconds: float) -> Heard | None:
        return _heard(await self._call("news", name, seconds))

    def close(self) -> None:
        self._writer.close()


def _heard(said: Any) -> Heard | None:
    if said is None:
        return None
    answers, clients, waiting = said
    return [Placement(*each) for each in answers], clients, waiting


# -- what a router sees of a request

CLASS = "x-headgate-class"
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
MOST_MESSAGES = 10_000  # whose texts are measured


def described(classes: Classes, arguments: Iterable[Any], model_id: str) -> tuple[str, int, int, int]:
    """Of an HTTP request headers are known, of a call its arguments, where they are in OpenAI's words."""
    header, size, limit, model, field = None, 0, UNBOUNDED, model_id, None
    for each in arguments:
        headers = _headers(each)
        header = headers.get(CLASS, header)
        size = max(size, _number(headers.get("content-length")), _size(each))
        model = str(_get(each, "model") or model)[:256]
        limit = min([limit, *(n for name in LIMITS if (n := _number(_get(each, name))))])
        metadata = _get(each, "metadata")
        field = metadata.get("class", field) if isinstance(metadata, Mapping) else field
    prompt = max(1, round(size * TOKENS_PER_BYTE))
    kind = classes.of(None, header, model, field, prompt)
    return kind.name, prompt, limit, kind.priority


def _get(each: Any, name: str) -> Any:
    return each.get(name) if isinstance(each, Mapping) else getattr(each, name, None)


def _number(value: Any) -> int:
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _headers(each: Any) -> dict[str, str]:
    """Of an ASGI scope (bytes), or of what Ray Serve LLM passes on (text); names in lower case."""
    scope = getattr(each, "asgi_scope", None)
    found = scope.get("headers", ()) if isinstance(scope, Mapping) else _get(each, "headers")
    pairs = found.items() if isinstance(found, Mapping) else found or ()
    return {_text(name).lower(): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _size(each: Any) -> int:
    prompt = _get(each, "prompt")
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):  # token ids, or several prompts
        return round(len(prompt) / TOKENS_PER_BYTE)
    messages = _get(each, "messages")
    if not isinstance(messages, list):
        return 0
    contents = (_get(message, "content") for message in messages[:MOST_MESSAGES])
    return sum(len(content) for content in contents if isinstance(content, str))


# -- a router's side of the shared gate: many events in one call, and a gate of its own while that is lost

log = logging.getLogger("headgate.route")
LATER = ("end", "freed")  # told at once only while requests wait for a place
SOON = 0.01  # seconds until it is told anyway
NEWS = 2.0  # seconds a question for news is held
AGAIN = 0.5  # seconds between two attempts to reach the shared gate, at first
RARELY = 4.0  # at most: below the time for which a new gate waits for the others (`gate.GRACE`)
FIRST = 30.0  # seconds for its first start, in which a process is begun


class LeftCluster(Exception):  # noqa: N818  (news, not a fault)
    pass


Connect = Callable[[], Awaitable[WiredGate]]


class ClientRequest:
    __slots__ = ("about", "answer", "key", "placed_in", "replica")

    def __init__(self, key: int, about: tuple[str, str, int, int, int]) -> None:
        self.key, self.about = key, about  # request, class, prompt, limit, priority
        self.replica = ""  # where it is; empty: it waits
        self.placed_in = -1  # which gate placed it, by `GateClient.term`
        self.answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()


class GateClient:
    """When the shared gate is lost, a gate in this process takes over at once: requests that waited wait
    there, and each replica takes the share of its slots that falls to this router, so that all routers
    together admit no more than before. Once there is a shared gate again, everything moves back.
    """

    def __init__(self, config: RayConfig, name: str, connect: Connect | None, deployed: float = 0.0) -> None:
        self.config, self.name, self._connect, self._deployed = config, name, connect, deployed
        self.entries: dict[int, ClientRequest] = {}
        self.term = 0  # counts the gates that were asked
        self.lost = 0  # times the shared gate was lost
        self.local: SharedGate | None = None
        self._remote: WiredGate | None = None
        self._clients = 1
        self._slots: dict[str, int] = {}
        self._outbox: list[Event] = []
        self._telling, self._number = False, 0
        self._others_wait = self._later = False
        self._tasks: Tasks = set()
        self._started = False

    def set_replicas(self, slots: Counts) -> None:
        if slots == self._slots and self._started:
            return
        self._slots = dict(slots)
        if not self._started:
            self._started = True
            if self._connect is None:
                self._stand_in()
            else:
                keep(self._tasks, self._reach(FIRST))
            return
        self._say("replicas", self._slots)

    def dead(self, replica: str) -> None:
        self._slots.pop(replica, None)
        self._say("dead", replica)

    async def place(self, about: tuple[str, str, int, int, int]) -> ClientRequest:
        """`about`: its id, class, prompt, limit, priority. Raises Refused; a cancelled request is gone."""
        self._number += 1
        entry = self.entries[self._number] = ClientRequest(self._number, about)
        self._say("arrive", entry.key, *about)
        return await self._answered(entry)

    async def again(self, entry: ClientRequest) -> ClientRequest:
        entry.answer = asyncio.get_running_loop().create_future()
        before, entry.replica = entry.replica, ""
        if entry.placed_in == self.term:
            self._say("back", entry.key)
        else:
            self._say("freed", before)
            self._say("arrive", entry.key, *entry.about)
        return await self._answered(entry)

    def end(self, entry: ClientRequest) -> None:
        if self.entries.pop(entry.key, None) is None:
            return
        if entry.replica and entry.placed_in != self.term:
            self._say("freed", entry.replica)
        else:
            self._say("end", entry.key)

    async def _answered(self, entry: ClientRequest) -> ClientRequest:
        try:
            answer = await entry.answer
        except asyncio.CancelledError:
            self.end(entry)
            raise
        if not answer.replica:
            self.entries.pop(entry.key, None)
            raise Refused(answer.status, answer.reason, answer.retry_after)
        return entry

    def _say(self, *event: Any) -> None:
        if self.local is not None:
            self.local.book(self.name, (event,))
            return
        self._outbox.append(event)
        if event[0] in LATER and not self._others_wait:
            if not self._later:
                self._later = True
                asyncio.get_running_loop().call_later(SOON, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._later = False
        if self._remote is not None and self._outbox and not self._telling:  # else: with the next call
            self._telling = True
            keep(self._tasks, self._flush(self._remote, self.term))

    def _hear(self, answers: list[Placement]) -> None:
        for answer in answers:
            entry = self.entries.get(answer.key)
            if entry is not None and not entry.answer.done():  # else: cancelled, and its end was told
                entry.replica, entry.placed_in = answer.replica, self.term
                entry.answer.set_result(answer)

    async def _flush(self, remote: WiredGate, term: int) -> None:
        while self._outbox and term == self.term:
            events, self._outbox = self._outbox, []
            await self._ask(remote.tell(self.name, events), self.config.timeout, term)
        if term == self.term:
            self._telling = False

    async def _listen(self, remote: WiredGate, term: int) -> None:
        while term == self.term:
            await self._ask(remote.news(self.name, NEWS), NEWS + self.config.timeout, term)

    async def _ask(self, call: Awaitable[Heard | None], seconds: float, term: int) -> None:
        try:
            async with asyncio.timeout(seconds):
                heard = await call
        except Exception as error:
            if term == self.term:
                self._lose(one_line(error))
            return
        if term != self.term:
            return
        if heard is None:
            self._lose("it does not know this router any more")
            return
        answers, self._clients, self._others_wait = heard
        self._hear(answers)

    def _lose(self, why: str) -> None:
        self.lost += 1
        log.warning("the shared gate is lost, this router gates alone for now: %s", why)
        self._stand_in()
        keep(self._tasks, self._reach())

    def _next_term(self) -> Counter[str]:
        self.term += 1
        self._telling = False
        if self.local is not None:
            self.local.forget(self.name)
            self.local = None
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        waiting = [entry for entry in self.entries.values() if not entry.replica]
        self._outbox = [("arrive", entry.key, *entry.about) for entry in waiting]
        return Counter(entry.replica for entry in self.entries.values() if entry.replica)

    def _stand_in(self) -> None:
        busy = self._next_term()
        share = 1.0 if self._connect is None else 1 / max(1, self._clients)
        gate = SharedGate(self.config.model_dump(), share)
        gate.enter(self.name, self._slots, busy)
        gate.clients[self.name].deliver = self._hear
        self.local, events = gate, self._outbox
        self._outbox = []
        gate.book(self.name, events)

    async def _reach(self, seconds: float = 0.0) -> None:
        assert self._connect is not None
        pause = AGAIN
        while True:
            try:
                async with asyncio.timeout(seconds or FIRST):
                    remote = await self._connect()
            except LeftCluster:
                return
            except Exception as error:
                log.warning("no shared gate: %s", one_line(error))
            else:
                if await self._move_to(remote):
                    return
            if self.local is None:
                self._stand_in()
            await asyncio.sleep(pause)
            pause = min(2 * pause, RARELY)

    async def _move_to(self, remote: WiredGate) -> bool:
        busy = self._next_term()
        term, given = self.term, self.config.model_dump(mode="json")
        try:
            async with asyncio.timeout(self.config.timeout):
                self._clients = await remote.join(
                    self.name, dict(self._slots), busy, self._clients, given, self._deployed
                )
        except Exception as error:
            log.warning("the shared gate does not answer: %s", one_line(error))
            remote.close()
            return False
        self._remote = remote
        keep(self._tasks, self._listen(remote, term))
        self._send()
        return True

    async def close(self) -> None:
        self._next_term()
        await end_all(self._tasks)
