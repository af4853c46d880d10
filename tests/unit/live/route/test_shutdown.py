"""The end of a router: requests that wait are refused, nothing new is begun, the process exits soon."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from multidict import CIMultiDict

from fake_engines import Call, FakeEngine, never, one_token, stream
from headgate.live.route.config import RouteLimits, checked
from headgate.live.route.deliver import handover as split
from headgate.live.route.deliver.connections import Fault, LegError
from headgate.live.route.deliver.relay import Leg
from headgate.live.route.run import _serve
from headgate.live.route.server import LAST_WORDS
from router_world import PATIENCE, routed, run, until


def test_requests_in_the_queue_are_refused_after_the_drain_timeout_and_open_no_call() -> None:
    async def work() -> None:
        front = {"drain_timeout": 0.2}
        async with routed(one_token, engine={"slots": 1}, front=front) as world:
            running = [asyncio.create_task(world.stream()) for _ in range(2)]  # a slot and its spare
            await until(lambda: len(world.engines[0].seen) == 2)
            queued = [asyncio.create_task(world.stream()) for _ in range(5)]
            await until(lambda: len(world.app.gate.roster.waiting) == 5)
            assert not await world.app.drain()
            answers = await asyncio.gather(*queued)
            assert {each.status for each in answers} == {503}
            assert all(int(each.headers["Retry-After"]) >= 1 for each in answers)
            assert all("shutting down" in each.json["error"]["message"] for each in answers)
            for each in await asyncio.gather(*running):
                assert each.events[-1]["error"]["code"] == 503
            await world.settled()
            assert len(world.engines[0].seen) == 2  # their slots came free, and nobody took them

    run(work())


def test_a_try_that_fails_at_the_end_is_not_repeated() -> None:
    release = asyncio.Event()

    async def fails(call: Call) -> None:
        await release.wait()
        call.reset()

    async def work() -> None:
        async with routed(fails, stream) as world:
            world.app.drain_engine(world.app.upstreams[1], True)
            asked = asyncio.create_task(world.stream())
            await until(lambda: world.engines[0].seen)
            world.app.drain_engine(world.app.upstreams[1], False)
            world.app.gate.shut()
            world.app.front.refusing = True
            release.set()
            answer = await asked
            assert answer.status == 503
            assert not world.engines[1].seen
            await world.settled()

    run(work())


def test_the_router_stops_although_clients_do_not_read_and_engines_do_not_answer() -> None:
    async def floods(call: Call) -> None:
        await call.head()
        while True:
            await call.token("x" * 100_000)

    async def work() -> None:
        async with routed(floods, never, limits={"client_stall": 3600.0}) as world:
            readers = []
            for _ in range(4):
                reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port, limit=1024)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n")
                writer.write(b'{"stream":true}')
                readers.append((reader, writer))
            await until(lambda: all(engine.seen for engine in world.engines))
            began = time.monotonic()
            await world.app.stop()
            # aiohttp waits a minute by itself; a busy machine may take a while for the two seconds here
            assert time.monotonic() - began < 10 * LAST_WORDS
            for _, writer in readers:
                writer.close()

    run(work())


def test_a_second_signal_exits_at_once() -> None:
    async def work() -> None:
        async with FakeEngine(never) as engine:
            front = {"port": 0, "admin": "127.0.0.1:0", "drain_delay": 1000.0, "drain_timeout": 1000.0}
            config, said = checked({"engines": [{"url": engine.url}], "front": front}), list[str]()
            router = asyncio.create_task(_serve(config, lambda: config, None, said.append))
            await until(lambda: len(said) == 2)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: said[-1].startswith("draining"))
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(router, PATIENCE)

    run(work())


def test_a_call_cut_before_it_is_made_is_not_made() -> None:
    leg = Leg(None, "http://x", "/v1/completions", RouteLimits())  # type: ignore[arg-type]
    leg.break_off("enough")
    with pytest.raises(LegError, match="enough") as cut:
        asyncio.run(leg.start(b"{}", CIMultiDict()))
    assert cut.value.fault is Fault.CUT and not cut.value.retry


def test_no_call_is_open_while_the_body_of_a_prefill_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routed(stream, stream, router={"name": "split:prefill=1"}) as world:
            open, make = [], split.prefill_body

            def making(*given: Any) -> Any:
                open.append(sum(each.legs for each in world.app.upstreams.values()))
                return make(*given)

            monkeypatch.setattr(split, "prefill_body", making)
            assert (await world.stream()).status == 200
            assert open and not any(open)

    run(work())
