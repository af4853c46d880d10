import asyncio
import json
from contextlib import suppress

import pytest

from fake_engines import Call, stream
from headgate.live.route.deliver.connections import EngineAnswer, EngineConnection, IdleConnections, LegError
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


def test_a_fault_of_ours_in_a_stream_is_not_followed_by_a_second_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*about: object) -> bytes:
        raise RuntimeError("a fault")

    async def work() -> None:
        async with routed(stream) as world:
            monkeypatch.setattr("headgate.live.route.deliver.relay.Leg.pump", fails)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            writer.write(post(b'{"prompt":"x","stream":true}'))
            got = b""
            with suppress(ConnectionResetError):
                while part := await reader.read(1 << 16):
                    got += part
            writer.close()
            assert got.count(b"HTTP/1.1") <= 1 and b" 500 " not in got and b"0\r\n\r\n" not in got
            await world.settled()
        assert any("failed inside" in each.message for each in caplog.records)

    run(work())


class Wire:
    """A transport that remembers whether it was closed."""

    closed = False

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


def parsed(*reads: bytes) -> tuple[EngineConnection, EngineAnswer]:
    connection = EngineConnection()
    connection.connection_made(Wire())
    answer = connection.send(b"", b"", IdleConnections("x"))
    for data in reads:
        connection.data_received(data)
    return connection, answer


OK = b"HTTP/1.1 200 OK\r\n"
BODIES = {  # what follows the status, and the body in it
    "length": (b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "chunks": (b"transfer-encoding: Chunked\r\n\r\n3\r\nhel\r\n02;x=1\r\nlo\r\n0\r\n\r\n", b"hello"),
    "trailer": (b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: 1\r\nY: 2\r\n\r\n", b"hello"),
    "nothing": (b"Content-Length: 0\r\n\r\n", b""),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_answer_is_read_the_same_wherever_it_is_cut(name: str) -> None:
    rest, body = BODIES[name]
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + OK + rest
    cuts = [(data[:at], data[at:]) for at in range(1, len(data))]
    for reads in [*cuts, [data[at : at + 1] for at in range(len(data))]]:
        connection, answer = parsed(*reads)
        assert (answer.status, answer.ended, answer.take(), answer.error) == (200, True, body, None)
        assert connection.is_reusable and not connection.has_more
        assert not parsed(*reads, b"H")[0].is_reusable
    connection, answer = parsed(data + b"HTTP/1.1 200 OK\r\n")
    assert answer.ended and connection.has_more and not connection.is_reusable


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n",
        OK + b"X:" + b" " * 60_000 + b"\x01\r\n\r\n",  # must not take a quadratic time
        b"http/1.1 200 OK\r\n\r\n",
        b"\r\nHTTP/1.1 200 OK\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        OK + b"Content-Length: 5, 5\r\n\r\nhello",
        OK + b"Content-Length: +5\r\n\r\nhello",
        OK + b"Content-Length: 0x5\r\n\r\nhello",
        OK + b"Content-Length : 5\r\n\r\nhello",
        OK + b"Content-Length:\r\n 5\r\n\r\nhello",
        OK + b"X: a\nContent-Length: 5\r\n\r\nhello",
        OK + b"X: a\rY: 5\r\n\r\nhello",
        OK + b"X: a\0\r\n\r\nhello",
        OK + b"X\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"X: " + b"x" * (1 << 17),
    ],
)
def test_a_head_that_may_be_read_in_two_ways_is_refused(data: bytes) -> None:
    connection, answer = parsed(data)
    assert answer.status == 0 and isinstance(answer.error, LegError) and not answer.parts
    assert not connection.is_connected


@pytest.mark.parametrize(
    "data",
    [b"0x5\r\nhello\r\n", b"-5\r\n", b" 5\r\nhello\r\n", b"5\nhello\r\n", b"5\r\nhelloX\r\n",
     b"5\r\nhello\n\n", b"123456789\r\n", b"5" * 300, b"\r\n0\r\n\r\n", b"5\x00\r\nhello\r\n"],
)  # fmt: skip
def test_chunks_that_are_none_break_the_answer(data: bytes) -> None:
    for reads in ([data], [data[at : at + 1] for at in range(len(data))]):
        connection, answer = parsed(OK + b"Transfer-Encoding: chunked\r\n\r\n", *reads)
        assert isinstance(answer.error, ConnectionResetError) and not answer.ended
        assert not connection.is_connected


def test_interim_answers_are_stepped_over_but_not_without_end() -> None:
    end = OK + b"Content-Length: 0\r\n\r\n"
    connection, answer = parsed(b"HTTP/1.1 103\r\n\r\n" * 32 + end)
    assert (answer.status, answer.ended) == (200, True) and connection.is_reusable
    connection, answer = parsed(b"HTTP/1.1 103\r\n\r\n" * 20_000 + end)
    assert isinstance(answer.error, LegError) and not connection.is_connected


@pytest.mark.parametrize("status", [b"101", b"204", b"304"])
def test_a_connection_is_not_used_again_after_an_answer_that_has_no_body(status: bytes) -> None:
    connection, answer = parsed(b"HTTP/1.1 " + status + b" X\r\nContent-Length: 5\r\n\r\n")
    assert answer.ended and not connection.is_reusable


def test_an_answer_without_a_length_that_is_closed_here_has_not_ended() -> None:
    connection, answer = parsed(OK + b"\r\npart")
    answer.close()
    connection.connection_lost(None)
    assert not answer.ended
    connection, answer = parsed(OK + b"\r\nall")
    connection.connection_lost(None)
    assert answer.ended and answer.take() == b"all"
