"""Emulated engines, a router before them and clients, in one process: the router without a GPU."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from headgate.live.emulate import Emulators, emulated
from headgate.live.route.app import RouterApp
from headgate.live.route.config import checked

CARD, SPEED, SLOTS, ENGINES = "cal-h200-qwen3-8b", 0.2, 8, 4
RATES = {"chat": 8.0, "batch": 5.0}  # requests a second, beyond what the engines can serve
PROMPTS = {"chat": 256, "batch": 2048}  # tokens
OUTPUTS = {"chat": 60, "batch": 90}
PATIENCE = 10.0  # seconds a client waits for its first token
KEPT = 400  # times to first token per class
DOWN_AT, UP_AT = 8.0, 16.0  # seconds: engine 1 dies and comes back


@dataclass
class Tally:
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
        self.tallies = {name: Tally() for name in RATES}
        self.event = "all engines are up"
        self._draw = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Clients come, and one engine dies and comes back."""
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
        engines = [{"url": url, "seats": SLOTS} for url in fleet]
        health = {"every": 0.5, "fails": 1}
        given = {"front": front, "router": router, "classes": classes, "engines": engines, "health": health}
        app = RouterApp(checked(given))
        try:
            await app.start()
            yield Demo(app, fleet)
        finally:
            await app.stop()
