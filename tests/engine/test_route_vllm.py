"""The router before two real vLLM servers that hand KV over by NIXL.

The servers live through the file, because starting them takes a minute; the last test kills one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from importlib.util import find_spec

import aiohttp
import openai
import pytest
import tiny
from http_server import kill
from nixl_pair import LEASE, pair

from headgate.live.route.deliver.handover import decode_body, prefill_body, read_params, release_body
from headgate.live.route.request import at_once
from router_world import World, fail_first_decode, routed, run, until

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
PROMPTS = [
    f"Prompt {number}: " + "the gate opens and the water goes on " * (1 + number % 6) for number in range(24)
]
EXPIRED = re.compile(r"^vllm:nixl_num_notifications_after_expiry_total\S* (\S+)$", re.MULTILINE)
USAGE = re.compile(r"^vllm:kv_cache_usage_perc\S* (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("nixl")
    with pair(tiny.model(scratch / "model"), scratch) as servers:
        yield servers


def metrics(engine) -> str:
    with urllib.request.urlopen(engine.url + "/metrics", timeout=600) as answer:
        return answer.read().decode()


def expired(engines) -> float:
    return sum(float(value) for engine in engines for value in EXPIRED.findall(metrics(engine)))


def in_use(engines) -> float:
    return sum(float(value) for engine in engines for value in USAGE.findall(metrics(engine)))


async def alone(engine, prompt: str, tokens: int) -> str:
    """What one engine answers by itself."""
    async with aiohttp.ClientSession() as client:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with client.post(engine.url + "/v1/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["text"]


async def asked(world: World, prompt: str, tokens: int, streams: bool) -> str:
    answer = await world.ask(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, stream=streams
    )
    assert answer.status == 200, answer.body
    if not streams:
        return answer.json["choices"][0]["text"]
    assert answer.events[-1] == b"[DONE]"
    return "".join(each["choices"][0]["text"] for each in answer.events[:-1] if each["choices"])


def before(engines, router: str):
    """A router before both."""
    limits = {"first_token": 600, "idle": 600, "connect": 60, "queue_ttl": 600}
    return routed(
        urls=[engine.url for engine in engines],
        engine={"slots": 16},
        router={"name": router},
        kv={"lease": LEASE},
        limits=limits,
    )


def test_answers_of_split_requests_are_those_of_one_engine(engines) -> None:
    async def work() -> None:
        wanted = [await alone(engines[1], prompt, 12) for prompt in PROMPTS]
        async with before(engines, "split:prefill=1") as world:
            got = await asyncio.gather(
                *(asked(world, prompt, 12, number % 3 > 0) for number, prompt in enumerate(PROMPTS))
            )
            assert got == wanted
            await world.settled()
            assert world.counted("kv_handovers_total") > len(PROMPTS) / 2
        assert expired(engines) == 0

    run(work())


def test_hang_ups_in_every_state_leave_no_kv_behind(engines) -> None:
    async def work() -> None:
        draw = random.Random(3)
        wanted = {prompt: await alone(engines[1], prompt, 16) for prompt in PROMPTS}
        async with before(engines, "split:prefill=1") as world:
            tasks = []
            for number in range(60):
                prompt = PROMPTS[number % len(PROMPTS)]
                task = asyncio.create_task(asked(world, prompt, 16, True))
                tasks.append((prompt, task))
                if number % 4 == 0:
                    asyncio.get_running_loop().call_later(2 * draw.random(), task.cancel)
            results = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
            for (prompt, _), text in zip(tasks, results, strict=True):
                assert isinstance(text, asyncio.CancelledError) or text == wanted[prompt]
            await world.settled()
            await until(lambda: in_use(engines) == 0)
        assert expired(engines) == 0

    run(work())


def test_whole_only_requests(engines) -> None:
    async def work() -> None:
        one, two = PROMPTS[3], PROMPTS[4]
        wanted = [await alone(engines[1], prompt, 8) for prompt in (one, two)]
        async with before(engines, "split:prefill=1") as world:
            answer = await world.ask(
                model="tiny", prompt=[one, two], max_tokens=8, temperature=0, ignore_eos=True
            )
            assert [each["text"] for each in answer.json["choices"]] == wanted
            answer = await world.ask(  # vLLM refuses several greedy ones
                model="tiny", prompt=one, n=2, max_tokens=8, temperature=0.7, ignore_eos=True
            )
            assert answer.status == 200, answer.body
            assert len(answer.json["choices"]) == 2 and all(each["text"] for each in answer.json["choices"])
            assert world.counted("kv_handovers_total") == 0
        await until(lambda: in_use(engines) == 0)

    run(work())


@pytest.mark.parametrize("refused", [False, True], ids=["read, then reset", "refused by its engine"])
def test_spent_parameters_are_never_sent_again(engines, refused: bool, monkeypatch) -> None:
    """Traps 1 and 2: a decode that failed after its engine had the parameters begins with a new prompt."""

    async def work() -> None:
        wanted = await alone(engines[1], PROMPTS[5], 12)
        sent = fail_first_decode(monkeypatch, refused)
        async with before(engines, "split:prefill=1") as world:
            assert await asked(world, PROMPTS[5], 12, True) == wanted
            await world.settled()
            assert len(sent) == len(set(sent)) == world.counted("kv_handovers_total")
            assert len(sent) == 2 or refused  # an engine that refused is full, and the prompt stays at home
        await until(lambda: in_use(engines) == 0)
        assert expired(engines) == 0

    run(work())


async def post(engine, body: bytes) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            engine.url + "/v1/completions", data=body, headers={"Content-Type": "application/json"}
        ) as answer,
    ):
        return answer.status, await answer.json()


def test_a_release_is_refused_by_the_other_engine_and_frees_the_blocks_at_once(engines) -> None:
    async def work() -> None:
        async with aiohttp.ClientSession() as client:
            body = b'{"model":"tiny","prompt":"%b","max_tokens":8}' % (b"water " * 60)
            async with client.post(
                engines[0].url + "/v1/completions",
                data=at_once(prefill_body(body)),
                headers={"Content-Type": "application/json"},
            ) as answer:
                params = read_params(await answer.read(), 0, 0.0, LEASE)
        raw = params.take(float("-inf"))
        assert raw is not None
        assert in_use(engines) > 0
        status, said = await post(engines[1], at_once(release_body(body, raw)))
        assert status == 400, said
        await until(lambda: in_use(engines) == 0)

    run(work())


def test_at_home_with_parameters_is_an_error_or_computed_again_and_the_router_sends_none(engines) -> None:
    async def work() -> None:
        prompt = "gate " * 60
        body = (
            b'{"model":"tiny","prompt":"%b","max_tokens":8,"temperature":0,"ignore_eos":true}'
            % prompt.encode()
        )
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                engines[0].url + "/v1/completions",
                data=at_once(prefill_body(body)),
                headers={"Content-Type": "application/json"},
            ) as answer,
        ):
            params = read_params(await answer.read(), 0, 0.0, LEASE)
        raw = params.take(0.0)
        assert raw is not None
        status, said = await post(engines[0], decode_body(body, raw))
        assert status == 500 or said["choices"][0]["text"] == await alone(engines[1], prompt, 8)
        await until(lambda: in_use(engines) == 0)  # pinned until the lease ends
        async with before(engines, "split:prefill=1") as world:
            world.app.gate.set_engine(1, most=0)  # the engine of the prompt has to decode as well
            assert await asked(world, prompt, 8, True) == await alone(engines[1], prompt, 8)
            await world.settled()
            assert world.counted("kv_handovers_total") == 0
            assert world.counted("kv_released_total", result="ok") == 0  # sent whole: nothing was pinned
        await until(lambda: in_use(engines) == 0)

    run(work())


def test_after_the_deadline_the_prompt_is_computed_again(engines) -> None:
    async def work() -> None:
        prompt = "late " * 60
        async with before(engines, "split:prefill=1") as world:
            asking = asyncio.create_task(asked(world, prompt, 8, True))
            await until(lambda: world.app.gate.counts["moved"])
            for engine in (0, 1):
                world.app.gate.set_engine(engine, most=0)
            await until(lambda: world.counted("kv_stripped_total") or asking.done())
            for engine in (0, 1):
                world.app.gate.set_engine(engine, most=1000)
            assert await asking == await alone(engines[1], prompt, 8)
            await world.settled()
        assert expired(engines) == 0

    run(work())


def test_vllm_answers_200_for_parameters_that_were_refused_before(engines) -> None:
    """Why they are one-shot: a refused decode frees the blocks, and vLLM does not say so afterwards.

    Whether the tokens are wrong depends on who has the blocks meanwhile; the status is always the same.
    """

    async def work() -> None:
        body = b'{"model":"tiny","prompt":"%b","max_tokens":8,"temperature":0}' % (b"spent " * 50)
        status, said = await post(engines[0], at_once(prefill_body(body)))
        assert status == 200
        raw = read_params(json.dumps(said).encode(), 0, 0.0, LEASE).take(0.0)
        assert raw is not None
        assert (await post(engines[1], at_once(release_body(body, raw))))[0] == 400
        await until(lambda: in_use(engines) == 0)  # freed at their owner, long before the lease ends
        assert (await post(engines[1], decode_body(body, raw)))[0] == 200

    run(work())


def test_the_openai_client_and_an_engine_killed_in_the_middle(engines) -> None:
    async def work() -> None:
        async with before(engines, "least-loaded") as world:
            client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="x", max_retries=0, timeout=900)

            async def one(number: int) -> str:
                text = ""
                try:
                    chunks = await client.completions.create(
                        model="tiny", prompt=PROMPTS[number], max_tokens=200, stream=True, temperature=0,
                        extra_body={"ignore_eos": True},
                    )  # fmt: skip
                    async for chunk in chunks:
                        text += "".join(choice.text for choice in chunk.choices)
                except openai.APIError:
                    return "error"
                return text

            tasks = [asyncio.create_task(one(number)) for number in range(12)]
            await until(lambda: all(slot.decodes for slot in world.app.gate.roster.replicas))
            await asyncio.to_thread(kill, engines[0])
            results = await asyncio.gather(*tasks)
            whole = [text for text in results if text != "error"]
            assert 0 < len(whole) < 12
            for number, text in enumerate(results):
                if text != "error":
                    assert text == await alone(engines[1], PROMPTS[number], 200)
            await world.settled()
            again = [await asked(world, PROMPTS[number], 5, True) for number in range(4)]
            assert all(again)
            await client.close()

    run(work())
