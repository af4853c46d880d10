import asyncio
import json

import pytest

from fake_engines import Call, stream
from headgate.live.route.deliver.relay import ClientWriter
from router_world import post, routed, run, until

EVENTS, SIZE = 300, 50_000  # more than the buffers of two sockets


def test_calls_in_turn_share_a_connection() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            for streams in (True, False, True):
                assert (await world.ask(stream=streams)).status == 200
                await world.settled()
            calls = [each for each in world.engines[0].seen if each.method == "POST"]
            assert len({each.connection for each in calls}) == 1

    run(work())


def test_a_connection_whose_answer_was_not_read_is_not_used_again() -> None:
    async def endless(call: Call) -> None:
        await call.head()
        await call.token()
        await call.seen.closed.wait()

    async def work() -> None:
        async with routed(endless) as world:
            for _ in range(2):
                async with world.client.post(
                    world.url + "/v1/completions", data=b'{"prompt":"a","stream":true}'
                ) as response:
                    await response.content.readany()
                    response.close()
                await world.settled()
            calls = [each for each in world.engines[0].seen if each.method == "POST"]
            await until(lambda: all(each.closed.is_set() for each in calls))
            assert len({each.connection for each in calls}) == 2

    run(work())


def late(seconds: float):
    """An engine that answers everything twice."""

    async def script(call: Call) -> None:
        body = json.dumps({"choices": [{"text": call.seen.json["prompt"]}]}).encode()
        await call.answer(200, body)

        async def again() -> None:
            await asyncio.sleep(seconds)
            await call.answer(200, body)

        call.engine._tasks.add(asyncio.create_task(again()))

    return script


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_an_engine_that_answers_twice_has_no_connection_for_two_clients(seconds: float) -> None:
    async def work() -> None:
        async with routed(late(seconds)) as world:
            await world.ask(prompt="first")
            (connection,) = [each.writer for each in world.engines[0].calls]
            await until(connection.transport.is_closing)
            for number in range(30):
                answer = await world.ask(prompt=f"p{number}")
                assert answer.json["choices"][0]["text"] == f"p{number}"
            assert len({each.connection for each in world.engines[0].seen}) == 31
            await world.settled()

    run(work())


def test_a_proxy_that_closes_an_idle_connection_is_no_such_engine() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            await world.ask()
            await world.settled()
            (call,) = world.engines[0].calls
            await call.raw(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            await until(call.writer.transport.is_closing)
            for _ in range(2):
                assert (await world.ask()).status == 200
                await world.settled()
            assert len({each.connection for each in world.engines[0].seen}) == 2

    run(work())


def test_a_client_that_lags_gets_every_byte_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    written = ClientWriter.write

    async def write(self: ClientWriter, data: bytes) -> None:
        waits.append(len(data))
        await written(self, data)

    monkeypatch.setattr(ClientWriter, "write", write)
    sent = bytearray()

    async def many(call: Call) -> None:
        await call.head()
        for number in range(EVENTS):
            event = b'data: {"choices":[{"text":"%0*d"}]}\n\n' % (SIZE, number)
            sent.extend(event)
            await call.raw(b"%x\r\n%b\r\n" % (len(event), event))
        sent.extend(b"data: [DONE]\n\n")
        await call.done()

    async def work() -> None:
        async with routed(many) as world:
            body = json.dumps({"model": "m", "prompt": "a", "stream": True}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port, limit=4096)
            writer.write(post(body))
            await until(lambda: len(waits) > 1)  # the client has not read, so the router has to wait
            await reader.readuntil(b"\r\n\r\n")
            got = bytearray()
            while size := int(await reader.readline(), 16):
                got += (await reader.readexactly(size + 2))[:-2]
            assert got == sent
            writer.close()
            await world.settled()

    run(work())
