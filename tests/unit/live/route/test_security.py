"""What hostile clients try: smuggling, floods, slow heads and bodies, headers that are ours, loops."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from fake_engines import never, stream
from headgate.live.route.classes import new_key
from router_world import World, routed, run, until

BODY = b'{"prompt":"x"}'
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def raw(world: World, data: bytes, limit: int = 1 << 20) -> bytes:
    """Whatever comes back for these bytes until the server closes or answers in full."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
    writer.write(data)
    try:
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    except (asyncio.IncompleteReadError, ConnectionError):
        answer = b""
    writer.close()
    return answer


def post(
    *headers: bytes, body: bytes = BODY, path: bytes = b"/v1/completions", method: bytes = b"POST"
) -> bytes:
    lines = b"".join(each + b"\r\n" for each in (b"Host: x", *headers))
    return method + b" " + path + b" HTTP/1.1\r\n" + lines + b"\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
SMUGGLING = {
    "length and chunked": post(
        LENGTH, b"Transfer-Encoding: chunked", body=b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    ),
    "chunked and length": post(b"Transfer-Encoding: chunked", LENGTH, body=b"0\r\n\r\n"),
    "two lengths": post(LENGTH, b"Content-Length: 3"),
    "length with a sign": post(b"Content-Length: +14"),
    "length as a list": post(b"Content-Length: 14, 14"),
    "negative length": post(b"Content-Length: -1"),
    "chunked twice": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunked is not last": post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "space before the colon": post(b"Content-Length : 14"),
    "folded header": post(LENGTH, b"X-A: b\r\n c"),
    "bare LF": b"POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 14\n\n" + BODY,
    "bad chunk size": post(b"Transfer-Encoding: chunked", body=b"0x10\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n"),
    "NUL in a header": post(LENGTH, b"X-A: a\x00b"),
    "CR in a header": post(LENGTH, b"X-A: a\rX-B: c"),
    "no version": b"POST /v1/completions\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("data", SMUGGLING.values(), ids=SMUGGLING)
def test_ambiguous_framing_is_refused_and_nothing_reaches_an_engine(data: bytes) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            answer = await raw(world, data)
            assert answer == b"" or answer.split(b" ")[1] in (b"400", b"505")
            assert world.engines[0].seen == []
            await world.settled()

    run(work())


def test_a_chunked_body_goes_on_with_a_length() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            chunks = (
                b"".join(b"%x\r\n%b\r\n" % (1, BODY[at : at + 1]) for at in range(len(BODY))) + b"0\r\n\r\n"
            )
            answer = await raw(world, post(b"Transfer-Encoding: chunked", body=chunks))
            assert answer.startswith(b"HTTP/1.1 200")
            assert world.engines[0].seen[0].body == BODY
            assert world.engines[0].seen[0].header("content-length") == str(len(BODY))

    run(work())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post(b"Content-Length: 99999999999", body=b""), 413),
        (post(b"Transfer-Encoding: chunked", body=b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n"), 413),
        (post(LENGTH, b"X-A: " + b"a" * 10_000), 400),
        (post(LENGTH, *[b"X-%d: a" % number for number in range(200)]), 400),
        (post(LENGTH, path=b"/v1/completions?" + b"a" * 10_000), 400),
        (post(LENGTH, b"Content-Encoding: gzip"), 415),
        (post(b"Content-Length: 70", body=b'{"a":' + b"[" * 65), 400),
        (post(LENGTH, path=b"/invocations"), 404),
        (post(LENGTH, path=b"/pause"), 404),
        (post(LENGTH, path=b"/v1/../pause"), 404),
        (post(LENGTH, path=b"//v1/completions"), 404),
        (post(LENGTH, path=b"/v1%2fcompletions"), 404),
        (post(LENGTH, path=b"http://evil/v1/completions"), 404),
        (post(LENGTH, path=b"/metrics", method=b"GET"), 404),
        (post(method=b"GET", body=b""), 405),
        (post(LENGTH, method=b"DELETE"), 405),
        (post(LENGTH, b"Via: 1.1 headgate-route"), 508),
    ],
)
def test_refused(data: bytes, status: int) -> None:
    async def work() -> None:
        async with routed(stream, front={"body_limit": 1000}) as world:
            answer = await raw(world, data)
            assert answer.split(b" ")[1] == str(status).encode()
            assert world.engines[0].seen == []
            await world.settled()

    run(work())


def test_slow_heads_and_bodies_are_cut() -> None:
    async def work() -> None:
        async with routed(stream, front={"head_timeout": 0.3, "body_timeout": 0.3}) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
            assert await reader.read() == b""  # closed without an answer
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", world.app.port)
            assert await idle.read() == b""
            answer = await raw(world, post(b"Content-Length: 100", body=b'{"pro'))
            assert answer.startswith(b"HTTP/1.1 408")
            assert world.app.server.refused == 2
            for each in (writer, idle_writer):
                each.close()
            await world.settled()
            assert (await world.stream()).status == 200

    run(work())


def test_connections_are_bounded() -> None:
    async def work() -> None:
        async with routed(stream, front={"connections": 4}) as world:
            pairs = [await asyncio.open_connection("127.0.0.1", world.app.port) for _ in range(6)]
            await until(lambda: world.app.server.refused == 3)
            for _, writer in pairs:
                writer.close()
            await until(lambda: not world.app.server.connections)
            assert (await world.stream()).status == 200

    run(work())


def test_bytes_and_requests_in_flight_are_bounded() -> None:
    async def work() -> None:
        async with routed(never, limits={"inflight_bytes": 5000, "inflight": 4}) as world:
            inside = [asyncio.create_task(world.stream(prompt="x" * 2000)) for _ in range(2)]
            await until(lambda: len(world.engines[0].seen) == 2)
            refused = await world.stream(prompt="x" * 2000)
            assert refused.status == 429
            assert "bytes" in refused.json["error"]["message"]
            inside.append(asyncio.create_task(world.stream()))
            await until(lambda: world.app.front.inflight == 3)
            assert "in flight" in (await world.stream()).json["error"]["message"]
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


async def open_bodies(world: World, many: int, head: bytes = b"", host: str = "127.0.0.1") -> list[Pair]:
    """Connections of one client, each with a request whose body never comes."""
    pairs = []
    for _ in range(many):
        pair = await asyncio.open_connection("127.0.0.1", world.app.port, local_addr=(host, 0))
        pair[1].write(post(b"Content-Length: 100", *([head] if head else []), body=b"{"))
        pairs.append(pair)
    return pairs


async def closed(pairs: list[Pair]) -> None:
    for _, writer in pairs:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in pairs), return_exceptions=True)


def test_bodies_of_one_key_that_never_come_leave_room_for_others(tmp_path: Path) -> None:
    keys = {name: new_key(name) for name in ("slow", "other")}
    file = tmp_path / "keys"
    file.write_text("".join(f"{line}\n" for _, line in keys.values()))

    async def work() -> None:
        async with routed(stream, front={"key_file": str(file)}, limits={"inflight": 90}) as world:
            told = {name: f"Bearer {key}" for name, (key, _) in keys.items()}
            pairs = await open_bodies(world, 120, f"Authorization: {told['slow']}".encode())
            await until(
                lambda: world.app.front.inflight + world.counted("refused_total", reason="client") == 120
            )
            assert world.app.front.inflight == 80
            more = await world.ask(headers={"Authorization": told["slow"]})
            assert more.status == 429 and more.headers["Retry-After"] == "1"
            assert "this client" in more.json["error"]["message"]
            assert (await world.ask(headers={"Authorization": told["other"]})).status == 200
            await closed(pairs)
            await world.settled()

    run(work())


def test_bodies_of_one_address_that_never_come_leave_room_for_others() -> None:
    async def work() -> None:
        async with routed(stream, limits={"inflight": 18}) as world:
            pairs = await open_bodies(world, 30, host="127.0.0.2")
            await until(
                lambda: world.app.front.inflight + world.counted("refused_total", reason="client") == 30
            )
            assert (await world.stream()).status == 200
            await closed(pairs)
            await world.settled()

    run(work())


def test_requests_and_connections_of_one_client_are_bounded_where_it_is_said() -> None:
    async def work() -> None:
        bounds = {"front": {"client_connections": 4}, "limits": {"client_inflight": 2}}
        async with routed(stream, **bounds) as world:
            pairs = await open_bodies(world, 3, host="127.0.0.2")
            await until(lambda: world.counted("refused_total", reason="client") == 1)
            assert world.app.front.inflight == 2
            pairs += await open_bodies(world, 3, host="127.0.0.2")
            await until(lambda: world.app.server.refused == 2)
            assert (await world.stream()).status == 200
            await closed(pairs)
            await until(lambda: world.app.server.open.held <= 1)  # the client's own
            await world.settled()

    run(work())


def test_a_reload_changes_what_a_client_may_have() -> None:
    async def work() -> None:
        async with routed(stream, limits={"client_inflight": 1}) as world:
            pairs = await open_bodies(world, 2, host="127.0.0.2")
            await until(lambda: world.counted("refused_total", reason="client") == 1)
            old = world.app.config
            more = old.model_copy(update={"limits": old.limits.model_copy(update={"client_inflight": 3})})
            world.app._reread = lambda: more
            assert await world.app.reload() == ["[limits] has new settings"]
            pairs += await open_bodies(world, 3, host="127.0.0.2")
            await until(lambda: world.counted("refused_total", reason="client") == 2)
            assert world.app.front.inflight == 3
            await closed(pairs)
            await world.settled()

    run(work())


def test_bytes_of_one_client_leave_room_for_others() -> None:
    async def work() -> None:
        async with routed(stream, limits={"inflight_bytes": 90_100}) as world:
            pairs = []
            for _ in range(18):
                pair = await asyncio.open_connection("127.0.0.1", world.app.port, local_addr=("127.0.0.2", 0))
                pair[1].write(post(b"Content-Length: 5000", body=b" "))  # and the rest never comes
                pairs.append(pair)
            await until(lambda: world.counted("refused_total", reason="client") == 2)
            assert world.app.body_bytes.held == 80_000  # as announced
            assert (await world.stream(prompt="x" * 5000)).status == 200
            await closed(pairs)
            await world.settled()

    run(work())


def test_headers_that_are_ours_do_not_pass() -> None:
    async def work() -> None:
        async with routed(
            stream, classes=[{"name": "gold", "match": {"header": "gold"}, "priority": -3}]
        ) as world:
            told = {
                "x-headgate-class": "gold", "x-vllm-priority": "-99", "x-data-parallel-rank": "3",
                "Authorization": "Bearer s", "x-prefiller-host-port": "evil:1", "x-emulate-fault": "503",
                "Cookie": "a=b", "Te": "trailers", "Connection": "x-secret", "x-secret": "1",
                "traceparent": "00-abc-def-01", "X-Request-Id": "my-id", "User-Agent": "me",
                "X-Custom": "kept",
            }  # fmt: skip
            await world.ask(headers=told)
            seen = world.engines[0].seen[0]
            names = {name.lower() for name, _ in seen.headers}
            assert names.isdisjoint(
                {"x-headgate-class", "x-data-parallel-rank", "authorization", "x-prefiller-host-port",
                 "x-emulate-fault", "cookie", "te", "x-secret"}
            )  # fmt: skip
            assert seen.header("x-vllm-priority") == "-3"  # that of its class
            assert (seen.header("traceparent"), seen.header("x-request-id")) == ("00-abc-def-01", "my-id")
            assert (seen.header("user-agent"), seen.header("x-custom")) == ("me", "kept")
            assert "headgate-route" in (seen.header("via") or "")

    run(work())


def test_ids_and_models_cannot_write_lines_of_their_own_into_the_log(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "access.jsonl"
        async with routed(stream, front={"access_log": str(file)}) as world:
            await world.ask(
                model='m\n{"forged":1}\x1b[31m', headers={"X-Request-Id": "a b;c"}, prompt="secret prompt"
            )
        lines = file.read_text().splitlines()
        assert len(lines) == 1
        record = json.loads(lines[0])
        assert record["id"].startswith("hg-")
        assert "\n" not in record["model"] and "\x1b" not in record["model"]
        assert "secret" not in lines[0]

    run(work())


def test_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    key, line = new_key("alice")
    file = tmp_path / "keys"
    file.write_text(line + "\n")
    monkeypatch.setenv("ENGINE_KEY", "engine-secret")
    caplog.set_level(logging.DEBUG)
    log = tmp_path / "log"

    async def work() -> None:
        classes = [
            {"name": "gold", "match": {"header": "gold"}},
            {"name": "alices", "match": {"key": "alice"}},
        ]
        front = {"key_file": str(file), "access_log": str(log)}
        async with routed(stream, front=front, engine={"key_env": "ENGINE_KEY"}, classes=classes) as world:
            assert (await world.stream()).status == 401
            assert (await world.ask(headers={"Authorization": "Bearer nope"})).status == 401
            async with world.client.get(world.url + "/v1/models") as models:
                assert models.status == 401
            good = await world.ask(headers={"Authorization": f"Bearer {key}", "x-headgate-class": "gold"})
            assert good.status == 200
            assert world.engines[0].seen[0].header("authorization") == "Bearer engine-secret"
            assert (await world.ask(headers={"x-api-key": key})).status == 200

    run(work())
    written = log.read_text()
    lines = [json.loads(each) for each in written.splitlines()]
    assert [(each["status"], each["class"], each["key"]) for each in lines] == [
        *[(401, "", "")] * 3,
        *[(200, "alices", "alice")] * 2,
    ]
    for secret in (key, "engine-secret"):
        assert secret not in written
        assert secret not in caplog.text


def test_the_answer_never_names_the_engine_s_address() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            answer = await world.stream()
            assert str(world.engines[0].port) not in str(answer.headers)
            assert answer.headers["Server"] == "headgate"

    run(work())
