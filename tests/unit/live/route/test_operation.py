"""Overload, engines that come and go, reload, drain, a router that raises."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from fake_engines import Call, FakeEngine, never, one_token, stream
from headgate.core.errors import InputError
from headgate.live.route.config import Config, EngineAt, checked, read_config
from headgate.live.route.engines import discover
from headgate.live.route.server import RouterApp
from router_world import CALM, World, merged, routed, run, until


def held(release: asyncio.Event):
    """An engine that answers when it is told to."""

    async def script(call: Call) -> None:
        await release.wait()
        await stream(call)

    return script


def test_all_engines_down_the_least_bad_is_tried_once_then_503() -> None:
    async def work() -> None:
        async with routed(stream, stream, health={"fails": 1}) as world:
            for engine in world.engines:
                engine.healthy = False
            await until(lambda: not any(each.healthy for each in world.app.upstreams.values()))
            answer = await world.stream()  # probes fail, but the engine serves
            assert answer.status == 200
            for engine in world.engines:
                engine.kill()
            answer = await world.stream()
            assert answer.status == 503
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.json["error"]["type"] == "overloaded_error"
            async with world.client.get(world.url + "/health") as health:
                assert health.status == 503
            await world.settled()

    run(work())


def test_a_full_queue_is_429_with_retry_after() -> None:
    async def work() -> None:
        async with routed(never, engine={"slots": 1}, limits={"queue": 3}) as world:
            inside = [asyncio.create_task(world.stream()) for _ in range(5)]  # slot, spare, queue of 3
            await until(lambda: len(world.app.gate.roster.waiting) == 3)
            answer = await world.stream()
            assert answer.status == 429
            assert answer.json["error"]["type"] == "rate_limit_error"
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            refuse = await world.ask(stream=True, headers={"x-headgate-queue": "none"})
            assert refuse.status == 429
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


def test_x_headgate_queue_none_is_refused_rather_than_queued() -> None:
    async def work() -> None:
        async with routed(never, engine={"slots": 1}) as world:
            inside = [asyncio.create_task(world.stream()) for _ in range(2)]
            await until(lambda: len(world.engines[0].seen) == 2)
            answer = await world.ask(stream=True, headers={"X-Headgate-Queue": "none"})
            assert answer.status == 429
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


def test_time_in_the_queue_ends_with_429_and_503_without_engines() -> None:
    async def work() -> None:
        async with routed(never, engine={"slots": 1}, limits={"queue_ttl": 0.3}) as world:
            inside = [asyncio.create_task(world.stream()) for _ in range(2)]
            await until(lambda: len(world.engines[0].seen) == 2)
            assert (await world.stream()).status == 429
            late = asyncio.create_task(world.stream())
            await until(lambda: world.app.gate.roster.waiting)
            world.app.drain_engine(world.app.upstreams[0], True)
            assert (await late).status == 503
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())


def test_a_drained_engine_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def work() -> None:
        release = asyncio.Event()
        async with routed(held(release), stream) as world:
            world.app.drain_engine(world.app.upstreams[1], True)
            first = asyncio.create_task(world.stream())
            await until(lambda: world.engines[0].seen)
            world.app.drain_engine(world.app.upstreams[1], False)
            async with world.client.post(world.admin + "/admin/engines/0/drain") as drained:
                assert (await drained.json())["status"] == "draining"
            assert [(await world.stream()).status for _ in range(4)] == [200] * 4
            assert len(world.engines[1].seen) == 4
            release.set()
            assert (await first).events[-1] == b"[DONE]"
            async with world.client.get(world.admin) as paths:
                assert "POST /admin/engines/{id}/drain" in await paths.text()
            async with world.client.post(world.admin + "/admin/engines/9/drain") as unknown:
                assert unknown.status == 404
            await world.settled()

    run(work())


def test_the_router_drains() -> None:
    async def work() -> None:
        release = asyncio.Event()
        async with routed(held(release)) as world:
            running = asyncio.create_task(world.stream())
            await until(lambda: world.engines[0].seen)
            drain = asyncio.create_task(world.app.drain())
            await until(lambda: world.app.front.refusing)
            async with world.client.get(world.url + "/health") as health:
                assert health.status == 503
            refused = await world.stream()
            assert refused.status == 503
            assert refused.headers["Connection"] == "close"
            release.set()
            assert (await running).events[-1] == b"[DONE]"
            assert await drain

    run(work())


def test_a_router_that_will_drain_is_not_ready_and_still_accepts() -> None:
    async def work() -> None:
        async with routed(stream, front={"drain_delay": "1h"}) as world:
            drain = asyncio.create_task(world.app.drain())
            await until(lambda: world.app.draining)
            async with world.client.get(world.url + "/health") as health:
                assert health.status == 503
            assert (await world.stream()).status == 200
            drain.cancel()

    run(work())


def test_streams_left_at_the_end_of_a_drain_get_an_error_event() -> None:
    async def work() -> None:
        async with routed(one_token, never, front={"drain_timeout": 0.2}) as world:
            both = [asyncio.create_task(world.stream()) for _ in range(2)]
            await until(lambda: all(engine.seen for engine in world.engines))
            await until(lambda: world.app.gate.roster.replicas[0].decodes)
            assert not await world.app.drain()
            answers = sorted(await asyncio.gather(*both), key=lambda each: each.status)
            assert answers[0].events[-1]["error"]["code"] == 503
            assert answers[1].status == 503
            await world.settled()

    run(work())


def write(file: Path, engines: list[str], more: str = "") -> None:
    tables = "".join(f'[[engines]]\nurl = "{url}"\n' for url in engines)
    file.write_text('[front]\nport = 0\nadmin = "127.0.0.1:0"\n[health]\nfails = 1000\n' + more + tables)


def test_reload(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "fleet.toml"
        release = asyncio.Event()
        async with FakeEngine(held(release)) as a, FakeEngine() as b, FakeEngine() as c:
            write(file, [a.url, b.url])
            app = RouterApp(read_config(file, {}, []), lambda: read_config(file, {}, []))
            await app.start()
            async with aiohttp.ClientSession() as client:
                world = World(app, client, [a, b, c])
                app.drain_engine(app.upstreams[1], True)
                running = asyncio.create_task(world.stream())
                await until(lambda: a.seen)
                app.drain_engine(app.upstreams[1], False)
                for wrong, said in (("[fornt]\n", "fornt"), ("[limits]\ntries = 0\n", "limits.tries")):
                    write(file, [a.url, b.url], wrong)
                    with pytest.raises(InputError, match=said):
                        await app.reload()
                assert (await world.stream()).status == 200
                write(file, [b.url, c.url], "[limits]\ntries = 1\n")
                lines = await app.reload()
                assert any("added" in line for line in lines)
                assert app.legs.config.limits.tries == 1
                await until(lambda: app.upstreams[2].healthy)
                answers = [await world.stream() for _ in range(6)]
                assert {each.status for each in answers} == {200}
                assert c.seen
                assert len(a.seen) == 1
                release.set()
                assert (await running).events[-1] == b"[DONE]"
                await world.settled()
            await app.stop()

    run(work())


def test_engines_of_a_discovery_file_come_and_go(tmp_path: Path) -> None:
    async def work() -> None:
        listed = tmp_path / "engines.txt"
        async with FakeEngine() as a, FakeEngine() as b:
            listed.write_text(f"{a.url}  # the first\n")
            given = checked(merged(CALM, {"discovery": {"file": str(listed), "every": 0.05}}))
            app = RouterApp(given)
            await app.start()
            listed.write_text(f"{a.url}\n{b.url}\n")
            await until(lambda: len(app.upstreams) == 2 and app.upstreams[1].healthy)
            listed.write_text("http://not a url\n")
            await asyncio.sleep(0.2)
            assert not app.upstreams[1].retired  # a bad file changes nothing
            listed.write_text(f"{b.url}\n")
            await until(lambda: app.upstreams[0].retired)
            await app.stop()

    run(work())


def test_a_reload_is_not_undone_by_a_discovery_that_began_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discovery has read the old configuration and waits for DNS; meanwhile a reload drops its engine."""

    async def work() -> None:
        file, entered, go_on = tmp_path / "fleet.toml", asyncio.Event(), asyncio.Event()
        async with FakeEngine() as a, FakeEngine() as b, FakeEngine() as c:
            listed = tmp_path / "engines.txt"
            listed.write_text(f"{c.url}\n")
            more = f'[discovery]\nfile = "{listed}"\nevery = "10ms"\n'
            write(file, [a.url, b.url], more)
            app = RouterApp(read_config(file, {}, []), lambda: read_config(file, {}, []))
            await app.start()

            async def slow(config: Config) -> tuple[EngineAt, ...]:
                found = await discover(config)
                if len(config.engines) == 2 and not go_on.is_set():
                    entered.set()
                    await go_on.wait()
                return found

            applied: list[set[str]] = []
            apply = app._set_engines

            def noted(engines: tuple[EngineAt, ...]) -> None:
                applied.append({each.url for each in engines})
                apply(engines)

            monkeypatch.setattr(app, "_set_engines", noted)
            monkeypatch.setattr("headgate.live.route.server.discover", slow)
            await entered.wait()
            write(file, [b.url], more)
            reload = asyncio.create_task(app.reload())
            for _ in range(20):
                await asyncio.sleep(0)  # without a lock the reload is over by now, and is undone below
            go_on.set()
            await reload
            many = len(applied)
            await until(lambda: len(applied) > many)  # discovery looks again, and finds what the reload said
            reloaded = applied.index({b.url, c.url})
            assert all(a.url in each for each in applied[:reloaded])
            assert not any(a.url in each for each in applied[reloaded:])  # never brought back, not even once
            await app.stop()

    run(work())


def test_an_unreachable_fleet_is_503_with_retry_after_before_any_probe_has_noticed() -> None:
    async def work() -> None:
        async with routed(stream, stream) as world:
            for engine in world.engines:
                engine.kill()
            answer = await world.stream()
            assert answer.status == 503
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert int(answer.headers["x-headgate-tries"]) >= 2
            await world.settled()

    run(work())


def test_own_answers_say_tries_and_wait_and_are_in_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"

    async def work() -> None:
        front = {"access_log": str(log), "body_limit": 100}
        async with routed(never, engine={"slots": 1}, limits={"queue_ttl": 0.2}, front=front) as world:
            inside = [asyncio.create_task(world.stream()) for _ in range(2)]
            await until(lambda: len(world.engines[0].seen) == 2)
            answers = {
                404: await world.ask("/v1/nothing?key=secret"),
                413: await world.ask(prompt="x" * 200),
                400: await world.ask(raw=b"{"),
                429: await world.stream(),
            }
            async with world.client.get(world.url + "/health") as health:
                assert health.headers["Server"] == "headgate"
            for status, answer in answers.items():
                assert answer.status == status
                assert answer.headers["Server"] == "headgate"
                assert answer.headers["x-headgate-tries"] == "0"
                waited = float(answer.headers["x-headgate-wait-ms"])
                assert waited >= 200 if status == 429 else waited == 0
            for each in inside:
                each.cancel()
            await world.settled()

    run(work())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = {each["status"]: each for each in lines}
    assert {404, 413, 400, 429} <= set(found)
    assert found[404]["fault"] == "path" and found[404]["path"] == "/v1/nothing"
    assert found[413]["fault"] == "body"
    assert "secret" not in log.read_text()
