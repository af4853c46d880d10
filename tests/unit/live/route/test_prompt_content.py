"""What the live router hashes of prompts: bounded work, equal beginnings have equal keys."""

import json

from headgate.live.emulate import emulated
from headgate.live.route.request import MOST_BYTES, PARTS, content_of, read_body
from router_world import routed, run

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def content(path=TEXT, **body):
    return content_of(read_body(json.dumps({"model": "m", **body}).encode(), path))


def shared(one, other):
    """Tokens of equal pieces from the first on."""
    tokens = 0
    for first, second in zip(one.pieces, other.pieces, strict=False):
        if first != second:
            break
        tokens += first[1]
    return tokens


def test_a_longer_conversation_begins_with_the_shorter_one():
    turns = [{"role": "user", "content": f"{n} " + "word " * 400} for n in range(6)]
    shorter, longer = (content(CHAT, messages=turns[:n]) for n in (5, 6))
    assert shorter.tokens == len(json.dumps(turns[:5])) // 4
    assert shared(shorter, longer) > 15 / 16 * shorter.tokens - 128


def test_token_ids_are_tokens():
    ids = list(range(1000, 3000))
    one, other = content(prompt=ids), content(prompt=[*ids[:1024], 7, *ids[1025:]])
    assert one.tokens == other.tokens == 2000 and shared(one, other) == 1024
    assert shared(one, content(prompt=ids)) == 2000
    assert content(prompt=[10**12, -3]).tokens == 2  # the engine will refuse it


def test_what_else_decides_the_kv_is_in_the_first_key():
    plain = {"prompt": "a" * 4000}
    assert shared(content(**plain), content(**plain)) == 1000
    for more in ({"model": "adapter"}, {"cache_salt": "mine"}, {"tools": [{"type": "function"}]}):
        assert shared(content(**plain), content(**{**plain, **more})) == 0


def test_a_session_is_what_clients_name():
    assert content(prompt="a").session is None
    assert content(prompt="a", user="u" * 1000).session == b'"' + b"u" * 255
    assert content(prompt="a", user="u", prompt_cache_key="k").session == b'"k"'


def test_work_is_bounded_whatever_is_sent():
    huge = content(prompt="x" * (2 * MOST_BYTES))
    assert len(huge.pieces) == PARTS + 1 and huge.tokens == 2 * MOST_BYTES // 4
    assert shared(huge, content(prompt="x" * (2 * MOST_BYTES))) == MOST_BYTES // 4  # the rest counts as new
    assert len(content(prompt=[5] * MOST_BYTES).pieces) <= PARTS + 1
    for odd in ("", [], [[1], [2]], ["a", "b"], [1.5], {"x": 1}, None):
        assert content(prompt=odd).tokens >= 0


async def hits(router: str) -> float:
    """The share of prompt tokens that four emulated engines found, of conversations sent turn by turn."""
    async with emulated(engines=4, speed=1000.0, slots=32, model="m") as fleet:
        settings = {"name": router, "card": "cal-h200-qwen3-8b"}
        async with routed(urls=list(fleet), engine={"slots": 32}, router=settings) as world:
            talks = [[{"role": "user", "content": f"{talk} " + "word " * 300}] for talk in range(7)]
            for turn in range(4):
                for talk in talks:
                    got = await world.ask("/v1/chat/completions", raw=json.dumps(
                        {"model": "m", "messages": talk, "max_tokens": 2, "ignore_eos": True}
                    ).encode())  # fmt: skip
                    assert got.status == 200
                    talk.append({"role": "user", "content": f"and {turn}? " + "more " * 100})
            await world.settled()
            assert world.app.gate.fallen is None
            tallies = [each.tally for each in fleet.engines]
            return sum(each.cached_tokens for each in tallies) / sum(each.prompt_tokens for each in tallies)


def test_conversations_find_more_of_their_kv_than_under_least_loaded():
    async def work() -> None:
        aware, blind = await hits("prefix-aware"), await hits("least-loaded")
        assert aware > 0.5 > 0.3 > blind

    run(work())
