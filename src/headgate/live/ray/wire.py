"""The shared gate over a socket of its own: a call through Ray takes several times as long.

Frames are msgpack with their length before them. The first frame of a connection is a secret that only those
know who may call the actor through Ray. Calls are answered in any order, because `news` waits.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headgate.live.ray.gate import Counts, Event, Heard, Placement, SharedGate
from headgate.live.route.classes import Classes
from headgate.live.route.request import TOKENS_PER_BYTE, UNBOUNDED

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
    """Serves a `SharedGate` to routers on other machines."""

    def __init__(self, gate: SharedGate, secret: str) -> None:
        self._gate, self._secret = gate, secret.encode()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
                    task = asyncio.get_running_loop().create_task(self._answer(writer, number, name, about))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
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
    """The shared gate, as a router calls it."""

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
    """Class, prompt tokens (estimated), output tokens at most, and priority of a request.

    An HTTP request shows its headers only: its body is still with the client. A call through a handle shows
    its arguments: a dictionary or object in OpenAI's words is measured, and so are keywords.
    """
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
