"""An emulator that speculates: several tokens in one event, counted as tokens, the same text as without."""

import aiohttp
import pytest
from calls_of_emulator import post, served, stream, text_of

from headgate.core.errors import InputError
from headgate.live.emulate import answer
from headgate.live.emulate.options import Options
from headgate.live.emulate.service import EmulatorSetup
from headgate.live.engine.settings import Settings

BODY = {"prompt": "Once upon a time", "max_tokens": 10, "stream_options": {"include_usage": True}}


async def _counter(client: aiohttp.ClientSession, url: str, name: str) -> float:
    async with client.get(url + "/metrics") as told:
        lines = (await told.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accept, deliveries", [(1, [1, 4, 4, 1]), (0, [1] * 10)])
def test_bursts_are_events(accept, deliveries, asynchronous):
    async def test(client, url):
        events = await stream(client, url, BODY)
        assert text_of(events) == answer("Once upon a time", 10)
        *tokens, usage = events
        assert usage["usage"]["completion_tokens"] == 10
        assert len(tokens) == len(deliveries)
        whole, sent = answer("Once upon a time", 10), ""
        for event in tokens:
            sent += event["choices"][0]["text"]
            assert whole.startswith(sent)
        assert tokens[-1]["choices"][0]["finish_reason"] == "length"
        assert await _counter(client, url, "generation_tokens") == 10
        drafts = len(deliveries) - 1
        assert await _counter(client, url, "spec_decode_num_accepted_tokens") == 10 - len(deliveries)
        assert await _counter(client, url, "spec_decode_num_drafts") >= drafts
        draft_tokens = await _counter(client, url, "spec_decode_num_draft_tokens")
        assert draft_tokens == 3 * await _counter(client, url, "spec_decode_num_drafts")
        status, found = await post(client, url, BODY | {"stream_options": None})
        assert (status, found["usage"]["completion_tokens"]) == (200, 10)

    served(test, speculate=f"3:accept={accept}", asynchronous=asynchronous)


def test_without_it_there_are_no_counters():
    async def test(client, url):
        async with client.get(url + "/metrics") as told:
            assert "spec_decode" not in await told.text()

    served(test)


def test_what_it_refuses():
    with pytest.raises(InputError, match="needs the share of drafts"):
        EmulatorSetup(Options(speculate="3"))


def test_a_settings_file_makes_policies_that_know_of_drafts():
    setup = EmulatorSetup(Options(speculate="3:accept=0.7"))
    policy, _ = setup.from_settings(Settings(policy="eb+", card="cal-h200-qwen3-8b"))
    assert policy.exclusive.cost.width == 4
    with pytest.raises(InputError, match="SGLang's own scheduling"):
        setup.from_settings(Settings(policy="sglang"))
    own, _ = EmulatorSetup(Options(engine="sglang")).from_settings(Settings(policy="sglang"))
    assert type(own).__name__ == "SGLang"
