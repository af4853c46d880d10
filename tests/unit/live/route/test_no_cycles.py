"""What a request leaves: nothing that only the cyclic collector frees.

A collection stops the router, and with it every stream, for as long as the objects of all streams take to be
looked at. So requests that end must not call for one.
"""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from fake_engines import Call, stream
from headgate.live.emulate import emulated
from headgate.live.route.deliver.connections import Tap
from headgate.live.route.deliver.relay import Leg
from headgate.live.route.gate.gate import Ticket
from router_world import World, routed, run, until

KEPT = (Ticket, Leg, Tap)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> list[object]:
    return [each for each in gc.get_objects() if isinstance(each, KEPT)]


async def nothing_left(world: World) -> None:
    await world.settled()
    await until(lambda: not left())


async def breaks(call: Call) -> None:
    await call.head()
    await call.token()
    await call.token()
    call.reset()


async def refuses(call: Call) -> None:
    await call.answer(503, b'{"error": "no"}')


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer(streams: bool) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            for _ in range(5):
                assert (await world.ask(stream=streams)).status == 200
            await nothing_left(world)

    run(work())


@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_that_dies_within_a_stream_or_refuses(streams: bool) -> None:
    async def work() -> None:
        async with routed(breaks if streams else refuses, refuses) as world:
            for _ in range(3):
                await world.ask(stream=streams)
            await nothing_left(world)

    run(work())


def test_a_client_that_hangs_up() -> None:
    held = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.head()
        await call.token()
        await held.wait()

    async def work() -> None:
        async with routed(waits) as world:
            async with world.client.post(
                world.url + "/v1/completions", json={"model": "m", "prompt": "a", "stream": True}
            ) as got:
                await got.content.readany()
            await world.engines[0].seen[0].closed.wait()
            await nothing_left(world)
            held.set()

    run(work())


def test_prefill_and_decode_apart() -> None:
    async def work() -> None:
        async with emulated(engines=2, speed=50.0, slots=32, model="m", kv_lease=1e6) as fleet:
            config = {"router": {"name": "split:prefill=1"}, "kv": {"lease": 300.0}}
            async with routed(urls=list(fleet), engine={"slots": 32}, **config) as world:
                for _ in range(3):
                    assert (await world.stream(max_tokens=5)).status == 200
                await nothing_left(world)

    run(work())
