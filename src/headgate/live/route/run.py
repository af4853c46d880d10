"""Runs a router: SIGTERM and SIGINT drain, a second one exits, SIGHUP and a changed file reload; a demo."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headgate.core.errors import InputError
from headgate.live.emulate import Emulators, emulated
from headgate.live.files import more_files
from headgate.live.route.config import Config, checked
from headgate.live.route.gate.policy import rests_on
from headgate.live.route.server import RouterApp

LOOK_EVERY = 2.0  # seconds, for a changed file
M_MMAP_THRESHOLD = -3  # glibc's name for the setting; once set, glibc no longer raises it by itself
MAPPED = 1 << 17  # bytes from which on an allocation is mapped: less than the standard loop reads at once


def serve(config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]) -> None:
    """Serve with uvloop where it is installed."""
    more_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(config, read, path, say))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """That of uvloop where it is installed. The standard loop needs another way to allocate what it reads."""
    try:
        import uvloop
    except ImportError:
        _map_reads()
        return None
    return uvloop.new_event_loop


def _map_reads() -> None:
    """Let glibc map every read of the standard loop by itself instead of cutting it from the heap.

    Each read takes 256 KiB and gives back all but the bytes that came. What is kept of them (the body of a
    request) then fences off a piece of the heap too small for the next read, and the heap grows by up to
    256 KiB for each request inside. Other C libraries have no such setting.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


async def _serve(
    config: Config, read: Callable[[], Config], path: str | None, say: Callable[[str], None]
) -> None:
    app = RouterApp(config, read)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # until there is something to reload
    tasks: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(_reload(app))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

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
        watch = asyncio.create_task(_follow_file(path, reload))
        await stop.wait()
        say("draining; a second signal exits at once")
        stop.clear()
        watch.cancel()
        await _first(app.drain(), stop.wait())
    finally:
        await app.stop()


async def _reload(app: RouterApp) -> None:
    with suppress(InputError):  # it was logged
        await app.reload()


async def _follow_file(path: str | None, reload: Callable[[], None]) -> None:
    seen = _stamp(path)
    while path is not None:
        await asyncio.sleep(LOOK_EVERY)
        now = _stamp(path)
        if now != seen and now is not None:
            seen = now
            reload()


def _stamp(path: str | None) -> tuple[int, int] | None:
    try:
        found = Path(path).stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size)


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()


# -- the demo: emulated engines, a router and clients

CARD, SPEED, SLOTS, ENGINES = "cal-h200-qwen3-8b", 0.2, 8, 4
RATES = {"chat": 8.0, "batch": 5.0}  # requests a second, beyond what the engines can serve
PROMPTS = {"chat": 256, "batch": 2048}  # tokens
OUTPUTS = {"chat": 60, "batch": 90}
PATIENCE = 10.0  # seconds a client waits for its first token
KEPT = 400  # times to first token per class
DOWN_AT, UP_AT = 8.0, 16.0  # seconds: engine 1 dies and comes back


@dataclass
class ClientTally:
    """What clients of one class have seen."""

    sent: int = 0
    done: int = 0
    refused: int = 0
    gave_up: int = 0
    broken: int = 0
    tokens: int = 0
    first: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class Demo:
    """The running parts; `tallies` is what clients saw."""

    def __init__(self, app: RouterApp, fleet: Emulators) -> None:
        self.app, self.fleet = app, fleet
        self.tallies = {name: ClientTally() for name in RATES}
        self.event = "all engines are up"
        self._draw = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for name in RATES:
                        group.create_task(self._clients(client, name))
                    group.create_task(self._accident())
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

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
            task = asyncio.create_task(self._one(client, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, client: aiohttp.ClientSession, name: str) -> None:
        tally, loop = self.tallies[name], asyncio.get_running_loop()
        tally.sent += 1
        began = loop.time()
        tokens = max(1, int(self._draw.expovariate(1 / OUTPUTS[name])))
        body = {"prompt": "word" * PROMPTS[name], "stream": True, "max_tokens": tokens, "ignore_eos": True}
        url, seen, broken = f"http://127.0.0.1:{self.app.port}/v1/completions", 0, False
        try:
            async with asyncio.timeout(PATIENCE) as patience:
                async with client.post(url, json=body, headers={"x-headgate-class": name}) as answer:
                    if answer.status != 200:
                        tally.refused += 1
                        return
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            seen += 1
                            if seen == 1:
                                tally.first.append(loop.time() - began)
                                patience.reschedule(None)
                            tally.tokens += 1
                            broken |= b'"error"' in line[:20]
            tally.broken += broken
            tally.done += not broken
        except TimeoutError:
            tally.gave_up += 1
        except aiohttp.ClientError:
            tally.broken += 1


@asynccontextmanager
async def demo(flags: dict[str, dict[str, Any]]) -> AsyncIterator[Demo]:
    """Everything, started; the load begins with `run`."""
    async with emulated(engines=ENGINES, card=CARD, slots=SLOTS, speed=SPEED, model="demo") as fleet:
        front = {"port": 0, "admin": "127.0.0.1:0", **flags.get("front", {})}
        router = {"card": CARD, **flags.get("router", {})}
        classes = [
            {"name": name, "match": {"header": name}, "prompt": PROMPTS[name], "output": OUTPUTS[name],
             "rate": RATES[name], "queue": 40}
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
