"""`headgate_engines_needed`: of the router from what it sees, of `headgate watch` from engines' metrics."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from fake_engines import stream
from headgate.core.errors import InputError
from headgate.live.emulate import emulated
from headgate.live.predict import listening
from headgate.live.route.config import checked as config_of
from headgate.live.route.view.counters import parsed
from headgate.live.scaling import WatchOptions
from headgate.live.watch import FleetCounters, watching
from headgate.settings_base import checked
from router_world import routed, run

NAME = "headgate_engines_needed"
RULE = "plan:floor=2,ceiling=9,every=500ms,start=1s,hold=1h"
SCALING = {"card": "cal-h200-qwen3-8b", "rule": RULE}


async def engines_needed(world) -> dict:
    async with world.client.get(f"{world.admin}/metrics") as answer:
        return parsed(await answer.text()).get(NAME, {})


def test_a_router_says_how_many_engines_it_needs_only_if_asked() -> None:
    async def go() -> None:
        async with routed(*[stream] * 3, scaling=SCALING) as world:
            labels = (("model", "Qwen/Qwen3-8B"), ("pool", "any"))
            assert await engines_needed(world) == {labels: 3.0}  # as many as there are, until it knows more
            for _ in range(3):
                await world.ask(prompt="hello there", max_tokens=2)
            app = world.app
            assert app.service.came == 3 and app.service.came_tokens > 0
            now = app.now()
            for look in range(40):
                app._look_at_load(now + 120 * look)
            assert await engines_needed(world) == {labels: 2.0}  # next to nothing comes: the floor
            for look in range(40, 60):
                app.service.came += 30_000
                app.service.came_tokens += 30_000 * 2000
                app._look_at_load(now + 120 * look)
            assert await engines_needed(world) == {labels: 9.0}  # the ceiling
        async with routed(stream) as world:
            assert await engines_needed(world) == {}

    run(go())


def test_pools_that_prefill_and_decode_have_a_number_each() -> None:
    async def go() -> None:
        router = {"name": "split", "settings": {"prefill": 1}}
        async with routed(*[stream] * 4, scaling=SCALING, router=router) as world:
            shown = await engines_needed(world)
            pools = {dict(labels)["pool"]: value for labels, value in shown.items()}
            assert pools == {"prefill": 2.0, "decode": 3.0}  # the floor is 2

    run(go())


def test_scaling_without_a_card_is_refused() -> None:
    engines = [{"url": "http://a:1"}]
    with pytest.raises(InputError, match="needs the speed of the engines"):
        config_of({"engines": engines, "scaling": {}})
    with pytest.raises(InputError, match="target"):
        config_of({"engines": engines, "scaling": {"card": "cal-h200-qwen3-8b", "rule": "plan:target=3"}})


def watch_options(**words) -> WatchOptions:
    return checked(WatchOptions, {"port": 0, "autoscale": "plan:every=50ms,start=1s,hold=1s"} | words)


def test_a_watch_reads_engines_and_serves_the_gauge(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with (
            emulated(engines=2, speed=50.0) as engines,
            aiohttp.ClientSession() as client,
            watching(watch_options(engine=(*engines, "http://127.0.0.1:9"))) as (watch, url),
        ):
            await watch.look()
            assert caplog.messages == ["http://127.0.0.1:9 shows no metrics of an engine: Connection refused"]
            for engine in engines:
                body = {"prompt": "hello there", "max_tokens": 20}
                async with client.post(f"{engine}/v1/completions", json=body) as answer:
                    assert answer.status == 200
            await asyncio.sleep(0.01)
            await watch.look()
            assert watch.missed == 0
            assert watch.scaling.decisions()["any"].rate > 0
            async with client.get(f"{url}/metrics") as answer:
                ((labels, value),) = parsed(await answer.text())[NAME].items()
            assert dict(labels) == {"model": "Qwen/Qwen3-8B", "pool": "any"} and value >= 1

    run(go())


def prometheus(answer) -> web.Application:
    async def query(request: web.Request) -> web.Response:
        assert (
            'model_name="m"' in request.query["query"]
            and "vllm:prompt_tokens_total" in request.query["query"]
        )
        return web.json_response(answer())

    app = web.Application()
    app.router.add_get("/api/v1/query", query)
    return app


def test_a_watch_asks_prometheus_and_is_not_misled_by_what_it_cannot_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks = iter(range(100))

    def answer():
        look = next(looks)
        if look in (3, 4):
            return ["no", "answer"]
        values = {"request_success_total": 10 * look, "prompt_tokens_total": 9000 * look,
                  "generation_tokens_total": 2000 * look, "num_requests_running": 3}  # fmt: skip
        series = [
            {"metric": {"__name__": f"vllm:{name}", "instance": "a:8000"}, "value": [1.0, str(value)]}
            for name, value in values.items()
        ]
        return {"status": "success", "data": {"resultType": "vector", "result": series}}

    async def go() -> None:
        async with listening(prometheus(answer), "127.0.0.1", 0) as source:
            options = watch_options(prometheus=source, select='model_name="m"')
            async with watching(options) as (watch, _):
                for _ in range(3):
                    await watch.look()
                    await asyncio.sleep(0.01)
                rate = watch.scaling.decisions()["any"].rate
                assert rate > 0
                await watch.look()
                await watch.look()
                assert watch.missed == 2
                assert "does not answer as Prometheus does; correct --prometheus" in caplog.text
                assert watch.scaling.decisions()["any"].rate == rate
                await watch.look()
                assert watch.missed == 0

    run(go())


def test_engines_that_come_go_and_begin_anew_only_add_what_they_gained() -> None:
    counters = FleetCounters()
    one = {"ended": 100.0, "prompt": 1e5, "output": 2e4, "running": 2.0, "waiting": 1.0}
    seen, waiting, running = counters.add({"a": one})
    assert (seen.ended, seen.requests, waiting, running) == (0, 0, 1, 2)
    seen, *_ = counters.add({"a": one | {"ended": 110.0}, "b": one | {"ended": 5000.0}})
    assert seen.ended == 10
    seen, *_ = counters.add({"b": one | {"ended": 5001.0}})
    seen, *_ = counters.add({"a": one | {"ended": 4.0}, "b": one | {"ended": 5001.0}})  # a began anew
    assert seen.ended == 15


def test_requests_of_an_engine_that_is_lost_are_not_made_up_for_by_others() -> None:
    counters, rates = FleetCounters(), []
    for look in range(20):
        here = {"ended": 10.0 * look, "prompt": 0.0, "output": 0.0, "running": 50.0, "waiting": 0.0}
        crowded = {**here, "running": 1700.0} if look < 10 else None
        seen, *_ = counters.add({"a": here} | ({"b": crowded} if crowded else {}))
        rates.append(seen.requests)
    assert rates[9] - rates[8] == 20 and rates[11] - rates[10] == 10


def test_a_watch_survives_what_metrics_say_and_then_says_nothing() -> None:
    values = iter(["1e300", "NaN", "+Inf", "-4", "7"])

    def answer():
        value = next(values, "8")
        names = ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
        series = [
            {"metric": {"__name__": f"vllm:{name}", "instance": f"{host}:1"}, "value": [1.0, value]}
            for name in names
            for host in "abc"
        ]
        return {"status": "success", "data": {"result": series}}

    async def go() -> None:
        async with listening(prometheus(answer), "127.0.0.1", 0) as source:
            options = watch_options(prometheus=source, select='model_name="m"', model='a"\nb')
            async with watching(options) as (watch, url), aiohttp.ClientSession() as client:

                async def shown() -> str:
                    async with client.get(f"{url}/metrics") as answer:
                        return await answer.text()

                assert await shown() == "", "nothing is known yet"
                for _ in range(6):
                    await watch.look()
                assert 'model="a\\"\\nb",pool="any"} 3' in await shown()
                watch._options = watch_options(prometheus="http://127.0.0.1:9")
                for _ in range(4):
                    await watch.look()
                assert await shown() == "", "a metric that is lost is for the autoscaler to see"

    run(go())
