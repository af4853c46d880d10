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
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.emulate.text import Text
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import engine_of_card
from headgate_ray.router import Reports

SLOTS = 4
HELD = "held"
HTTP = 10**6  # the number of requests that come over HTTP


class Lines:
    """Tokens of one job, for whoever awaits them."""

    streams = True

    def __init__(self) -> None:
        self.counts: asyncio.Queue[int | None] = asyncio.Queue()

    def tokens(self, job: EmulatedJob) -> None:
        self.counts.put_nowait(job.made)

    def end(self, job: EmulatedJob) -> None:
        self.counts.put_nowait(job.made)
        self.counts.put_nowait(None)


class Engine(Reports):
    """Streams the tokens of an emulated engine.

    Its folder says what happens: while the file `held` is there, requests keep their places and get nothing,
    except those whose number is the name of a file. The file `PID.most` says how many it ever had at once.
    """

    slots = SLOTS

    def __init__(self, speed: float, folder: str) -> None:
        self.folder = Path(folder)
        engine = engine_of_card(load_card("cal-h200-qwen3-8b"), SLOTS, 512)
        self.engine = EmulatedEngine(engine, make_policy("mixed", {}, engine)[0], WallClock(speed))
        self.inside = self.most = 0
        self.task = asyncio.create_task(self.engine.run())
        self._note()

    def _note(self) -> None:
        temporary = self.folder / f"{os.getpid()}.part"
        temporary.write_text(str(self.most))
        temporary.replace(self.folder / f"{os.getpid()}.most")

    async def generate(
        self, number: int, prompt: int, output: int, metadata: dict[str, str] | None = None
    ) -> AsyncIterator[tuple[int, int]]:
        """The number and the count of tokens so far."""
        self.inside += 1
        if self.inside > self.most:
            self.most = self.inside
            self._note()
        lines = Lines()
        job = EmulatedJob(prompt, output, output, Text(number), lines)
        try:
            while (self.folder / HELD).exists() and not (self.folder / str(number)).exists():
                await asyncio.sleep(0.05)
            self.engine.submit(job)
            async for made in self.reported(_lines(lines)):
                yield number, made
        finally:
            self.engine.abort(job)
            self.inside -= 1

    async def __call__(self, request: Request) -> dict[str, int]:
        """The same over HTTP, with as many tokens as the path says."""
        answer = self.generate(HTTP, 10, int(request.query_params["output"]))
        return {"made": [made async for _, made in answer][-1]}


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
