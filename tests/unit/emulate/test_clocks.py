"""Virtual times over HTTP, metrics, ranks, the alarm, and the line that says the emulator is late."""

import asyncio
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from calls_of_emulator import FAST, SMALL, post, run, session, stream, text_of, until

from headgate.core.errors import InputError
from headgate.experiment.library import card_engine
from headgate.live.emulate import answer, emulated, service
from headgate.live.emulate.clock import Alarm, WallClock
from headgate.live.emulate.engine import Histogram, token_bounds
from headgate.live.emulate.server import warn_when_late
from headgate.live.engine.requests import IGNORED, promises
from headgate.live.engine.settings import Settings
from headgate.methods.make import make_policy
from headgate.record.recorder import Recorder
from headgate.sim.engine.simulator import Simulator
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Uniform
from headgate.workloads.synthetic import generate

SAMPLE = re.compile(r"^([a-z0-9_:]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


async def metrics(client, url):
    async with client.get(url + "/metrics") as told:
        text = await told.text()
    return {(name, labels): float(value) for name, labels, value in SAMPLE.findall(text)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_over_http_a_virtual_clock_shows_the_simulators_times(asynchronous):
    """Requests that say when they come, answered as fast as possible: every time equal to the last bit."""
    workload = generate(60, seed=3, arrivals=Poisson(40.0), prompt=Uniform(200, 0.9), output=Uniform(30, 0.9))
    prompts, outputs, arrivals = (
        getattr(workload, name).tolist() for name in ("prompt", "output", "arrival")
    )

    async def one(client, url, number):
        body = {"prompt": [number + 1] * prompts[number], "max_tokens": outputs[number], "ignore_eos": True}
        headers = {"x-emulate-arrival": repr(arrivals[number])}
        events = await stream(client, url, body, **headers)
        stamps = [event["emulated"]["time"] for event in events[:-1]]
        assert stamps == sorted(stamps) and len(stamps) == outputs[number] - 1
        return events[-1]["emulated"], stamps

    async def main():
        words = SMALL | {"virtual": True, "hold": 60, "policy": "eb+", "asynchronous": asynchronous}
        async with emulated(**words) as urls, session() as client:
            return await asyncio.gather(*(one(client, urls[0], number) for number in range(60)))

    found = run(main())
    engine = card_engine("cal-h200-qwen3-8b", slots=32, budget=2048)
    recorder = Recorder()
    limited = replace(workload, limit=workload.output)  # max_tokens is what the engine knows
    Simulator(
        engine, make_policy("eb+", {}, engine)[0], limited, (recorder,), asynchronous=asynchronous
    ).run()
    table = recorder.tables()["requests"]
    for ours, theirs in (("arrival", "arrival"), ("admitted", "admitted"), ("first", "first_token"),
                         ("finished", "finished")):  # fmt: skip
        np.testing.assert_array_equal([times[ours] for times, _ in found], table[theirs], err_msg=ours)
    firsts = [stamps[0] for _, stamps in found if stamps]
    assert firsts == [
        value for value, output in zip(table["first_token"], outputs, strict=True) if output > 1
    ]


def test_real_time_runs_at_the_cards_speed_and_speed_scales_it():
    """No assertion on a busy machine's seconds: only that nothing comes early."""

    async def main():
        for speed in (1.0, 8.0):
            async with emulated(**SMALL, speed=speed, asynchronous=False) as urls, session() as client:
                began = time.perf_counter()
                await post(client, urls[0], {"prompt": "x", "max_tokens": 40, "ignore_eos": True})
                real = time.perf_counter() - began
                engine = urls.engines[0]
                assert real >= engine.tally.e2e.sum / speed * 0.999
                assert engine.tally.late.counts and sum(engine.tally.late.counts) == engine.tally.steps == 40

    run(main())


def test_an_emulator_that_is_always_late_still_answers_others():
    """A step of a microsecond cannot be kept; whoever asks meanwhile must not wait for the end of it."""

    async def main():
        async with emulated(**SMALL, speed=1e5) as urls, session() as client:
            body = {"prompt": "x", "max_tokens": 15_000, "ignore_eos": True}
            long = asyncio.create_task(post(client, urls[0], body))
            await until(lambda: urls.engines[0].tally.generation_tokens > 0)
            async with client.get(urls[0] + "/health") as told:
                assert told.status == 200
            assert not long.done() and urls.engines[0].running == 1
            status, found = await long
            assert status == 200 and found["usage"]["completion_tokens"] == 15_000

    run(main())


def test_metrics_by_class_and_tenant_are_those_of_the_plug_in(monkeypatch):
    """On a virtual clock: what waits for its first token longer than promised is counted as broken."""
    classes = {
        "gold": {"ttft": "1s", "tbt": "1s", "weight": 10},
        "free": {"ttft": "1us"},
        "batch": {"background": True},
    }
    settings = Settings(classes=classes, clients_may=("class", "tenant"), ttft="1us")
    monkeypatch.setattr(service, "promises", lambda words, _: promises(words, settings))
    IGNORED.clear()

    async def main():
        async with emulated(**SMALL, virtual=True) as urls, session() as client:
            for name in classes:
                words = {"headgate_class": name, "headgate_tenant": "acme", "headgate_weight": 1e9}
                body = {"prompt": "x" * 40, "max_tokens": 5, "vllm_xargs": words}
                assert (await post(client, urls[0], body))[0] == 200
            shown = await metrics(client, urls[0])
            return [
                {labels: value for (name, labels), value in shown.items() if name == f"headgate_{what}_total"}
                for what in ("promises", "tenant_tokens", "ignored_words")
            ]

    kept, tokens, ignored = run(main())
    assert ignored == {'word="others"': 3}
    assert kept == {
        'class="gold",engine="0",kept="true",promise="ttft"': 1,
        'class="gold",engine="0",kept="true",promise="tbt"': 1,
        'class="free",engine="0",kept="false",promise="ttft"': 1,
    }
    assert tokens == {
        'engine="0",kind="prompt",tenant="acme"': 30,
        'engine="0",kind="output",tenant="acme"': 15,
    }


def test_metrics_count_what_was_done():
    async def main():
        async with emulated(**FAST, asynchronous=False) as urls, session() as client:
            await asyncio.gather(
                *(post(client, urls[0], {"prompt": "x" * 40, "max_tokens": 5 + i}) for i in range(4))
            )
            found = await metrics(client, urls[0])
            label = 'engine="0",model_name="tiny"'

            def of(name, more=""):
                return found[name, more or label]

            assert of("vllm:num_requests_running") == of("vllm:num_requests_waiting") == 0
            assert of("vllm:prompt_tokens_total") == 40 and of("vllm:generation_tokens_total") == 26
            assert (
                of("vllm:request_success_total", 'engine="0",finished_reason="length",model_name="tiny"') == 4
            )
            assert of("vllm:time_to_first_token_seconds_count") == 4
            assert of("vllm:inter_token_latency_seconds_count") == 22
            assert of("vllm:e2e_request_latency_seconds_count") == 4
            total = of("vllm:e2e_request_latency_seconds_sum")
            parts = of("vllm:request_queue_time_seconds_sum") + of("vllm:request_inference_time_seconds_sum")
            assert total == pytest.approx(parts)
            decode = of("vllm:request_decode_time_seconds_sum")
            assert decode == pytest.approx(of("vllm:inter_token_latency_seconds_sum"))
            assert of("headgate_emulator_late_seconds_count") == of("headgate_emulator_steps_total")
            assert of("headgate_queue", 'class="default",engine="0"') == 0

    run(main())


@pytest.mark.parametrize("policy", ["mixed", "eb:refill=4", "slai", "eb+"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_gaps_between_tokens_add_up_to_the_decode_times(policy, asynchronous):
    """With evictions, held decodes and steps ahead: ITLs of all requests sum to last token minus first."""

    async def main():
        words = SMALL | {"virtual": True, "policy": policy, "kv_tokens": 2400, "asynchronous": asynchronous}
        async with emulated(**words, hold=40) as urls, session() as client:
            bodies = [{"prompt": [i + 1] * (20 + 7 * i), "max_tokens": 10 + 3 * i, "ignore_eos": True}
                      for i in range(40)]  # fmt: skip
            await asyncio.gather(*(post(client, urls[0], body) for body in bodies))
            tally = urls.engines[0].tally
            assert tally.generation_tokens == sum(body["max_tokens"] for body in bodies)
            assert sum(tally.inter_token_latency.counts) == tally.generation_tokens - 40
            assert tally.inter_token_latency.sum == pytest.approx(tally.decode.sum, rel=1e-9)
            assert tally.preemptions > 0
            assert urls.at_rest

    run(main())


def test_ranks_share_a_port():
    async def main():
        async with emulated(**FAST, engines=3, ranks=True) as urls, session() as client:
            assert len(urls) == 1 and len(urls.engines) == 3
            body = {"prompt": "x", "max_tokens": 20}
            found = await asyncio.gather(*(post(client, urls[0], body) for _ in range(30)))
            assert all(told["choices"][0]["text"] == answer("x", 20) for _, told in found)
            assert all(engine.tally.steps for engine in urls.engines)  # the load was spread
            before = urls.engines[2].tally.generation_tokens
            for _ in range(3):
                await post(client, urls[0], body, **{"X-data-parallel-rank": "2"})
            assert urls.engines[2].tally.generation_tokens == before + 60
            shown = await metrics(client, urls[0])
            assert {labels[8] for name, labels in shown if name == "vllm:num_requests_running"} == set("012")

    run(main())


def test_priorities_and_classes_reach_the_policy():
    async def main():
        async with emulated(
            **SMALL | {"virtual": True, "slots": 1, "hold": 3}, policy="sarathi:order=priority"
        ) as urls:
            async with session() as client:
                calls = [
                    post(client, urls[0], {"prompt": f"p{i}", "max_tokens": 5, "priority": priority,
                                           "vllm_xargs": {"headgate_class": f"class{i}"}},
                         **{"x-emulate-arrival": "0.0"})
                    for i, priority in enumerate((5, 1, 3))
                ]  # fmt: skip
                found = await asyncio.gather(*calls)
            ends = [told["emulated"]["finished"] for _, told in found]
            assert sorted(range(3), key=ends.__getitem__) == [1, 2, 0]

    run(main())


def test_the_alarm_rings_early_and_on_time():
    async def main():
        alarm = Alarm()
        began = time.perf_counter()
        await alarm.sleep(0.01)
        assert time.perf_counter() - began >= 0.0099
        waiting = asyncio.create_task(alarm.sleep(600))
        await asyncio.sleep(0)
        alarm.ring()
        await waiting
        clock = WallClock(speed=100.0)
        target = clock.now() + 0.5
        waiting = asyncio.create_task(clock.until(target, alarm))
        for _ in range(3):
            await asyncio.sleep(0.0005)
            alarm.ring()  # no reason to stop waiting
        assert await waiting >= -1e-5 and clock.now() >= target - 1e-3
        alarm.close()

    run(main())


@pytest.mark.parametrize("speed", [0, -1, float("inf"), float("nan")])
def test_speeds_that_are_none(speed):
    with pytest.raises(InputError):
        WallClock(speed)


def test_the_emulator_says_when_it_is_late():
    async def main():
        async with emulated(**FAST) as urls:
            said = []
            watch = asyncio.create_task(warn_when_late(urls, said.append, every=0.01))
            await asyncio.sleep(0)
            urls.engines[0].tally.late.add(0.0001, 100)
            await asyncio.sleep(0.05)
            assert not said
            urls.engines[0].tally.late.add(0.02, 5)
            urls.engines[0].tally.late.add(0.0001, 100)
            await until(lambda: bool(said))
            assert "cannot keep up: engine 0" in said[0]
            watch.cancel()

    run(main())


def test_histograms():
    found = Histogram((1.0, 2.0, 5.0))
    found.add(1.0)
    found.add(1.5, 3)
    found.add(9.0)
    assert found.rows() == [("1.0", 1.0), ("2.0", 4.0), ("5.0", 4.0), ("+Inf", 5.0)]
    assert found.sum == 14.5 and found.quantile(0.5) == 2.0 and found.quantile(1.0) == float("inf")
    assert token_bounds(1024) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # as vLLM shows with 1024


def test_a_stream_has_all_its_text():
    async def main():
        async with emulated(**FAST) as urls, session() as client:
            assert text_of(await stream(client, urls[0], {"prompt": "x", "max_tokens": 9})) == answer("x", 9)

    run(main())
