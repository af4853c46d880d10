"""Routers that fail, rooms, breakers, models, and what the operator sees."""

import asyncio
import json
from pathlib import Path

import pytest

from fake_engines import Call, FakeEngine, never, stream
from router_world import routed, run, until

BAD_ROUTER = """
from headgate.core.fleet import RoutePolicy, Routing, Move

class Raises(RoutePolicy):
    def route(self, fleet):
        if len(fleet.places) > 1:
            raise ValueError("lost my way")
        return Routing(tuple(Move(id, 0) for queue in fleet.queues.values() for id in queue))

class Nonsense(RoutePolicy):
    def route(self, fleet):
        return Routing(tuple(Move(id, 77) for queue in fleet.queues.values() for id in queue))
"""


@pytest.mark.parametrize("name", ["Raises", "Nonsense"])
def test_a_router_that_fails_is_disabled_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(BAD_ROUTER)

    async def work() -> None:
        async with routed(stream, stream, router={"name": f"{tmp_path}/mine.py:{name}"}) as world:
            answers = await asyncio.gather(*(world.stream() for _ in range(12)))
            assert all(each.events[-1] == b"[DONE]" for each in answers)
            assert world.app.gate.fallen is not None
            async with world.client.get(world.admin + "/plan") as plan:
                assert (await plan.json())["policy"] == "LeastLoaded"
            await world.settled()

    run(work())


def test_rooms_start_lowered_by_what_others_have_there() -> None:
    async def work() -> None:
        async with FakeEngine(never) as engine:
            engine.running, engine.waiting = 14, 1
            async with routed(urls=[engine.url], engine={"slots": 16}) as world:
                assert world.app.upstreams[0].foreign == 15
                inside = [asyncio.create_task(world.stream()) for _ in range(4)]
                await until(lambda: engine.seen)
                assert world.app.gate.roster.replicas[0].room.total == 1
                assert len(world.app.gate.roster.waiting) == 3
                engine.running, engine.waiting = 1, 0
                await until(lambda: len(engine.seen) == 4)
                for each in inside:
                    each.cancel()
                await world.settled()

    run(work())


def test_an_engine_that_is_down_from_the_start_is_named_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with FakeEngine(never) as sick, FakeEngine(never) as gone:
            sick.healthy = False
            gone.kill()
            async with routed(urls=[sick.url, gone.url]):
                assert f"{sick.url}, is down: /health does not answer 200" in caplog.text
                assert f"{gone.url}, is down: Connection refused" in caplog.text

    run(work())


def test_what_a_broken_engine_says_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\x1b[31m no header\n" + b"x" * 3000 + b"\r\n\r\n")
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(broken, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, FakeEngine(never) as other, routed(urls=[f"http://127.0.0.1:{port}", other.url]):
            said = next(text for text in caplog.messages if "is down" in text)
            assert said.isprintable() and len(said) < 200

    run(work())


def test_an_engine_with_a_full_queue_gets_nothing_until_the_next_scrape() -> None:
    async def full(call: Call) -> None:
        await call.answer(503, b'{"error": {"type": "Service Unavailable"}}')

    async def work() -> None:
        async with routed(full, stream, health={"every": 1000.0}) as world:
            first, second = world.engines
            for _ in range(4):
                assert (await world.stream()).events[-1] == b"[DONE]"
            assert (len(first.seen), len(second.seen)) == (1, 4)
            upstream = world.app.upstreams[0]
            assert upstream.busy and world.app.gate.roster.replicas[0].room.total == 0
            await world.app.watch._probe(upstream)
            world.app.watch.tell(upstream)
            assert not upstream.busy and world.app.gate.roster.replicas[0].room.total > 0

    run(work())


def test_an_open_breaker_lets_one_probe_through(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        broken = True

        async def script(call: Call) -> None:
            if broken:
                call.reset()
            else:
                await stream(call)

        async with routed(script, limits={"tries": 1, "retry_share": 1.0}) as world:
            statuses = [(await world.stream()).status for _ in range(5)]
            assert statuses == [502] * 4 + [503]
            upstream = world.app.upstreams[0]
            assert upstream.status(world.app.now()) == "open"
            rotation = f"engine 0, {upstream.url}, is"
            assert caplog.messages[-1] == f"{rotation} out of rotation for 10 s"
            broken = False
            upstream.breaker._until = 0.0  # ten seconds later
            world.app.watch.tell(upstream)
            assert [(await world.stream()).status for _ in range(3)] == [200] * 3
            assert upstream.status(world.app.now()) == "up"
            assert caplog.messages[-1] == f"{rotation} back in rotation"
            await world.settled()

    run(work())


def test_models_of_all_engines_are_listed_once() -> None:
    async def work() -> None:
        async with routed(stream, stream) as world:
            world.engines[0].models, world.engines[1].models = ["a", "b"], ["b", "c"]
            async with world.client.get(world.url + "/v1/models") as models:
                assert sorted(each["id"] for each in (await models.json())["data"]) == ["a", "b", "c"]

    run(work())


def test_admin_tells_metrics_books_and_engines() -> None:
    async def work() -> None:
        async with routed(stream) as world:
            await world.stream()
            async with world.client.get(world.admin + "/metrics") as metrics:
                text = await metrics.text()
                assert 'headgate_requests_total{class="default",outcome="ok"} 1.0' in text
                assert 'headgate_engine_up{engine="0"} 1.0' in text
                assert f'headgate_engine_info{{engine="0",url="{world.engines[0].url}"}} 1.0' in text
                assert 'headgate_engine_running{engine="0"} 0.0' in text
            world.app.upstreams[0].healthy = False
            async with world.client.get(world.admin + "/metrics") as metrics:
                text = await metrics.text()
                assert 'headgate_engine_up{engine="0"} 0.0' in text
                assert 'engine_running{engine="0"' not in text and 'engine_kv_usage{engine="0"' not in text
            world.app.upstreams[0].healthy = True
            async with world.client.get(world.admin + "/books") as books:
                assert (await books.json())["faults"] == []
            async with world.client.get(world.admin + "/engines") as engines:
                assert json.loads(await engines.text())[0]["status"] == "up"
            async with world.client.get(world.url + "/metrics") as outside:
                assert outside.status == 404

    run(work())


PAGES = {
    "another site": {"Origin": "https://evil.example"},
    "a sandboxed frame": {"Origin": "null"},
    "another site, without an origin": {"Sec-Fetch-Site": "cross-site"},
    "a name that leads here": {"Host": "evil.example:9300"},
    "a name like ours": {"Host": "localhost.evil.example"},
    "no name": {"Host": "a b"},
}


@pytest.mark.parametrize("headers", PAGES.values(), ids=PAGES)
def test_web_pages_do_not_reach_the_operator_s_address(headers: dict[str, str]) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            drain = world.admin + "/admin/engines/0/drain"
            async with world.client.post(drain, headers=headers) as told:
                assert told.status == 403 and "use" in (await told.json())["error"]
            assert not world.app.upstreams[0].draining
            async with world.client.get(world.admin + "/engines", headers=headers) as told:
                assert told.status == 403

    run(work())


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9300", "127.0.0.1", "127.1.2.3:1", "[::1]:9300", "[::1]"]
)
def test_the_operator_s_address_has_its_own_names(host: str) -> None:
    async def work() -> None:
        async with routed(stream) as world:
            headers = {"Host": host, "Sec-Fetch-Site": "none"}
            async with world.client.post(world.admin + "/admin/engines/0/drain", headers=headers) as told:
                assert told.status == 200 and world.app.upstreams[0].draining

    run(work())


def test_an_operator_s_address_that_others_reach_may_have_any_name_and_serves_no_pages() -> None:
    async def work() -> None:
        async with routed(stream, front={"admin": "0.0.0.0:0"}) as world:
            for headers, status in (({"Host": "route.svc:9300"}, 200), ({"Origin": "http://route.svc"}, 403)):
                async with world.client.get(world.admin + "/engines", headers=headers) as told:
                    assert told.status == status

    run(work())
