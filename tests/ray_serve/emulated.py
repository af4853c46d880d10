"""An emulated engine as a replica of Ray Serve, and callers with routers of their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from ray import serve
from starlette.requests import Request

from headgate.cost.card import load_card
from headgate.live.emulate.clock import WallClock
from headgate.live.emulate.engine import EmulatedEngine
from headgate.live.emulate.job import Job
from headgate.live.emulate.text import Text
from headgate.live.route.ray_replica import Reports
from headgate.methods.make import make_policy
from headgate.sim.engine.of_card import engine_of_card

SEATS = 4


class Lines:
    """Tokens of one job, for whoever awaits them."""

    streams = True

    def __init__(self) -> None:
        self.counts: asyncio.Queue[int | None] = asyncio.Queue()

    def tokens(self, job: Job) -> None:
        self.counts.put_nowait(job.made)

    def end(self, job: Job) -> None:
        self.counts.put_nowait(job.made)
        self.counts.put_nowait(None)


class Engine(Reports):
    """Streams the tokens of an emulated engine; counts how many requests it ever had at once.

    While the file `held` is there, requests keep their places and get nothing.
    """

    seats = SEATS

    def __init__(self, speed: float, held: str) -> None:
        self.held = Path(held)
        engine = engine_of_card(load_card("cal-h200-qwen3-8b"), SEATS, 512)
        self.engine = EmulatedEngine(engine, make_policy("mixed", {}, engine)[0], WallClock(speed))
        self.inside = self.most = self.served = 0
        self.task = asyncio.create_task(self.engine.run())

    async def generate(
        self, number: int, prompt: int, output: int, metadata: dict[str, str] | None = None
    ) -> AsyncIterator[tuple[int, int]]:
        """The number and the count of tokens so far."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        lines = Lines()
        job = Job(prompt, output, output, Text(number), lines)
        try:
            while self.held.exists():
                await asyncio.sleep(0.05)
            self.engine.submit(job)
            async for made in self.reported(_lines(lines)):
                yield number, made
            self.served += 1
        finally:
            self.engine.abort(job)
            self.inside -= 1

    async def __call__(self, request: Request) -> dict[str, int]:
        """The same over HTTP, with as many tokens as the path says."""
        answer = self.generate(0, 10, int(request.query_params["output"]))
        return {"made": [made async for _, made in answer][-1]}

    async def about(self) -> dict[str, int]:
        return {"most": self.most, "served": self.served, "inside": self.inside, "pid": os.getpid()}


async def _lines(lines: Lines) -> AsyncIterator[int]:
    while (made := await lines.counts.get()) is not None:
        yield made


class Caller:
    """A process with a router of its own: what each HTTP proxy is."""

    def __init__(self, app: str) -> None:
        self.handle = serve.get_app_handle(app).options(method_name="generate", stream=True)

    async def ask(self, number: int, output: int, kind: str = "") -> str:
        """Tokens of one answer, or the name of the error."""
        about = {"metadata": {"class": kind}} if kind else {}
        try:
            counts = [made async for _, made in self.handle.remote(number, 20, output, **about)]
        except Exception as error:
            return type(error).__name__
        return str(counts[-1])

    async def load(self, requests: int, output: int, at_once: int = 40) -> list[str]:
        """So many answers, with some under way at once."""
        left, found = iter(range(requests)), []

        async def client() -> None:
            for number in left:
                found.append(await self.ask(number, output))

        await asyncio.gather(*(client() for _ in range(at_once)))
        return found
