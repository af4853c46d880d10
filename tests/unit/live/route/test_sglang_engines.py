"""A router before SGLang servers: their gauges, their health while they drain, and no KV from them."""

from __future__ import annotations

import asyncio

import pytest

from headgate.core.errors import InputError
from headgate.live.emulate import answer, emulated
from headgate.live.route.engines import read_load
from router_world import routed, run, until

SGLANG = {"engine": "sglang", "speed": 50.0, "slots": 32, "model": "m"}


def test_gauges_of_sglang_are_read_once_for_each_engine() -> None:
    """Not those of other tensor ranks, nor those of single priorities; data-parallel ranks are summed."""
    labels = 'engine_type="unified",model_name="m",moe_ep_rank="0"'
    text = "\n".join(
        (
            "# TYPE sglang:num_running_reqs gauge",
            f'sglang:num_running_reqs{{dp_rank="0",{labels},pp_rank="0",priority="",tp_rank="0"}} 5.0',
            f'sglang:num_running_reqs{{dp_rank="0",{labels},pp_rank="0",priority="3",tp_rank="0"}} 2.0',
            f'sglang:num_running_reqs{{dp_rank="0",{labels},pp_rank="0",priority="",tp_rank="1"}} 5.0',
            f'sglang:num_running_reqs{{dp_rank="1",{labels},pp_rank="0",priority="",tp_rank="0"}} 4.0',
            f'sglang:num_queue_reqs{{{labels},tp_rank="0"}} 7.0',
            f'sglang:token_usage{{{labels},tp_rank="0"}} 0.25',
            'sglang:prompt_tokens_total{is_streaming="true",model_name="m",priority="3"} 100.0',
            'sglang:prompt_tokens_total{is_streaming="false",model_name="m",priority=""} 11.0',
            'sglang:generation_tokens_total{model_name="m"} 1e3',
            'sglang:num_retracted_requests_total{model_name="m"} 2.0',
        )
    )
    load = read_load(text.encode(), 1.0)
    assert (load.running, load.waiting, load.kv_usage) == (9, 7, 0.25)
    assert load.generated == 1000
    assert load.alarms == {"vllm:num_preemptions_total": 2}


def test_requests_are_shared_between_sglang_and_vllm() -> None:
    vllm = {key: value for key, value in SGLANG.items() if key != "engine"}

    async def work() -> None:
        async with (
            emulated(**SGLANG) as one,
            emulated(**vllm) as other,
            routed(urls=[one[0], other[0]], engine={"slots": 32}) as world,
        ):
            upstreams = world.app.upstreams.values()
            calls = (world.stream(prompt="hello", max_tokens=9) for _ in range(8))
            for got in await asyncio.gather(*calls):
                text = "".join(event["choices"][0]["text"] for event in got.events[:-1])
                assert got.status == 200 and text == answer("hello", 9)
            assert [upstream.sglang for upstream in upstreams] == [True, False]
            await until(lambda: sum(each.load.generated for each in upstreams) == 72)
            assert all(each.load.generated and not each.foreign for each in upstreams)
            await world.settled()

    run(work())


def test_requests_of_others_at_an_sglang_server_take_room() -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}

    async def work() -> None:
        async with (
            emulated(**SGLANG | {"speed": 0.2}) as fleet,
            routed(urls=list(fleet), engine={"slots": 32}) as world,
        ):
            url, upstream = fleet[0] + "/generate", world.app.upstreams[0]
            others = [asyncio.create_task(world.client.post(url, json=body)) for _ in range(5)]
            await until(lambda: upstream.foreign == 5)
            assert upstream.slots(world.app.now()) == 27
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await until(lambda: upstream.foreign == 0)

    run(work())


def test_an_sglang_server_that_drains_gets_nothing_new_and_ends_what_it_has() -> None:
    async def work() -> None:
        async with emulated(**SGLANG | {"engines": 2, "speed": 2.0}) as fleet:
            health = {"every": 0.05, "fails": 1}
            async with routed(urls=list(fleet), engine={"slots": 32}, health=health) as world:
                streams = [
                    asyncio.create_task(world.stream(max_tokens=60, ignore_eos=True)) for _ in range(4)
                ]
                await until(lambda: all(engine.running for engine in fleet.engines))
                fleet.ports[0].place.draining = True
                first = world.app.upstreams[0]
                await until(lambda: not first.healthy)
                assert first.status(world.app.now()) == "down"
                before = fleet.engines[0].tally.ended_by["length"]
                running = fleet.engines[0].running
                later = await asyncio.gather(*(world.ask(max_tokens=2) for _ in range(4)))
                assert all(each.status == 200 for each in later)
                assert all(len(each.events) == 61 for each in await asyncio.gather(*streams))
                await until(lambda: fleet.engines[0].running == 0)
                assert fleet.engines[0].tally.ended_by["length"] - before <= running
                await world.settled()

    run(work())


@pytest.mark.parametrize(
    ("router", "engine"),
    [("split:prefill=1", {}), ("least-loaded", {"kv_group": "a"}), ("least-loaded", {"role": "prefill"})],
)
def test_a_hand_over_of_kv_is_refused_before_sglang(router: str, engine: dict) -> None:
    async def work() -> None:
        async with emulated(**SGLANG | {"engines": 2}) as fleet:
            with pytest.raises(InputError, match="is SGLang, whose KV is not handed over; choose a router"):
                async with routed(urls=list(fleet), engine=engine, router={"name": router}):
                    pass

    run(work())
