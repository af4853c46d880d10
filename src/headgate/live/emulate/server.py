"""Ports, connections and the life of an emulator: start, drain, stop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast, overload

from aiohttp import web

from headgate.core.errors import InputError
from headgate.live.emulate.admin import admin_application
from headgate.live.emulate.clock import Clock, VirtualClock, WallClock
from headgate.live.emulate.engine import EmulatedEngine
from headgate.live.emulate.faults import Faults
from headgate.live.emulate.front import application
from headgate.live.emulate.made import Made
from headgate.live.emulate.options import Options
from headgate.live.emulate.peers import Peers
from headgate.live.emulate.place import Place
from headgate.live.emulate.problems import busy
from headgate.live.emulate.recording import discard, traces
from headgate.live.emulate.silent import Silent
from headgate.live.emulate.tokens import tokens_by
from headgate.live.engine.trace import Trace
from headgate.settings_base import checked

LOG = logging.getLogger("headgate.emulate")
KEEP_ALIVE = 75.0
BACKLOG = 1024
TASKS: deque[asyncio.Task[None]] = deque(maxlen=64)  # so that nobody collects them while they run


class TooMany(asyncio.Protocol):
    """A connection beyond the limit: 503 and goodbye."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """At once, before anything is read."""
        out = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        body = busy().body()
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        out.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        out.close()


class Port:
    """One place, listening."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.url = ""
        self._runner = web.AppRunner(
            application(place), handler_cancellation=True, access_log=None, keepalive_timeout=KEEP_ALIVE,
            shutdown_timeout=0.5,
        )  # fmt: skip
        self._listener: asyncio.Server | None = None
        self._silent: Silent | None = None
        self._host, self._port = "", 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> None:
        """Listen, and let the engines run."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._silent = Silent(self._runner.server)
        self._host, self._port = host, port
        await self.listen()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._port}"
        self.place.port = self._port
        for exports in self.place.exports:
            exports.host, exports.port = host, self._port
        self._tasks = [asyncio.create_task(engine.run()) for engine in self.place.engines]

    async def listen(self) -> None:
        """Accept connections (again)."""
        if self._listener is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._accept, self._host, self._port, backlog=BACKLOG, reuse_address=True
            )
        except OSError as error:
            raise InputError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; choose another port"
            ) from None
        self._port = self._listener.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Accept no connections; those that are open stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        for handler in self._handlers():
            if handler.transport is not None:
                handler.transport.abort()

    async def crash(self) -> None:
        """As a process that died: nothing listens, every connection is reset, nothing runs."""
        self.refuse()
        self.cut()
        for task in self._tasks:
            task.cancel()
        for engine in self.place.engines:
            engine.die("the engine has crashed")

    async def stop(self) -> None:
        """Close everything."""
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()
        await self._runner.cleanup()

    def _handlers(self) -> list[Any]:
        server = self._runner.server
        return [] if server is None else list(server.connections)

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self.place.made.options.max_connections:
            return TooMany()
        handler = server()
        assert self._silent is not None
        self._silent.watch(handler)
        return handler


class Emulators(Sequence[str]):
    """Running emulators: a sequence of their urls, and handles on what is behind each."""

    def __init__(self, ports: list[Port], clock: Clock, peers: Peers, kept: list[Trace]) -> None:
        self.ports, self.clock, self._peers, self._traces = ports, clock, peers, kept
        self.admin_url = ""
        self._admin: web.AppRunner | None = None

    async def open_admin(self, host: str, port: int) -> None:
        """Listen for admin calls."""
        self._admin = web.AppRunner(admin_application(self), access_log=None)
        await self._admin.setup()
        try:
            await web.TCPSite(self._admin, host, port).start()
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another") from None
        self.admin_url = f"http://{host}:{self._admin.addresses[0][1]}"

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return [port.url for port in self.ports][index]

    def __len__(self) -> int:
        return len(self.ports)

    def __iter__(self) -> Iterator[str]:
        return iter([port.url for port in self.ports])

    @property
    def engines(self) -> list[EmulatedEngine]:
        """All engines, port by port."""
        return [engine for port in self.ports for engine in port.place.engines]

    @property
    def faults(self) -> list[Faults]:
        """The faults of each port."""
        return [port.place.faults for port in self.ports]

    @property
    def at_rest(self) -> bool:
        """No request anywhere, and no KV in use."""
        return all(
            not engine.running and not engine.waiting and engine.kv_usage == 0 for engine in self.engines
        )

    def describe(self) -> list[str]:
        """One line about each port."""
        lines = []
        for port in self.ports:
            count = len(port.place.engines)
            lines.append(f"{port.url}  {port.place.made.model}" + (f", {count} ranks" if count > 1 else ""))
        return [*lines, f"{self.admin_url}  admin"] if self.admin_url else lines

    def go(self) -> None:
        """Let a held virtual clock run."""
        for port in self.ports:
            port.place.go()

    async def drain(self, timeout: float) -> bool:
        """New requests are answered as a draining vLLM answers; True when the running ones have ended."""
        for port in self.ports:
            port.place.draining = True
        end = asyncio.get_running_loop().time() + timeout
        while any(port.place.inside for port in self.ports):
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def stop(self) -> None:
        """Close all ports."""
        await asyncio.gather(*(port.stop() for port in self.ports))
        if self._admin is not None:
            await self._admin.cleanup()
        await self._peers.close()
        for trace in self._traces:
            trace.close()


async def start(options: Options) -> Emulators:
    """Make the engines and listen."""
    made = Made(options)
    clock: Clock = VirtualClock() if options.virtual else WallClock(options.speed)
    tokens, peers = tokens_by(options.tokenizer), Peers(options.kv_hosts)
    ranks = options.engines if options.ranks else 1
    kept = traces(made, clock, options.engines)
    hear: list[list[Trace]] = [[trace] for trace in kept] or [[]] * options.engines
    shares = [hear[first : first + ranks] for first in range(0, options.engines, ranks)]
    places = [Place(made, clock, tokens, peers, share) for share in shares]
    running = Emulators([Port(place) for place in places], clock, peers, kept)
    if options.slow_start:
        await asyncio.sleep(options.slow_start)
    try:
        for number, port in enumerate(running.ports):
            await port.start(options.host, options.port + number if options.port else 0)
            for engine in port.place.engines:
                engine.on_crash = _crasher(port)
        if options.admin_port is not None:
            await running.open_admin(options.admin_host, options.admin_port)
    except BaseException:
        await running.stop()
        discard(kept)
        raise
    return running


def _crasher(port: Port) -> Callable[[], None]:
    return lambda: TASKS.append(asyncio.create_task(port.crash()))


@asynccontextmanager
async def emulated(options: Options | None = None, **words: Any) -> AsyncIterator[Emulators]:
    """Emulators for the time of an `async with` block; takes the fields of `Options`, on free ports."""
    running = await start(options or checked(Options, {"port": 0} | words))
    try:
        yield running
    finally:
        await running.stop()
