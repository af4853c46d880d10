"""Engines that break their framing, files that are no files, and clients that want to hold the router up."""

import asyncio
import gzip
import json
import os
import signal
import socket
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from fake_engines import Call, Script, stream
from headgate.core.errors import InputError
from headgate.live.route.classes import read_keys
from headgate.live.route.config import checked, tables_in
from headgate.live.route.deliver.connections import EngineConnection
from headgate.live.route.engines import discover
from headgate.live.route.request import RefusedError, read_body
from headgate.live.route.run import serve
from headgate.live.route.server import RouterApp
from router_world import post, routed, run, until

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: "
ASK = b'POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Length: 30\r\n\r\n{"prompt": "hi", "stream":true}'


async def bad_chunk(call: Call) -> None:
    kind = b"text/event-stream" if call.seen.json.get("stream") else b"application/json"
    await call.raw(HEAD + kind + b"\r\n\r\n")
    await call.chunk(b": hello\n")
    await asyncio.sleep(0.05)  # a read of its own
    await call.raw(b"no size\r\n")
    await asyncio.sleep(600)


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_is_no_longer_http_is_not_waited_for(streams: bool) -> None:
    async def work() -> None:
        async with routed(bad_chunk, stream) as world:
            while not world.engines[0].seen:
                assert (await world.ask(stream=streams)).status == 200
            assert world.counted("retries_total", fault="reset") == 1  # 120 s later it would be first-token
            await world.settled()

    run(work())


async def only_comments(call: Call) -> None:
    await call.head()
    for _ in range(100):
        await call.chunk(b": " + b"x" * 1000 + b"\n\n")
    await asyncio.sleep(600)


def test_comments_before_the_first_token_are_bounded() -> None:
    async def work() -> None:
        async with routed(only_comments, limits={"event": 1 << 16, "tries": 1}) as world:
            answer = await world.stream()
            assert answer.status == 502 and b"comments" in answer.body
            await world.settled()

    run(work())


async def done_and_reset(call: Call) -> None:
    await call.head()
    await call.token("a")
    await call.chunk(b"data: [DONE]\n\n")
    await asyncio.sleep(0.05)
    call.reset()


def test_nothing_follows_the_end_of_a_stream() -> None:
    async def work() -> None:
        async with routed(done_and_reset) as world:
            answer = await world.stream()
            assert answer.body.endswith(b"data: [DONE]\n\n") and not answer.broken
            assert world.app.upstreams[0].breaker._row == 1

    run(work())


async def compressed_and_reset(call: Call) -> None:
    await call.raw(HEAD + b"text/event-stream\r\nContent-Encoding: gzip\r\n\r\n")
    await call.chunk(gzip.compress(b"data: {}\n\n"))
    await asyncio.sleep(0.05)
    call.reset()


async def large_and_reset(call: Call) -> None:
    await call.raw(HEAD + b"application/json\r\n\r\n")
    await call.chunk(b"x" * 100)
    await asyncio.sleep(0.05)
    call.reset()


@pytest.mark.parametrize("script", [compressed_and_reset, large_and_reset])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_body_that_cannot_end_with_an_error_event_is_reset(script: Script, version: bytes) -> None:
    """A client of HTTP/1.0 (nginx by default) takes the end of the connection for that of the body."""

    async def work() -> None:
        async with routed(script, limits={"answer_buffer": 10}) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            writer.write(ASK.replace(b"30", b"31") % version)
            with pytest.raises(ConnectionResetError):
                assert b'"error"' not in await reader.read()
            writer.close()

    run(work())


async def sent(port: int, data: bytes) -> bytes:
    """The first line of what comes back for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    line = await reader.readline()
    writer.close()
    return line


def test_bytes_an_engine_never_reads_are_dropped_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = EngineConnection.connection_lost
    closed: list[EngineConnection] = []
    end = asyncio.Event()
    monkeypatch.setattr(
        EngineConnection, "connection_lost", lambda self, exc: (closed.append(self), lost(self, exc))
    )

    async def reads_heads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
        else:
            writer.transport.pause_reading()
            await end.wait()
            writer.transport.abort()

    async def work() -> None:
        server = await asyncio.start_server(reads_heads, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        body = b'{"prompt": "%b"}' % (b"x" * (16 << 20))  # more than the buffers of two sockets
        async with routed(urls=[url], limits={"first_token": 0.3, "tries": 1}) as world:
            assert b" 504 " in await sent(world.app.port, post(body))
            await world.settled()
            await until(lambda: closed)
        end.set()
        server.close()
        await asyncio.sleep(0)

    run(work())


def test_clients_that_ask_for_models_at_once_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            engine, asked = world.engines[0], []
            answer = engine._probe

            async def probe(call: Call) -> None:
                asked.append(call.seen.path)
                await asyncio.sleep(0.05 if call.seen.path == "/v1/models" else 0)
                await answer(call)

            monkeypatch.setattr(engine, "_probe", probe)
            ask = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            lines = await asyncio.gather(*(sent(world.app.port, ask) for _ in range(20)))
            assert all(b" 200 " in line for line in lines)
            assert asked.count("/v1/models") == 1

    run(work())


def test_all_who_wait_for_the_models_hear_of_one_question_that_brought_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the last of a hundred would wait a hundred times as long as an engine may be silent."""

    async def work() -> None:
        async with routed(stream) as world:
            engine, asked, broken = world.engines[0], [], asyncio.Event()
            answer = engine._probe

            async def probe(call: Call) -> None:
                if call.seen.path != "/v1/models":
                    return await answer(call)
                asked.append(call)
                await broken.wait()
                await call.answer(500, b"")

            monkeypatch.setattr(engine, "_probe", probe)
            ask = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            waiting = [asyncio.create_task(sent(world.app.port, ask)) for _ in range(6)]
            await until(lambda: len(world.app.front._models._asking._waiters or ()) == 5)
            broken.set()
            assert all(b" 503 " in line for line in await asyncio.gather(*waiting)) and len(asked) == 1
            assert b" 503 " in await sent(world.app.port, ask) and len(asked) == 2

    run(work())


def test_every_line_of_via_and_connection_counts() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            ask = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n%b\r\n{}"
            looped = b"Via: 1.1 proxy\r\nVia: 1.1 headgate-route\r\n"
            assert b" 508 " in await sent(world.app.port, ask % looped)
            hops = b"Connection: keep-alive\r\nConnection: x-hop\r\nX-Hop: 1\r\nVia: 1.1 a\r\nVia: 1.1 b\r\n"
            assert b" 200 " in await sent(world.app.port, ask % hops)
            (seen,) = world.engines[0].seen
            assert seen.header("x-hop") is None
            assert seen.header("via") == "1.1 a, 1.1 b, 1.1 headgate-route"

    run(work())


def test_a_client_that_reads_no_refusal_is_cut() -> None:
    async def work() -> None:
        async with routed(stream, limits={"client_stall": 0.2}) as world:
            _, writer = await asyncio.open_connection("127.0.0.1", world.app.port, limit=1)
            await until(lambda: world.app.server._connections)
            for handler in world.app.server._connections:  # buffers of this size are full at once
                handler.transport.set_write_buffer_limits(0)
                handler.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            writer.write(b"GET /no HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000)
            await until(lambda: not world.app.server._connections)
            writer.transport.abort()

    run(work())


def test_a_head_that_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\x00\r\n\r\n"
            assert b" 400 " in await sent(world.app.port, head)

    run(work())
    assert "secret" not in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt":"' + b'a: \\"b\\", ' * (1 << 20) + b'"}', 200),
        (b'{"x":[' + b'["["],' * (1 << 20) + b'0],"kv_transfer_params":{}}', 400),
    ],
    ids=["served", "refused"],
)
def test_no_stream_waits_for_a_large_body(body: bytes, status: int) -> None:
    """In CPU time, which other programs do not lengthen: no turn of the loop takes a fifth of what all do."""

    async def whole(call: Call) -> None:
        await call.answer(200, b'{"choices":[{"text":"x"}]}')

    async def work() -> None:
        async with routed(whole) as world:
            times: list[float] = []

            async def beat() -> None:
                while True:
                    times.append(time.thread_time())
                    await asyncio.sleep(0)

            beating = asyncio.create_task(beat())
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            for start in range(0, len(body), 1 << 16):
                writer.write(body[start : start + (1 << 16)])
                await writer.drain()
            assert b" %d " % status in await reader.readline()
            beating.cancel()
            writer.close()
            await world.settled()
            longest = max(after - before for before, after in pairwise(times))
            began = time.thread_time()
            with suppress(RefusedError):
                read_body(body, "/v1/completions")
            assert longest < (time.thread_time() - began) / 5

    run(work())


@pytest.mark.parametrize("inside", [b"[", b"[{", b'["",'])
def test_deep_bodies_are_refused(inside: bytes) -> None:
    body = b'{"a":' + inside * (1 << 17)
    with pytest.raises(RefusedError, match="deeper than 64"):
        read_body(body, "/v1/completions")


def test_a_body_as_deep_as_allowed_is_read() -> None:
    body = b'{"a":' + b"[" * 63 + b"]" * 63 + b"," + b",".join(b'"b%d":[]' % n for n in range(70)) + b"}"
    assert read_body(body, "/v1/completions").limit > 0
    with pytest.raises(RefusedError, match="deeper than 64"):
        read_body(body.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1), "/v1/completions")


@pytest.mark.parametrize("field", [b"model", b"max_tokens", b"n"])
def test_bytes_that_are_no_text_are_the_client_s_mistake(field: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_body(b'{"%b":"\xff"}' % field, "/v1/completions")
    assert refused.value.status == 400


@pytest.mark.parametrize("value", ['["class"]', '{"class": ["a"]}', '{"class": 1}', '"class"', "1"])
def test_metadata_without_a_class(value: str) -> None:
    body = json.dumps({"metadata": json.loads(value), "n": [1], "echo": {}}).encode()
    asked = read_body(body, "/v1/completions")
    assert asked.field_class is None and not asked.splittable


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000])
def test_toml_that_breaks_the_parser_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(InputError, match="cannot be read"):
        tables_in(file)


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for read in (
        tables_in,
        read_keys,
        lambda path: asyncio.run(discover(checked({"discovery": {"file": path}}))),
    ):
        for path in (pipe, "/dev/zero", "a\0b"):
            with pytest.raises(InputError):
                read(path)


def test_a_list_of_many_engines_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "engines.txt"
    file.write_text("".join(f"http://e{n}:1\n" for n in range(100_000)))  # comparing all pairs took minutes
    assert len(asyncio.run(discover(checked({"discovery": {"file": str(file)}})))) == 1000


def test_a_dns_name_that_is_none_is_one_line() -> None:
    with pytest.raises(InputError, match=r"a[.][.]b: .*label"):
        asyncio.run(discover(checked({"discovery": {"dns": "a..b:80"}})))


def test_a_hang_up_signal_while_the_router_starts_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(app: RouterApp) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        raise InputError("it went on")

    monkeypatch.setattr(RouterApp, "start", start)
    old = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("ended"))
    try:
        with pytest.raises(InputError, match="it went on"):
            serve(config := checked({"engines": [{"url": "http://a:1"}]}), lambda: config, None, print)
    finally:
        signal.signal(signal.SIGHUP, old)


def test_the_router_may_open_as_many_files_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: set_to.append(limits))
    monkeypatch.setattr("asyncio.Runner.run", lambda _, work: work.close())
    serve(config := checked({"engines": [{"url": "http://a:1"}]}), lambda: config, None, print)
    assert set_to == [(4096, 4096)]
