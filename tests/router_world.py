"""A router before fake or emulated engines, in one event loop, for tests."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest

from fake_engines import FakeEngine, Script, stream
from headgate.live.route.config import checked
from headgate.live.route.deliver.connections import Fault, LegError
from headgate.live.route.deliver.handover import REFUSED_LENGTH, release_body
from headgate.live.route.deliver.relay import Leg
from headgate.live.route.request import at_once
from headgate.live.route.server import RouterApp

PATIENCE = float(
    os.environ.get("HEADGATE_TEST_PATIENCE", "120")
)  # seconds a condition may take on a busy machine


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine to its end, with a limit."""

    async def limited() -> None:
        async with asyncio.timeout(2 * PATIENCE):
            await work

    asyncio.run(limited())


def post(body: bytes) -> bytes:
    """A request as it goes over the wire."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, not for a time."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


class Answer(NamedTuple):
    status: int
    headers: aiohttp.typedefs.LooseHeaders
    body: bytes
    broken: bool  # the connection ended before the body did

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        data = [piece.removeprefix(b"data: ") for piece in self.body.split(b"\n\n") if piece]
        return [each if each == b"[DONE]" else json.loads(each) for each in data]


class World:
    """The router, its engines and a client."""

    def __init__(self, app: RouterApp, client: aiohttp.ClientSession, engines: list[FakeEngine]) -> None:
        self.app, self.client, self.engines = app, client, engines
        self.url = f"http://127.0.0.1:{app.port}"
        self.admin = f"http://127.0.0.1:{app.admin_port}"

    async def ask(
        self,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        **body: Any,
    ) -> Answer:
        """One request, read to its end."""
        data = json.dumps({"model": "m", "prompt": "hello", **body}).encode() if raw is None else raw
        given = {"Content-Type": "application/json", **(headers or {})}
        async with self.client.post(self.url + path, data=data, headers=given) as response:
            parts, broken = [], False
            try:
                async for part in response.content.iter_any():
                    parts.append(part)
            except aiohttp.ClientPayloadError:
                broken = True
            return Answer(response.status, response.headers, b"".join(parts), broken)

    async def stream(self, **body: Any) -> Answer:
        return await self.ask(stream=True, **body)

    @property
    def at_rest(self) -> bool:
        """No slot, queue, leg, byte or background task is left."""
        gate, app = self.app.gate, self.app
        return (
            not gate.tickets
            and not gate.roster.places
            and not gate.roster.waiting
            and all(each.legs == 0 for each in app.upstreams.values())
            and app.front.inflight == 0
            and app.body_bytes.held == 0
            and not app.service.splitter.background
            and not app.legs.open_calls
        )

    async def settled(self) -> None:
        """Everything is back at 0 and every invariant holds."""
        await until(lambda: self.at_rest)
        assert self.app.gate.check() == []
        assert all(slot.prompts == slot.decodes == 0 for slot in self.app.gate.roster.replicas)
        assert self.app.gate.counts["ended_twice"] == 0

    def counted(self, name: str, **labels: str) -> float:
        """A metric's value, 0 before it was counted."""
        return self.app.metrics.registry.get_sample_value(f"headgate_{name}", labels) or 0.0


CALM = {
    "front": {"port": 0, "admin": "127.0.0.1:0", "drain_delay": 0.0},
    "health": {"every": 0.1, "timeout": 30.0, "fails": 1000},
}  # engines are judged by their calls, not by probes that a busy machine may delay


def merged(*tables: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return made


@asynccontextmanager
async def routed(
    *scripts: Script, urls: list[str] | None = None, engine: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[World]:
    """A router before one fake engine per script, or before engines at these addresses."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine(script)) for script in scripts]
        listed = [{"url": url, **(engine or {})} for url in (urls or [fake.url for fake in fakes])]
        given = checked(merged(CALM, {"engines": listed}, config))
        app = RouterApp(given, lambda: given)
        try:
            await app.start()
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            ) as client:
                yield World(app, client, fakes)
        finally:
            await app.stop()


def fail_first_decode(patch: pytest.MonkeyPatch, refused: bool) -> list[Any]:
    """The first decode with KV parameters fails after its engine has them; all parameters that were sent.

    `refused`: the engine itself refuses it, which frees the KV at its owner; otherwise the engine has read
    the KV and then the connection breaks.
    """
    sent: list[Any] = []
    start = Leg.start

    async def failing(leg: Leg, body: bytes, headers: Any, first_token: float | None = None) -> None:
        fields = json.loads(body)
        params = fields.get("kv_transfer_params") or {}
        if not params.get("do_remote_prefill") or fields.get("max_tokens") == REFUSED_LENGTH:
            return await start(leg, body, headers, first_token)
        sent.append(params["remote_request_id"])
        if len(sent) > 1:
            return await start(leg, body, headers, first_token)
        raw = json.dumps(params).encode()
        await start(leg, at_once(release_body(body, raw)) if refused else body, headers, first_token)
        assert leg.status == (400 if refused else 200)
        leg.close()
        raise LegError(Fault.BUSY if refused else Fault.RESET, "made up", 503 if refused else 0)

    patch.setattr(Leg, "start", failing)
    return sent


Check = Callable[[World], Awaitable[None]]
__all__ = ["Answer", "Check", "World", "fail_first_decode", "post", "routed", "run", "stream", "until"]
