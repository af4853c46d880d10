"""Engines for the router's tests: raw sockets that do exactly what a script says, and remember everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # the router hung up

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class Call:
    """What a script does with one request."""

    def __init__(self, seen: Seen, writer: asyncio.StreamWriter, engine: FakeEngine) -> None:
        self.seen, self.writer, self.engine = seen, writer, engine
        self.sent = b""  # the tee: bytes of the body as they were written

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.sent += data
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def head(self) -> None:
        await self.raw(STREAM_HEAD)

    async def finish(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def answer(self, status: int, body: bytes, kind: str = "application/json", more: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self.sent += body
        await self.raw(head.encode() + body)

    async def token(self, text: str = "x", **more: object) -> None:
        event = {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}
        await self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def done(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.finish()

    def reset(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


async def never(call: Call) -> None:
    """No answer, ever."""
    await asyncio.Event().wait()


async def one_token(call: Call) -> None:
    """One token, and no end."""
    await call.head()
    await call.token("a")
    await never(call)


async def stream(call: Call, tokens: int = 3) -> None:
    """A good engine: tokens, usage, the end; or one JSON answer."""
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    if call.seen.json.get("stream"):
        await call.head()
        for number in range(tokens):
            await call.token(f"t{number}")
        await call.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await call.done()
    else:
        text = "".join(f"t{number}" for number in range(tokens))
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        await call.answer(200, json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())


class FakeEngine:
    """A server on a free port. `script` serves generations; probes are answered by themselves."""

    def __init__(self, script: Script = stream) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.calls: list[Call] = []
        self.healthy = True
        self.running = self.waiting = 0
        self.extra_metrics = ""
        self.models = ["m"]
        self._connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> FakeEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """As kill -9: nothing listens any more, all connections are reset."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def open(self) -> int:
        """Connections that carry a generation."""
        return sum(not seen.closed.is_set() for seen in self.seen)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        number = self._connections
        self._writers.add(writer)
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            with suppress(Exception):
                writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        method, path, _ = first.split(" ")
        headers = [tuple(line.split(": ", 1)) for line in lines]
        seen = Seen(method, path, headers, b"", number)
        assert seen.header("transfer-encoding") is None  # bodies upstream always have a length
        seen.body = await reader.readexactly(int(seen.header("content-length") or 0))
        call = Call(seen, writer, self)
        if method == "GET":
            await self._probe(call)
            return True
        self.seen.append(seen)
        self.calls.append(call)
        script = asyncio.create_task(self.script(call))
        watch = asyncio.create_task(reader.read(1))
        await asyncio.wait((script, watch), return_when=asyncio.FIRST_COMPLETED)
        gone = watch.done()
        for each in (script, watch):
            if not each.done():
                each.cancel()
        results = await asyncio.gather(script, watch, return_exceptions=True)
        seen.closed.set()
        if isinstance(results[0], Exception) and not isinstance(results[0], ConnectionError):
            raise results[0]
        return not gone and not writer.transport.is_closing()

    async def _probe(self, call: Call) -> None:
        if call.seen.path == "/metrics":
            text = (
                f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(self.running)}\n'
                f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(self.waiting)}\n'
            )
            await call.answer(200, (text + self.extra_metrics).encode(), "text/plain")
        elif call.seen.path == "/v1/models":
            listed = [{"id": each, "object": "model"} for each in self.models]
            await call.answer(200, json.dumps({"object": "list", "data": listed}).encode())
        else:
            await call.answer(200 if self.healthy else 503, b"")
