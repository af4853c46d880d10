"""Streams that break, clients that go, bytes that must be equal."""

import asyncio
import json

import pytest

from fake_engines import STREAM_HEAD, Call, stream
from headgate.live.route.deliver.relay import ClientWriter
from router_world import World, post, routed, run, until


async def two_tokens(call: Call) -> None:
    await call.head()
    await call.token("a")
    await call.token("b")


async def reset_after_two(call: Call) -> None:
    await two_tokens(call)
    await asyncio.sleep(0.05)  # a reset discards what the receiver has not read yet
    call.reset()


async def reset_inside_an_event(call: Call) -> None:
    await two_tokens(call)
    await call.chunk(b'data: {"choices":[{"text":"c')
    await asyncio.sleep(0.05)
    call.reset()


async def ends_without_done(call: Call) -> None:
    await two_tokens(call)
    await call.finish()


async def ends_inside_an_event(call: Call) -> None:
    await two_tokens(call)
    await call.chunk(b'data: {"cho')
    await call.finish()


async def silent_after_two(call: Call) -> None:
    await two_tokens(call)
    await asyncio.Event().wait()


BREAKS = {
    "reset": (reset_after_two, 502),
    "reset inside an event": (reset_inside_an_event, 502),
    "clean end without [DONE]": (ends_without_done, 502),
    "idle": (silent_after_two, 504),
}


@pytest.mark.parametrize(("script", "code"), BREAKS.values(), ids=BREAKS)
def test_a_broken_stream_ends_with_an_error_event(script, code: int) -> None:
    async def work() -> None:
        async with routed(script, script, limits={"idle": 0.3}) as world:
            answer = await world.stream()
            assert answer.status == 200
            assert not answer.broken
            *tokens, error = answer.events  # all of them whole events
            assert [each["choices"][0]["text"] for each in tokens] == ["a", "b"]
            assert error["error"]["code"] == code
            assert error["error"]["type"] == "server_error"
            assert b"[DONE]" not in answer.body
            assert sum(len(engine.seen) for engine in world.engines) == 1  # never sent twice
            await world.settled()
            assert world.counted("requests_total", **{"class": "default", "outcome": "failed"}) == 1
            assert sum(each.breaker._row for each in world.app.upstreams.values()) == 1

    run(work())


TOKEN, END = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', b"data: [DONE]\n\n"
FAILED = b'"the engine ended the stream too early"'


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(("events", "seen"), [((TOKEN, END), TOKEN + END), ((TOKEN,), FAILED)])
def test_an_answer_that_came_at_once_is_written_at_once(
    events: tuple[bytes, ...], seen: bytes, version: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    send, end = ClientWriter.write, ClientWriter.end

    async def write(self: ClientWriter, data: bytes) -> None:
        if data:
            writes.append(data)
        await send(self, data)

    async def last(self: ClientWriter, data: bytes = b"") -> None:
        writes.append(data)
        await end(self, data)

    monkeypatch.setattr(ClientWriter, "write", write)
    monkeypatch.setattr(ClientWriter, "end", last)

    async def at_once(call: Call) -> None:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
        await call.raw(STREAM_HEAD + chunks + b"0\r\n\r\n")

    async def work() -> None:
        async with routed(at_once) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            ask = post(b'{"prompt": "x", "stream": true}').replace(b"HTTP/1.1", b"HTTP/" + version)
            writer.write(ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
            writer.close()
            if version == b"1.1":
                assert len(writes) == 1
                lengths, body = body.split(b"\r\n")[::2], b"".join(body.split(b"\r\n")[1::2])
                assert lengths[-2:] == [b"0", b""]
            assert head.startswith(b"HTTP/") and b" 200 " in head and seen in body
            assert body.startswith(TOKEN) and body.count(TOKEN) == 1

    run(work())


def named(name: str, **fields: object) -> bytes:
    """An event as vLLM writes those of Anthropic's and of OpenAI's newer interface."""
    return f"event: {name}\ndata: {json.dumps({**fields, 'type': name})}\n\n".encode()


MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m",
           "stop_reason": None, "stop_sequence": None,
           "usage": {"input_tokens": 3, "output_tokens": 0}}  # fmt: skip
RESPONSE = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "tools": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "status": "completed"}  # fmt: skip
DELTA = {"index": 0, "delta": {"type": "text_delta", "text": "a"}}
TEXT = {"item_id": "i", "output_index": 0, "content_index": 0, "delta": "a", "logprobs": []}
NAMED = {  # how such streams begin, go on, and may end
    "/v1/messages": (
        [named("message_start", message=MESSAGE), named("content_block_delta", **DELTA)],
        [named("message_stop"), b'data: {"type": "message_stop"}\n\n', b"data: [DONE]\n\n"],
    ),
    "/v1/responses": (
        [
            named("response.created", response=RESPONSE, sequence_number=0),
            named("response.output_text.delta", sequence_number=1, **TEXT),
        ],
        [
            named(f"response.{each}", response=RESPONSE, sequence_number=2)
            for each in ("completed", "incomplete")
        ],
    ),
}
LASTS = [(path, last) for path, (_, lasts) in NAMED.items() for last in lasts]


def of_path(path: str, *more: bytes, then: str = "end"):
    async def script(call: Call) -> None:
        await call.head()
        for event in (*NAMED[path][0], *more):
            await call.chunk(event)
        if then == "end":
            await call.finish()
        elif then == "reset":
            await asyncio.sleep(0.05)
            call.reset()
        else:
            await asyncio.Event().wait()

    return script


@pytest.mark.parametrize("then", ["end", "reset", "idle"])
@pytest.mark.parametrize("path", NAMED)
def test_a_broken_stream_of_named_events_ends_with_one_named_error(path: str, then: str) -> None:
    async def work() -> None:
        async with routed(of_path(path, then=then), limits={"idle": 0.3}) as world:
            answer = await world.ask(path, stream=True)
            sent = world.engines[0].calls[0].sent
            assert answer.body.startswith(sent) and not answer.broken
            name, data = answer.body[len(sent) :].decode().removesuffix("\n\n").split("\n")
            error = json.loads(data.removeprefix("data: "))
            assert (name, error["type"]) == ("event: error", "error")
            late = then == "idle"
            if path == "/v1/messages":
                assert error["error"]["type"] == ("timeout_error" if late else "api_error")
            else:
                assert error["sequence_number"] == 2 and error["error"]["code"] == (504 if late else 502)
            assert error["error"]["message"]
            assert world.counted("requests_total", **{"class": "default", "outcome": "failed"}) == 1
            await world.settled()

    run(work())


@pytest.mark.parametrize(("path", "last"), LASTS)
def test_a_stream_of_named_events_that_ended_is_passed_on_as_it_is(path: str, last: bytes) -> None:
    async def work() -> None:
        async with routed(of_path(path, last)) as world:
            assert (await world.ask(path, stream=True)).body == world.engines[0].calls[0].sent
            assert world.counted("requests_total", **{"class": "default", "outcome": "ok"}) == 1

    run(work())


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/messages", named("error", error={"type": "overloaded_error", "message": "full"})),
        ("/v1/responses", named("error", code="x", message="no", param=None, sequence_number=2)),
        ("/v1/responses", named("response.failed", response=RESPONSE, sequence_number=2)),
    ],
)
def test_an_engine_s_own_error_ends_a_stream_of_named_events(path: str, last: bytes) -> None:
    async def work() -> None:
        async with routed(of_path(path, last)) as world:
            assert (await world.ask(path, stream=True)).body == world.engines[0].calls[0].sent
            assert world.counted("requests_total", **{"class": "default", "outcome": "failed"}) == 1

    run(work())


@pytest.mark.parametrize("last", [b"data:[DONE]\n\n", b"data: [DONE]\n", b"data:[DONE]", b"data: [DONE]\r\n"])
def test_the_end_of_a_stream_is_known_however_it_is_spaced(last: bytes) -> None:
    async def script(call: Call) -> None:
        await two_tokens(call)
        await call.chunk(last)
        await call.finish()

    async def work() -> None:
        async with routed(script) as world:
            assert (await world.stream()).body == world.engines[0].calls[0].sent
            assert world.counted("requests_total", **{"class": "default", "outcome": "ok"}) == 1

    run(work())


def test_the_connection_of_a_broken_stream_serves_the_next_request() -> None:
    """The answer was ended properly, so clients use its connection again."""

    async def work() -> None:
        async with routed(reset_after_two) as world:
            body = b'{"model": "m", "prompt": "a", "stream": true}'
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            for _ in range(2):
                writer.write(post(body))
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ") and b'"error"' in answer
            writer.close()

    run(work())


def test_half_an_event_at_a_clean_end_is_passed_on_and_closed() -> None:
    async def work() -> None:
        async with routed(ends_inside_an_event) as world:
            answer = await world.stream()
            pieces = answer.body.split(b"\n\n")
            assert pieces[2] == b'data: {"cho'
            assert json.loads(pieces[3][6:])["error"]["code"] == 502

    run(work())


def test_an_error_event_in_the_middle_is_passed_on_unchanged() -> None:
    async def fails_later(call: Call) -> None:
        await two_tokens(call)
        await call.chunk(b'data: {"error":{"message":"x","code":500}}\n\n')
        await call.done()

    async def work() -> None:
        async with routed(fails_later) as world:
            answer = await world.stream()
            assert answer.body == world.engines[0].calls[0].sent
            assert world.counted("requests_total", **{"class": "default", "outcome": "failed"}) == 1

    run(work())


def test_a_whole_answer_cut_short_is_retried_and_never_passed_on() -> None:
    async def cut(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        call.reset()

    async def work() -> None:
        async with routed(cut, cut) as world:
            answer = await world.ask()
            assert answer.status == 502
            await world.settled()

    run(work())


def test_a_large_answer_cut_short_does_not_look_whole() -> None:
    async def cut(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n")
        await call.raw(b"x" * 5000)
        await asyncio.sleep(0.05)
        call.reset()

    async def work() -> None:
        async with routed(cut, limits={"answer_buffer": 1000, "tries": 1}) as world:
            answer = await world.ask()
            assert answer.broken
            await world.settled()

    run(work())


SIZES = (1, 2, 7, 64, 1000, 1 << 16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offered", ["identity", "gzip, deflate, br"])
def test_bytes_are_those_the_engine_sent(size: int, offered: str) -> None:
    events = [{"choices": [{"text": "é\u2028" * (7 * number % 50), "n": number}]} for number in range(120)]
    body = b"".join(
        b"data: " + json.dumps(each, ensure_ascii=number % 2 == 0).encode() + b"\n\n"
        for number, each in enumerate(events)
    )
    body += b": a comment\n\nevent: x\nid: 3\ndata: two\ndata: lines\n\ndata: [DONE]\n\n"

    async def script(call: Call) -> None:
        await call.head()
        for at in range(0, len(body), size):
            await call.chunk(body[at : at + size])
        await call.raw(b"0\r\nX-Trailer: no\r\n\r\n")

    async def work() -> None:
        async with routed(script) as world:
            answer = await world.ask(stream=True, headers={"Accept-Encoding": offered})
            assert answer.body == body == world.engines[0].calls[0].sent
            assert "Content-Encoding" not in answer.headers
            assert world.engines[0].seen[0].header("accept-encoding") == "identity"
            assert "X-Trailer" not in answer.headers
            await world.settled()

    run(work())


def test_a_compressed_stream_is_passed_through_unread() -> None:
    async def script(call: Call) -> None:
        await call.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: br\r\n"
            b"Content-Length: 4\r\n\r\n\x01\x02\x03\x04"
        )

    async def work() -> None:
        async with routed(script) as world:
            async with world.client.post(
                world.url + "/v1/completions", data=b'{"stream":true}', headers={"Accept-Encoding": "br"}
            ) as response:
                assert response.headers["Content-Encoding"] == "br"
                assert response.content_length is None or response.content_length == 4
            await world.settled()

    run(work())


async def hang_up(world: World, after: int, streams: bool = True) -> None:
    """A client that closes its connection after so many bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
    body = json.dumps({"prompt": "x", "stream": streams}).encode()
    writer.write(post(body))
    if after:
        await reader.readexactly(after)
    else:
        arrived = world.app.gate.counts["arrived"]
        await until(lambda: world.app.gate.counts["arrived"] > arrived)
    writer.transport.abort()


@pytest.mark.parametrize(("streams", "after"), [(True, 0), (True, 300), (False, 0)])
def test_a_hang_up_reaches_the_engine(streams: bool, after: int) -> None:
    async def slow(call: Call) -> None:
        if after:
            await two_tokens(call)
        await asyncio.Event().wait()

    async def work() -> None:
        async with routed(slow) as world:
            await hang_up(world, after, streams)
            await until(lambda: world.engines[0].seen)
            await world.engines[0].seen[0].closed.wait()
            await world.settled()
            assert world.counted("requests_total", **{"class": "default", "outcome": "client-gone"}) == 1

    run(work())


def test_a_client_that_ends_its_sending_side_has_hung_up() -> None:
    async def slow(call: Call) -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        async with routed(slow) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            writer.write(post(b'{"prompt": "x"}'))
            await until(lambda: world.engines[0].seen)
            writer.write_eof()
            assert await reader.read() == b""
            await world.engines[0].seen[0].closed.wait()
            await world.settled()
            writer.close()

    run(work())


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_hang_up_behind_pipelined_requests_reaches_the_engine(size: int) -> None:
    """What is behind the first request is not read while that is served, and so is not the end."""

    async def slow(call: Call) -> None:
        await two_tokens(call)
        await asyncio.Event().wait()

    async def work() -> None:
        async with routed(slow) as world:
            _, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            body = json.dumps({"prompt": "x" * size, "stream": True}).encode()
            writer.write(post(b'{"prompt": "x", "stream": true}') + post(body) * 60)
            await until(lambda: world.engines[0].seen)
            server = world.app.server
            await until(
                lambda: any(each._reading_paused or each._buffer_paused for each in server.connections)
            )
            writer.transport.abort() if size else writer.close()
            seen = world.engines[0].seen
            await seen[0].closed.wait()
            await world.settled()
            # The end of a client stands behind the bytes that it sent: behind many it is known when the next
            # write fails, and the request behind the first may have been sent by then.
            assert len(seen) == 1 or size
            for each in seen:
                await each.closed.wait()

    run(work())


def test_a_hang_up_in_the_queue_never_reaches_an_engine() -> None:
    async def slow(call: Call) -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        async with routed(slow, engine={"slots": 1}) as world:
            first = [asyncio.create_task(world.stream()) for _ in range(2)]  # a slot and its spare
            await until(lambda: len(world.engines[0].seen) == 2)
            await hang_up(world, 0)
            await until(lambda: not world.app.gate.roster.waiting)
            for each in first:
                each.cancel()
            await world.settled()
            assert world.app.gate.counts["arrived"] == 3
            assert len(world.engines[0].seen) == 2

    run(work())


def test_killed_engines_under_many_streams() -> None:
    async def endless(call: Call) -> None:
        await call.head()
        for number in range(50):
            await call.token(f"t{number}")
            await asyncio.sleep(0.01)
        await call.done()

    async def work() -> None:
        async with routed(endless, endless, stream, limits={"retry_share": 1.0}) as world:
            asked = [asyncio.create_task(world.stream()) for _ in range(150)]
            await until(lambda: len(world.engines[0].seen) + len(world.engines[1].seen) > 80)
            world.engines[0].kill()
            world.engines[1].kill()
            answers = await asyncio.gather(*asked)
            for answer in answers:
                whole = answer.events[-1] == b"[DONE]"
                assert whole or answer.events[-1]["error"]["code"] == 502
                assert not answer.broken
            await world.settled()
            asked = [await world.stream() for _ in range(5)]
            assert all(each.events[-1] == b"[DONE]" for each in asked)

    run(work())


def test_the_openai_client_reads_the_error_of_a_broken_stream() -> None:
    openai = pytest.importorskip("openai")

    async def work() -> None:
        async with routed(reset_after_two) as world:
            client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="x", max_retries=0)
            got = []
            with pytest.raises(openai.APIError, match="closed the connection"):
                async for part in await client.completions.create(model="m", prompt="p", stream=True):
                    got.append(part.choices[0].text)
            assert got == ["a", "b"]
            await client.close()

    run(work())


@pytest.mark.parametrize("then", ["end", "reset"])
def test_the_openai_client_reads_the_error_of_a_broken_response(then: str) -> None:
    openai = pytest.importorskip("openai")

    async def work() -> None:
        async with routed(of_path("/v1/responses", then=then)) as world:
            client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="x", max_retries=0)
            got = []
            with pytest.raises(openai.APIError, match=r"the engine (closed|ended)"):
                async for part in await client.responses.create(model="m", input="p", stream=True):
                    got.append(part.type)
            assert got == ["response.created", "response.output_text.delta"]
            await client.close()

    run(work())


@pytest.mark.parametrize("then", ["end", "reset"])
def test_anthropic_s_client_reads_the_error_of_a_broken_message(then: str) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def work() -> None:
        async with routed(of_path("/v1/messages", then=then)) as world:
            client = anthropic.AsyncAnthropic(base_url=world.url, api_key="x", max_retries=0)
            asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "p"}]}
            got = []
            with pytest.raises(anthropic.APIStatusError, match=r"the engine (closed|ended)"):
                async for part in await client.messages.create(stream=True, **asked):
                    got.append(part.type)
            assert got == ["message_start", "content_block_delta"]
            await client.close()

    run(work())
