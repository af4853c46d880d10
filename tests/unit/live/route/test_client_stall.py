"""Clients that do not read their answer: cut after a while, and nothing of theirs is kept."""

import asyncio
import json
import socket

import pytest

from fake_engines import Call
from headgate.live.route.deliver.relay import Progress
from router_world import World, post, routed, run, until
from still_loop import Still

STALL = 0.3
LARGE = 8 << 20  # bytes: more than the sockets between router and client hold


async def floods(call: Call) -> None:
    await call.head()
    while True:
        await call.token("x" * 100_000)


async def one_large_event(call: Call) -> None:
    await call.head()
    await call.token("x" * LARGE)
    await asyncio.Event().wait()


async def large_answer(call: Call) -> None:
    text = {"choices": [{"text": "x" * LARGE, "finish_reason": "stop"}]}
    await call.answer(200, json.dumps(text).encode())


async def asked(world: World, streams: bool) -> socket.socket:
    """A client with a small window that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", world.app.port))
    await loop.sock_sendall(client, post(json.dumps({"prompt": "x", "stream": streams}).encode()))
    return client


CASES = {
    "in the middle of a stream": (floods, True, {}),
    "in its first event": (one_large_event, True, {"event": 2 * LARGE}),
    "a whole answer": (large_answer, False, {"answer_buffer": 2 * LARGE}),
    "an answer larger than the buffer": (large_answer, False, {"answer_buffer": 100_000}),
}


@pytest.mark.parametrize(("script", "streams", "limits"), CASES.values(), ids=CASES)
def test_a_client_that_does_not_read_is_cut(script, streams: bool, limits: dict) -> None:
    async def work() -> None:
        async with routed(script, limits={"client_stall": STALL, **limits}) as world:
            client = await asked(world, streams)
            labels = {"class": "default", "outcome": "client-stalled"}
            await until(lambda: world.counted("requests_total", **labels) == 1)
            await world.settled()  # slot, call and bytes are given back
            if streams:
                await world.engines[0].seen[0].closed.wait()  # the engine is told
            assert world.app.upstreams[0].breaker._row == 0  # and not blamed
            client.close()

    run(work())


def test_a_whole_answer_holds_no_slot_while_it_is_read() -> None:
    async def work() -> None:
        limits = {"client_stall": 60.0, "answer_buffer": 2 * LARGE}
        async with routed(large_answer, limits=limits) as world:
            client = await asked(world, streams=False)
            await until(lambda: world.app.body_bytes.held > LARGE)  # counted against inflight_bytes
            assert not world.app.gate.tickets
            assert world.app.upstreams[0].legs == 0
            client.close()
            await world.settled()

    run(work())


def progress(idle: float, stall: float) -> tuple[Still, Progress, list[str]]:
    """One on a clock that is set by hand, and which side it cut."""
    loop, cut = Still(), []
    return loop, Progress(idle, stall, lambda: cut.append("idle"), lambda: cut.append("stall"), loop), cut


def test_each_side_has_its_own_limit() -> None:
    loop, made, cut = progress(idle=60.0, stall=30.0)
    loop.go(50.0)  # the engine thinks for longer than a client may stall
    made.touch()
    made.writing = True
    loop.go(79.0)
    assert not cut
    loop.go(81.0)
    assert cut == ["stall"] and made.stalled and not made.silent

    loop, made, cut = progress(idle=10.0, stall=30.0)
    made.writing = True
    loop.go(29.0)  # the client reads slowly; the engine is not to blame
    made.writing = False
    made.touch()
    loop.go(38.0)
    assert not cut
    loop.go(40.0)
    assert cut == ["idle"] and made.silent and not made.stalled


def test_an_answer_that_has_ended_is_not_cut() -> None:
    loop, made, cut = progress(idle=10.0, stall=30.0)
    made.stop()
    loop.go(100.0)
    assert not cut


def test_a_client_has_little_time_for_a_whole_answer_beyond_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def whole(call: Call) -> None:
        await call.answer(200, b'{"choices":[{"text":"%b"}]}' % (b"x" * 3_900_000))

    async def work() -> None:
        monkeypatch.setattr("headgate.live.route.front.HURRY", 0.1)
        limits = {"inflight_bytes": 1 << 20, "client_stall": 600.0}
        async with routed(whole, limits=limits) as world:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", world.app.port))
                client.send(post(b'{"prompt": "hi"}'))
                await until(lambda: world.engines[0].seen)
                await world.settled()  # long before the 600 s

    run(work())
