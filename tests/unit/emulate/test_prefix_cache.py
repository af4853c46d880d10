"""The emulated prefix cache: found where vLLM finds it, counted where vLLM counts it."""

import re

import numpy as np
import pytest
from calls_of_emulator import FAST, post, run, served, session, stream

from headgate.live.emulate import emulated
from headgate.live.emulate.text import content

PROMPT = list(range(100, 140))  # two full blocks and a half
TOLD = {"prompt_tokens_details": True}


async def counted(client, url, name):
    async with client.get(url + "/metrics") as answer:
        found = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", await answer.text(), re.MULTILINE)
        return float(found.group(1))


async def cached(client, url, prompt=PROMPT, **more):
    """Prompt tokens that the answer says were found."""
    status, found = await post(client, url, {"prompt": prompt, "max_tokens": 3, **more})
    assert status == 200
    return (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


def test_equal_prompts_are_found_but_for_their_last_block():
    async def test(client, url):
        assert await cached(client, url) == 0
        assert await cached(client, url) == 32
        assert await cached(client, url, PROMPT[:32]) == 16  # the last token is computed again
        assert await cached(client, url, cache_salt="mine") == 0
        assert await cached(client, url, cache_salt="mine") == 32
        assert await cached(client, url, [7, *PROMPT[1:]]) == 0
        assert await counted(client, url, "prefix_cache_queries_total") == 5 * 40 + 32
        assert await counted(client, url, "prefix_cache_hits_total") == 32 + 16 + 32
        asked = {"prompt": PROMPT, "max_tokens": 3, "stream_options": {"include_usage": True}}
        events = await stream(client, url, asked)
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}

    served(test, **TOLD)


def test_an_answer_is_found_by_the_next_turn():
    async def test(client, url):
        body = {"prompt": PROMPT, "max_tokens": 30, "return_token_ids": True}
        _, found = await post(client, url, body)
        told = found["choices"][0]["token_ids"]
        assert len(told) == 30
        assert (
            await cached(client, url, [*PROMPT, *told, 1, 2, 3]) == 64
        )  # 69 tokens have KV, the last of 70 none

    served(test, **TOLD)


@pytest.mark.parametrize("options", [{"prefix_cache": False}, {}])
def test_nothing_is_said_unless_asked_for(options):
    async def test(client, url):
        assert [await cached(client, url) for _ in range(2)] == [None, None]
        hits = 0 if options else 32
        assert await counted(client, url, "prefix_cache_hits_total") == hits
        assert await counted(client, url, "prefix_cache_queries_total") == (0 if options else 80)
        assert await counted(client, url, "prompt_tokens_cached_total") == hits

    served(test, **options)


def test_memory_comes_back_when_kv_was_kept_for_another_engine():
    async def main():
        async with emulated(engines=2, kv_lease=1e6, **FAST) as urls, session() as client:
            body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            for _ in range(2):
                status, found = await post(client, urls[0], body)
                assert status == 200
                body2 = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": found["kv_transfer_params"]}
                status, _ = await post(client, urls[1], body2)
                assert status == 200
            first, second = urls.engines
            assert first.tally.cache_hits == 32 and second.tally.loaded_tokens == 78
            assert first.kv_usage == second.kv_usage == 0
            for engine in urls.engines:
                cache = engine.replica.cache
                assert cache.free == cache.total

    run(main())


def test_a_block_has_the_key_of_its_tokens():
    ids = np.arange(40, dtype="<u4")
    one, other = content(ids, [1, 2], None, 16), content(ids[:33], [33, 34], None, 16)
    assert one[:2] == other[:2] and [tokens for _, tokens in one] == [16, 16, 10]
    assert content(ids, [], "salt", 16)[0] != one[0] and content(ids, [], "salt", 16)[1] == one[1]
    assert content(ids[:3], [], "salt", 16) == [(-1, 3)]
