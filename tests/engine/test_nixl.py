"""KV handed over by NIXL, the connector people use, between two servers under eb+ and slai, in both roles.

NIXL works on a CPU (UCX over loopback): `pip install --no-deps nixl nixl-cu12`. Without it there is nothing
to test here; KV connectors in general are tested by the oracle with one that is made up.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from http_server import MAIN, ONE_PROCESS, START, Server, eventually, free_port, start, stop, wait

pytest.importorskip("nixl")

SLOTS, COUNT = 8, 12
NOBODY = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY}
ROLES = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
POLICIES = {name: {"policy": name, "card": "linear-h200-qwen3-8b"} for name in ("eb+", "slai")}


def settle(scratch: Path, policy: str) -> None:
    (scratch / "new.json").write_text(json.dumps(POLICIES[policy]))
    (scratch / "new.json").replace(scratch / "headgate.json")


@pytest.fixture(scope="module")
def servers(model, scratch):
    """Two of the same kind, each of which can hand over and take; every policy has its turn in them."""
    settle(scratch, next(iter(POLICIES)))
    command = [sys.executable, "-c", MAIN, "serve", str(model), "--config", "headgate.json"]
    flags = ["--max-num-seqs", str(SLOTS), "--kv-transfer-config", json.dumps(ROLES)]
    environ = {**ONE_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # two engines must not share one core
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            started.append(start(command, scratch, *flags, **environ))
            stack.callback(stop, started[-1])
        for server in started:
            wait(server)
        yield started


@pytest.fixture(scope="module", params=POLICIES)
def pair(request, servers, scratch):
    """Both servers under this policy; settings are read between two plans, so somebody must ask."""
    settle(scratch, request.param)

    def in_force(server: Server) -> bool:
        asyncio.run(complete(server, 0, 1))
        return server.uses(request.param)

    for server in servers:
        eventually(lambda server=server: in_force(server), f"{request.param} in {server.url}")
    return servers


def prompt(number: int) -> str:
    return f"request {number}: " + "abcdefgh" * (10 + number * 7 % 40)


async def complete(server: Server, number: int, tokens: int, parameters: dict | None = None):
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=START, max_retries=0) as api:
        body = {"ignore_eos": True}
        if parameters is not None:
            body["kv_transfer_params"] = parameters
        return await api.completions.create(
            model="tiny", prompt=prompt(number), max_tokens=tokens, temperature=0, extra_body=body
        )


async def handed_over(here: Server, there: Server, number: int) -> str:
    """The prompt runs here, the tokens come from there."""
    first = await complete(here, number, 1, AWAY)
    passed_on = first.model_extra["kv_transfer_params"]
    assert passed_on["do_remote_prefill"]
    answer = await complete(there, number, 6 + number % 7, passed_on)
    assert answer.usage.completion_tokens == 6 + number % 7
    return answer.choices[0].text


async def all_of(work) -> list[str]:
    return await asyncio.gather(*work)


@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["first prefills", "second prefills"])
def test_answers_are_those_of_one_engine_and_no_policy_falls(pair, way):
    here, there = (pair[place] for place in way)

    async def alone() -> list[str]:
        return [(await complete(here, n, 6 + n % 7)).choices[0].text for n in range(COUNT)]

    expected = asyncio.run(alone())
    found = asyncio.run(all_of(handed_over(here, there, number) for number in range(COUNT)))
    same = sum(one == other for one, other in zip(expected, found, strict=True))
    assert same >= 0.9 * COUNT  # another batch rounds differently on a CPU
    for server in pair:
        for state in ("waiting", "prefilling", "decoding"):
            server.until("headgate_requests", f'state="{state}"', 0)
        assert server.metrics()[("headgate_fallen", "")] == 0
        assert not server.said("headgate failed")


def test_both_ways_at_once(pair):
    """Each server prefills for the other and decodes for it at the same time, and clients of its own."""
    one, two = pair
    work = [handed_over(*((one, two) if n % 2 else (two, one)), n) for n in range(COUNT)]
    texts = asyncio.run(all_of(work))
    assert len(texts) == COUNT and all(texts)
    for server in pair:
        server.until("headgate_requests", 'state="decoding"', 0)
        assert server.metrics()[("headgate_fallen", "")] == 0
