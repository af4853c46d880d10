"""Processes of the router's benchmark: a fake engine, a client, and one that hangs up, over raw sockets."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

EVENT = 280  # bytes
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


SHORT = b'data: {"sent":%020d,"choices":[{"text":"%b"}]}\n\n' % (1, b"x" * 200)


def _event(number: int) -> bytes:
    """One event of a fixed size that tells when it was sent."""
    text = f'data: {{"sent":{time.monotonic_ns():020d},"n":{number},"choices":[{{"text":"'.encode()
    data = text + b"x" * (EVENT - len(text) - 8) + b'"}]}\n\n'
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """Answers POST with a stream at a fixed pace, GET with 200."""

    def __init__(self, tokens: int, gap: float, lost: Callable[[], None] = lambda: None) -> None:
        self.tokens, self.gap, self.lost, self.data = tokens, gap, lost, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.handle: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It went."""
        if self.handle is not None:
            self.handle.cancel()
        self.lost()

    def data_received(self, data: bytes) -> None:
        """A request, perhaps in parts."""
        self.data += data
        head, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(rest) < length:
            return
        self.data = rest[length:]
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        self.transport.write(HEAD)
        self.began = asyncio.get_running_loop().time()
        self.sent = 0
        self._next()

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self.transport.write(_event(self.sent))
        self.sent += 1
        if self.sent < self.tokens:
            self.handle = loop.call_at(self.began + self.sent * self.gap, self._next)
        else:
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def engine(tokens: int, gap: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(tokens, gap), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


def _request(tokens: int) -> bytes:
    """A stream of so many tokens is asked for."""
    asked = {"model": "m", "prompt": "hello " * 50, "stream": True, "max_tokens": tokens}
    body = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def hangups(tries: int) -> None:
    """An engine and its clients in one process: milliseconds from a client's close to that of the engine.

    The router's port is read from standard input once it knows the engine's.
    """
    loop, took, gone = asyncio.get_running_loop(), list[float](), asyncio.Event()
    server = await loop.create_server(lambda: Engine(10_000, 0.02, gone.set), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    port = int(await loop.run_in_executor(None, input))
    for number in range(tries):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(10_000))
        for _ in range(1 + number % 5):
            await reader.readuntil(b"data: {")
        gone.clear()
        began = time.monotonic()
        writer.close()
        await asyncio.wait_for(gone.wait(), 10)
        took.append(1e3 * (time.monotonic() - began))
    took.sort()
    print(json.dumps({"p50_ms": took[tries // 2], "p99_ms": took[int(0.99 * tries)], "worst_ms": took[-1]}))


async def client(ports: list[int], streams: int, seconds: float) -> None:
    """So many streams at a time, over these ports in turn; prints events, requests, transit in ms."""
    ask, transit, counts = _request(100), list[float](), [0, 0]
    end = time.monotonic() + seconds

    async def one(number: int) -> None:
        await asyncio.sleep(number / streams)
        port = ports[number % len(ports)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.monotonic() < end:
            writer.write(ask)
            if b" 200 " not in await reader.readline():
                raise RuntimeError("refused")
            while True:
                line = await reader.readline()
                if not line:
                    return
                if line.startswith(b"data: {"):
                    counts[0] += 1
                    if counts[0] % 7 == 0:
                        transit.append((time.monotonic_ns() - int(line[14:34])) / 1e6)
                elif line == b"0\r\n":
                    await reader.readline()
                    break
            counts[1] += 1
        writer.close()

    await asyncio.gather(*(one(number) for number in range(streams)), return_exceptions=True)
    transit = sorted(transit) or [float("nan")]
    middle, high = (transit[int(share * (len(transit) - 1))] for share in (0.5, 0.99))
    print(json.dumps({"events": counts[0], "requests": counts[1], "p50_ms": middle, "p99_ms": high}))


# -- floors: relays to one engine without queue, limits, retries or any other safety


class BareClient(asyncio.Protocol):
    """A client's connection of a relay that only parses (httptools, a parser in C) and copies."""

    def __init__(self, pool: list[BareEngine], port: int) -> None:
        self.pool, self.port, self.body = pool, port, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It has come."""
        self.transport = cast(asyncio.Transport, transport)
        self.parser = import_module("httptools").HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Some of the body."""
        self.body += data

    def on_message_complete(self) -> None:
        """Send it on."""
        body, self.body = self.body, b""
        asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        asked += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        if self.pool:
            self.pool.pop().send(self, asked)
        else:
            task = asyncio.get_running_loop().create_task(self._connect(asked))
            task.add_done_callback(lambda done: done.result())

    async def _connect(self, asked: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: BareEngine(self.pool), "127.0.0.1", self.port)
        engine.send(self, asked)


class BareEngine(asyncio.Protocol):
    """An engine's connection of it."""

    def __init__(self, pool: list[BareEngine]) -> None:
        self.pool = pool

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self.transport = cast(asyncio.Transport, transport)

    def send(self, client: BareClient, asked: bytes) -> None:
        """Ask for this client."""
        self.client, self.parser = client, import_module("httptools").HttpResponseParser(self)
        self.transport.write(asked)

    def data_received(self, data: bytes) -> None:
        """Parse, and write what came at once."""
        self.out: list[bytes] = []
        self.parser.feed_data(data)
        self.client.transport.write(b"".join(self.out))

    def on_headers_complete(self) -> None:
        """The head."""
        self.out.append(HEAD)

    def on_body(self, data: bytes) -> None:
        """An event."""
        self.out.append(b"%x\r\n%b\r\n" % (len(data), data))

    def on_message_complete(self) -> None:
        """The end."""
        self.out.append(b"0\r\n\r\n")
        self.pool.append(self)


async def bare(port: int) -> None:
    pool: list[BareEngine] = []
    await _listen(lambda: BareClient(pool, port))


async def bare_aiohttp(port: int) -> None:
    """The same with aiohttp's server and client, as their documentation has it."""
    import aiohttp
    from aiohttp import web

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def relay(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            kind = {"Content-Type": "application/json"}
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with session.post(url, data=body, headers=kind) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        await _listen(web.Server(relay))


# -- servers alone, which answer as the router does: what another server than aiohttp's would save


async def served_by_aiohttp() -> None:
    from headgate.live.route.config import FrontSettings
    from headgate.live.route.deliver.relay import ClientWriter, Streamed
    from headgate.live.route.server import GuardedServer

    async def handle(request: Any) -> Any:
        server.began(request.protocol)
        request.content.read_nowait()
        await asyncio.sleep(0)
        response = Streamed(status=200, headers={"Content-Type": "text/event-stream"})
        writer = ClientWriter(response, request)
        await writer.begin(request)
        await writer.write(SHORT)
        await writer.end(b"data: [DONE]\n\n")
        return response

    server = GuardedServer(handle, FrontSettings())
    await _listen(server)


async def served_by_protocol() -> None:
    """The parser of aiohttp, in C, with a task for each request, and no more than that."""
    from aiohttp.base_protocol import BaseProtocol
    from aiohttp.helpers import rfc822_formatted_time
    from aiohttp.http import HttpRequestParser

    loop = asyncio.get_running_loop()

    class Server(BaseProtocol):
        def __init__(self) -> None:
            limits: Any = {"max_line_size": 16384, "max_field_size": 16384, "max_headers": 100}
            self._read: Any = HttpRequestParser(self, loop, 1 << 16, auto_decompress=False, **limits)
            super().__init__(loop, self._read)

        def data_received(self, data: bytes) -> None:
            for message in self._read.feed_data(data)[0]:
                self._task = loop.create_task(self._serve(*message))

        async def _serve(self, message: Any, body: Any) -> None:
            body.read_nowait()
            await asyncio.sleep(0)
            date = f"Date: {rfc822_formatted_time()}"
            lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", date, "Transfer-Encoding: chunked"]
            head = "\r\n".join([*lines, "", ""]).encode()
            assert self.transport is not None
            self.transport.write(head + b"%x\r\n%b\r\n" % (len(SHORT), SHORT))
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    await _listen(Server)


async def _listen(protocol: Callable[[], asyncio.BaseProtocol]) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


RELAYS = {"bare": bare, "aiohttp": bare_aiohttp}
SERVERS = {"aiohttp-server": served_by_aiohttp, "own-server": served_by_protocol}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["engine", "client", "hangups", *RELAYS, *SERVERS])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--gap", type=float, default=0.05)
    parser.add_argument("--port", type=int, action="append", default=[])
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tries", type=int, default=500)
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        if given.part == "engine":
            asyncio.run(engine(given.tokens, given.gap))
        elif given.part == "hangups":
            asyncio.run(hangups(given.tries))
        elif given.part in RELAYS or given.part in SERVERS:
            import uvloop

            uvloop.run(SERVERS[given.part]() if given.part in SERVERS else RELAYS[given.part](given.port[0]))
        else:
            asyncio.run(client(given.port, given.streams, given.seconds))


if __name__ == "__main__":
    main()
