"""An emulator that speculates: several tokens in one event, counted as tokens, the same text as without."""

import asyncio

import aiohttp
import pytest
from calls_of_emulator import post, served, stream, text_of

from headgate.core.errors import InputError
from headgate.experiment.library import card_engine
from headgate.live.emulate import answer
from headgate.live.emulate.clock import VirtualClock
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.emulate.options import Options
from headgate.live.emulate.service import EmulatorSetup
from headgate.live.emulate.text import Text
from headgate.live.engine.settings import Settings
from headgate.methods.make import make_policy
from headgate.sim.engine.bursts import FORGET

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


class Ended:
    """Hears of the end of its job."""

    streams = False

    def __init__(self, left):
        self._left = left

    def end(self, job):
        self._left.pop()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_life_keeps_nothing_of_jobs_and_steps_that_are_gone(asynchronous):
    engine = card_engine("cal-h200-qwen3-8b", slots=4, budget=256, speculate="1:accept=0.2")

    async def live():
        policy = make_policy("mixed", {}, engine)[0]
        emulated = EmulatedEngine(engine, policy, VirtualClock(), asynchronous=asynchronous)
        emulated.begun.clear()
        left = [None] * 200
        for number in range(len(left)):
            length = 150 + number * 37 % 300
            job = EmulatedJob(30, length, length + 50 * (number % 2), Text(number), Ended(left))
            emulated.submit(job, number * 1.2)
        emulated.begun.set()
        task = asyncio.create_task(emulated.run())
        while left or emulated.replica.occupied:
            assert not task.done()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return emulated

    emulated = asyncio.run(live())
    ledger, blocks = emulated.replica.ledger, emulated.replica.blocks
    assert ledger.tick > 2 * FORGET
    assert len(ledger.growth) == len(blocks.growers) < FORGET + 500
    kept = (emulated._accepts, emulated._seeds, emulated._lengths, emulated._contents)
    assert not any(kept) and not ledger.decoding and len(emulated.replica._ends) < 10
