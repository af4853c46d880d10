"""Prefill here, decode there: vLLM's rules, and wrong text for whoever breaks them."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from calls_of_emulator import FAST, in_thread, post, run, session, stream, text_of, until

from headgate.live.emulate import answer, emulated

ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FIELDS = set(
    """do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host
    remote_port tp_size dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode
    remote_prefill_cached_tokens""".split()  # noqa: SIM905
)
PROMPT = "A prompt of some length, so that its KV takes more than one block of sixteen tokens. " * 4
RIGHT = answer(PROMPT, 8)


@asynccontextmanager
async def pair(**words):
    async with emulated(**FAST | {"engines": 2} | words) as urls, session() as client:
        yield urls, client


async def prefill(client, url, prompt=PROMPT, **more):
    status, found = await post(
        client, url, {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK} | more
    )
    assert status == 200
    return found["kv_transfer_params"]


async def decode(client, url, params, prompt=PROMPT, **more):
    body = {"prompt": prompt, "max_tokens": 8, "kv_transfer_params": params} | more
    status, found = await post(client, url, body)
    return status, [choice["text"] for choice in found["choices"]] if status == 200 else found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hand_over_gives_the_answer_of_one_engine_alone(asynchronous):
    async def main():
        async with pair(asynchronous=asynchronous) as (urls, client):
            params = await prefill(client, urls[0])
            assert set(params) == FIELDS
            assert urls.engines[0].kv_usage > 0  # the blocks wait to be read
            assert await decode(client, urls[1], params) == (200, [RIGHT])
            await until(lambda: urls.at_rest)
            assert urls.engines[1].tally.loaded_tokens == len(PROMPT) // 4 - 1 + bool(len(PROMPT) % 4)
            events = await stream(client, urls[1], {"prompt": PROMPT, "max_tokens": 8, "kv_transfer_params":
                                                    await prefill(client, urls[0])})  # fmt: skip
            assert text_of(events) == RIGHT

    run(main())


def test_parameters_are_good_for_one_read():
    async def main():
        async with pair(engines=3) as (urls, client):
            params = await prefill(client, urls[0])
            assert await decode(client, urls[1], params) == (200, [RIGHT])
            for url in urls[1:]:
                status, texts = await decode(client, url, params)
                assert status == 200 and texts != [RIGHT]

    run(main())


@pytest.mark.parametrize("more", [{"max_tokens": 2147483647}, {"temperature": -1}, {"model": "other"}])
def test_a_decode_that_is_refused_frees_the_blocks_at_once(more):
    async def main():
        async with pair() as (urls, client):
            params = await prefill(client, urls[0])
            status, _ = await decode(client, urls[1], params, **more)
            assert status in (400, 404)
            assert urls.engines[0].kv_usage == 0
            status, texts = await decode(client, urls[1], params)
            assert status == 200 and texts != [RIGHT]

    run(main())


def test_a_fault_of_the_schema_frees_nothing():
    async def main():
        async with pair() as (urls, client):
            params = await prefill(client, urls[0])
            status, _ = await decode(client, urls[1], params, stream_options={"include_usage": True})
            assert status == 400 and urls.engines[0].kv_usage > 0
            assert await decode(client, urls[1], params) == (200, [RIGHT])

    run(main())


def test_after_the_lease_the_text_is_wrong_and_counted():
    async def main():
        async with pair(kv_lease=0.5) as (urls, client):
            params = await prefill(client, urls[0])
            await until(lambda: urls.at_rest)  # the lease has ended
            assert urls.engines[0].tally.nixl["kv_expired_reqs"] == 1
            status, texts = await decode(client, urls[1], params)
            assert status == 200 and texts != [RIGHT]
            assert urls.engines[0].tally.nixl["notifications_after_expiry"] == 1

    run(main())


def test_two_prompts_in_one_body_only_the_first_is_right():
    async def main():
        async with pair() as (urls, client):
            params = await prefill(client, urls[0], ["first", "second one"])
            status, texts = await decode(client, urls[1], params, ["first", "second one"])
            assert status == 200
            assert texts[0] == answer("first", 8) and texts[1] != answer("second one", 8)

    run(main())


def test_several_choices_are_right_and_leave_blocks_behind_until_the_lease_ends():
    async def main():
        async with pair(kv_lease=100.0) as (urls, client):
            params = await prefill(client, urls[0], n=2)
            assert await decode(client, urls[1], params, n=2) == (200, [RIGHT, answer(PROMPT, 8, 1)])
            await until(lambda: urls.at_rest)
            assert urls.engines[0].tally.nixl["kv_expired_reqs"] == 1

    run(main())


def test_an_engine_does_not_read_from_itself():
    async def main():
        async with pair() as (urls, client):
            params = await prefill(client, urls[0])
            status, found = await decode(client, urls[0], params)
            assert status == 500 and found["error"]["code"] == 500
            status, found = await post(client, urls[0], {"prompt": PROMPT, "max_tokens": 8})
            assert found["choices"][0]["text"] == RIGHT and urls.engines[0].kv_usage > 0

    run(main())


def test_parameters_that_lack_a_field_are_ignored():
    async def main():
        async with pair() as (urls, client):
            params = await prefill(client, urls[0])
            del params["remote_port"]
            assert await decode(client, urls[1], params) == (200, [RIGHT])
            assert urls.engines[1].tally.loaded_tokens == 0

    run(main())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_engine_of_the_prompt_is_dead(policy):
    async def main():
        async with pair(kv_load_failure=policy) as (urls, client):
            params = await prefill(client, urls[0])
            await urls.ports[0].crash()
            status, found = await decode(client, urls[1], params)
            assert (status, found) == (200, [RIGHT]) if policy == "recompute" else status == 500
            assert urls.engines[1].tally.nixl["failed_transfers"] == 1
            body = {"prompt": PROMPT, "max_tokens": 8, "kv_transfer_params": params}
            events = await stream(client, urls[1], body)  # 200 at once, whatever happens later
            if policy == "recompute":
                assert text_of(events) == RIGHT
            else:
                assert [event["error"]["code"] for event in events] == [500]
            elsewhere = params | {"remote_engine_id": "unknown", "remote_host": "192.0.2.1"}
            status, _ = await decode(client, urls[1], elsewhere)  # not a host we were told of: never called
            assert status == (200 if policy == "recompute" else 500)

    run(main())


def test_a_client_that_leaves_while_its_kv_is_copied_leaves_nothing_behind():
    async def main():
        async with pair(transfer_delay=50.0, kv_lease=1.0) as (urls, client):
            params = await prefill(client, urls[0])
            task = asyncio.create_task(decode(client, urls[1], params))
            await until(lambda: urls.engines[1].kv_usage > 0)
            task.cancel()
            await until(lambda: urls.engines[1].kv_usage == 0 and not urls.engines[1].waiting)

    run(main())


def test_full_memory_waits_for_room_and_nobody_is_stuck():
    async def main():
        async with pair(kv_tokens=512, model_len=256) as (urls, client):
            prompt = "x" * 400  # 100 tokens, 7 of 32 blocks
            prompts = [f"{number:02d}{prompt}" for number in range(12)]

            async def both(prompt):
                params = await prefill(client, urls[0], prompt)
                return await decode(client, urls[1], params, prompt, max_tokens=60)

            found = await asyncio.gather(*map(both, prompts))
            assert found == [(200, [answer(prompt, 60)]) for prompt in prompts]
            await until(lambda: urls.at_rest)

    run(main())


def test_between_processes_over_loopback():
    """The emulators of two threads do not share the table of engines when it is hidden from one of them."""
    from headgate.live.emulate import kv

    with in_thread(**FAST) as first:

        async def main():
            async with emulated(**FAST) as urls, session() as client:
                params = await prefill(client, first[0])
                hidden = dict(kv.NAMES)
                kv.NAMES.clear()
                try:
                    one, again = [await decode(client, urls[0], params) for _ in range(2)]
                    params = await prefill(client, first[0])
                    refused = await decode(client, urls[0], params, temperature=-1)
                    after = await decode(client, urls[0], params)
                finally:
                    kv.NAMES.update(hidden)
                assert one == (200, [RIGHT])
                assert again[0] == 200 and again[1] != [RIGHT]
                assert refused[0] == 400 and after[1] != [RIGHT]

        run(main())
