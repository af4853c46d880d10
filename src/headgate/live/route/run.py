"""Runs a router: SIGTERM and SIGINT drain, a second one exits, SIGHUP and a changed file reload; a demo.

With `processes` a parent holds listening sockets for each (SO_REUSEPORT); SIGUSR2 replaces them one by one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from headgate.core.errors import InputError
from headgate.live.emulate import Emulators, emulated
from headgate.live.engine.reload import stamp
from headgate.live.files import more_files
from headgate.live.route.config import Config, address, checked
from headgate.live.route.gate.policy import rests_on
from headgate.live.route.server import RouterApp
from headgate.live.tasks import Tasks, end_all, keep, on_stop

log = logging.getLogger("headgate.route")
LOOK_EVERY = 2.0  # seconds, for a changed file
NEW_OBJECTS = 10_000  # between two collections of garbage, of which requests leave none
M_MMAP_THRESHOLD = -3  # glibc's name for the setting; once set, glibc no longer raises it by itself
MAPPED = 1 << 17  # bytes from which on an allocation is mapped: less than the standard loop reads at once


def serve(config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]) -> None:
    if config.front.processes is not None and HANDED not in os.environ:
        sys.exit(asyncio.run(Parent(config, config.front.processes, say).run()))
    more_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(config, read, path, say))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop where it is installed. For the standard loop glibc maps every read by itself.

    Each read of it takes 256 KiB and gives back all but the bytes that came. What is kept of them (the body
    of a request) then fences off a piece of the heap too small for the next read, and the heap grows by up to
    256 KiB for each request inside. Other C libraries have no such setting.
    """
    try:
        import uvloop
    except ImportError:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)
        return None
    return uvloop.new_event_loop


async def _serve(
    config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]
) -> None:
    handed = _handed()
    app = RouterApp(config, read, handed[:2])
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_stop(stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until there is something to reload
    loop.add_signal_handler(signal.SIGUSR2, log.warning, "SIGUSR2 is for the parent of `processes`")
    tasks: Tasks = set()

    def reload() -> None:
        keep(tasks, _reload(app))

    try:
        await app.start()
        loop.add_signal_handler(signal.SIGHUP, reload)
        up = sum(each.up(app.now()) for each in app.upstreams.values())
        slots = [each.spec.slots for each in app.upstreams.values()]
        say(f"{up} of {len(app.upstreams)} engines are up, {rests_on(config, slots)}")
        scheme = "https" if config.front.tls_cert else "http"
        say(f"listening on {scheme}://{config.front.host}:{app.port}, admin on port {app.admin_port}")
        gc.collect()
        gc.freeze()  # what is there now stays; collections look at the rest only
        gc.set_threshold(NEW_OBJECTS)
        watch = asyncio.create_task(_follow_file(path, reload)) if path is not None else None
        if handed:
            await _ready(handed[2], app, stop)
        await stop.wait()
        if watch is not None:
            watch.cancel()
        if app.replaced:
            stop.clear()
            await _first(app.finish(), stop.wait())
        if not app.replaced or stop.is_set():
            say("draining; a second signal exits at once")
            stop.clear()
            await _first(app.drain(), stop.wait())
    finally:
        await app.stop()


async def _reload(app: RouterApp) -> None:
    with suppress(InputError):  # it was logged
        await app.reload()


async def _follow_file(path: str, reload: Callable[[], None]) -> None:
    seen = stamp(path)
    while True:
        await asyncio.sleep(LOOK_EVERY)
        now = stamp(path)
        if now != seen and now is not None:
            seen = now
            reload()


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()


# -- several processes on one port, replaced without loss

HANDED = "HEADGATE_HANDED_FDS"  # of a child: its number, its sockets for clients and operator, its channel
READY, REPLACED = b"r", b"d"
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a process that died is started again


def _handed() -> list[socket.socket]:
    """Once: a process that this one starts has none of it."""
    handed = [socket.socket(fileno=int(each)) for each in os.environ.pop(HANDED, "").split()]
    for each in handed:
        each.set_inheritable(False)
        each.setblocking(False)
    return handed


async def _ready(channel: socket.socket, app: RouterApp, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def told() -> None:
        loop.remove_reader(channel)
        with suppress(OSError):
            app.replaced = channel.recv(1) == REPLACED
        stop.set()

    await loop.sock_sendall(channel, READY)
    loop.add_reader(channel, told)


@dataclass(eq=False)
class Child:
    process: asyncio.subprocess.Process
    channel: socket.socket

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Parent:
    """Holds the sockets, so that connections which wait on them outlive every process that accepts them.

    The kernel spreads connections over one socket for each child. A child that dies is started again; one
    that is replaced stops accepting when its successor serves, and ends with its last connection.
    """

    def __init__(self, config: Config, processes: int, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.children: list[Child | None] = [None] * processes
        self._sockets: list[tuple[socket.socket, socket.socket]] = []
        self._tasks: Tasks = set()
        self._living: set[Child] = set()  # those that finish what they have, too
        self._ending = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        on_stop(self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR2, self._restart)
        self._bind()
        failed = await self._start(0)  # alone: what is wrong with the settings is said once
        failed = failed or max(
            await asyncio.gather(*map(self._start, range(1, len(self.children)))), default=0
        )
        if not failed:
            await self._ending.wait()
        else:
            self._end()
        while self._tasks:
            await asyncio.wait(self._tasks)
        return failed

    def _bind(self) -> None:
        front = self.config.front
        operator, first = address(front.admin)
        port = front.port
        for number in range(len(self.children)):
            clients = _listening(front.host, port, reuse=True)
            port = clients.getsockname()[1]
            self._sockets.append((clients, _listening(operator, first + number if first else 0)))

    async def _start(self, number: int) -> int:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        handed = [each.fileno() for each in (*self._sockets[number], theirs)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *sys.orig_argv[1:],
            env={**os.environ, HANDED: " ".join(map(str, handed))},
            pass_fds=handed,
            start_new_session=True,  # Ctrl-C is the parent's to pass on
        )
        theirs.close()
        child, before = Child(process, ours), self.children[number]
        self._living.add(child)
        if await asyncio.get_running_loop().sock_recv(ours, 1) != READY:
            self._living.discard(child)
            ours.close()
            return await process.wait() or 1
        self.children[number] = child
        if before is not None:
            with suppress(OSError):
                before.channel.send(REPLACED)
        if self._ending.is_set():
            child.send(signal.SIGTERM)
        keep(self._tasks, self._watch(number, child))
        return 0

    async def _watch(self, number: int, child: Child) -> None:
        status = await child.process.wait()
        self._living.discard(child)
        child.channel.close()
        pause = FIRST_PAUSE
        while self.children[number] is child and not self._ending.is_set():
            log.error("process %d ended with %d; it is started again", number, status)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            if not self._ending.is_set() and self.children[number] is child:
                await self._start(number)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _restart(self) -> None:
        if None not in self.children and not any(task.get_name() == "restart" for task in self._tasks):
            keep(self._tasks, self._replace(), "restart")

    async def _replace(self) -> None:
        for number in range(len(self.children)):
            if self._ending.is_set():
                return
            if await self._start(number):
                log.error("the new process %d does not serve; the old ones stay", number)
                return
        self.say(f"{len(self.children)} processes were replaced")

    def _end(self) -> None:
        self._ending.set()
        for child in self._living:
            child.send(signal.SIGTERM)

    def _reload(self) -> None:
        """A process that still starts reads the newest settings, and a signal could end it."""
        for child in self.children:
            if child is not None:
                child.send(signal.SIGHUP)


def _listening(host: str, port: int, reuse: bool = False) -> socket.socket:
    try:
        family, *_, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(where)
        made.listen(1024)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from None
    return made


# -- the demo: emulated engines, a router and clients

CARD, SPEED, SLOTS, ENGINES = "cal-h200-qwen3-8b", 0.2, 8, 4
RATES = {"chat": 8.0, "batch": 5.0}  # requests a second, beyond what the engines can serve
PROMPTS = {"chat": 256, "batch": 2048}  # tokens
OUTPUTS = {"chat": 60, "batch": 90}
PROMISES = {"chat": 0.5}  # seconds to the first token
PATIENCE = 10.0  # seconds a client waits for its first token
DOWN_AT, UP_AT = 8.0, 16.0  # seconds: engine 1 dies and comes back


class Demo:
    def __init__(self, app: RouterApp, fleet: Emulators) -> None:
        self.app, self.fleet = app, fleet
        self.event = "all engines are up"
        self._draw = random.Random(1)
        self._tasks: Tasks = set()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for name in RATES:
                        group.create_task(self._clients(client, name))
                    group.create_task(self._accident())
            finally:
                await end_all(self._tasks)

    async def _accident(self) -> None:
        port = self.fleet.ports[1]
        await asyncio.sleep(DOWN_AT)
        self.event = "engine 1 was killed; its streams end with an error event, others are tried elsewhere"
        port.refuse()
        port.cut()
        await asyncio.sleep(UP_AT - DOWN_AT)
        await port.listen()
        self.event = "engine 1 is back"

    async def _clients(self, client: aiohttp.ClientSession, name: str) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(RATES[name]))
            keep(self._tasks, self._one(client, name))

    async def _one(self, client: aiohttp.ClientSession, name: str) -> None:
        tokens = max(1, int(self._draw.expovariate(1 / OUTPUTS[name])))
        body = {"prompt": "word" * PROMPTS[name], "stream": True, "max_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.app.port}/v1/completions"
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(PATIENCE) as patience:
                async with client.post(url, json=body, headers={"x-headgate-class": name}) as answer:
                    async for _ in answer.content:
                        patience.reschedule(None)


@asynccontextmanager
async def demo(flags: dict[str, dict[str, Any]]) -> AsyncIterator[Demo]:
    async with emulated(engines=ENGINES, card=CARD, slots=SLOTS, speed=SPEED, model="demo") as fleet:
        front = {"port": 0, "admin": "127.0.0.1:0", **flags.get("front", {})}
        router = {"card": CARD, **flags.get("router", {})}
        classes = [
            {"name": name, "match": {"header": name}, "prompt": PROMPTS[name], "output": OUTPUTS[name],
             "rate": RATES[name], "queue": 40, "ttft": PROMISES.get(name)}
            for name in RATES
        ]  # fmt: skip
        engines = [{"url": url, "slots": SLOTS} for url in fleet]
        health = {"every": 0.5, "fails": 1}
        given = {"front": front, "router": router, "classes": classes, "engines": engines, "health": health}
        app = RouterApp(checked(given))
        try:
            await app.start()
            yield Demo(app, fleet)
        finally:
            await app.stop()
