"""Asynchronous scheduling over HTTP: the next step is composed before the tokens of this one are known.

The server is vLLM's own, without anything of `headgate serve`: metrics are on /metrics all the same.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from http_server import START, Server, eventually, plugged_in

SLOTS, COUNT = 16, 60
FIRST = {"policy": "eb+", "card": "linear-h200-qwen3-8b"}
SECOND = {"policy": "slai", "card": "linear-h200-qwen3-8b", "clients_may": ["class", "ttft", "tbt", "guess"]}
HOSTILE = [
    {},
    {"headgate_tbt": 1e-9, "headgate_guess": 1e300},
    {"headgate_ttft": "1" * 15_000 + "!"},
    {f"headgate_{number}": 1 for number in range(2000)},
]


@pytest.fixture(scope="module")
def server(model: Path, scratch: Path):
    (scratch / "headgate.json").write_text(json.dumps(FIRST))
    with plugged_in(model, scratch, scratch / "headgate.json", SLOTS) as found:
        yield found


async def ask(server: Server, number: int, leaves: bool = False, **words: object) -> str:
    url, body = f"{server.url}/v1", {"ignore_eos": True, **({"vllm_xargs": words} if words else {})}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=START, max_retries=0) as api:
        parts = await api.completions.create(
            model="tiny",
            prompt=f"request {number}: " + "x" * (number * 7 % 120),
            max_tokens=600 if leaves else 8 + number % 20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=body,
        )
        text, usage = "", None
        async for part in parts:
            text += part.choices[0].text if part.choices else ""
            usage = part.usage or usage
            if leaves and text:
                await parts.close()
                return text
    assert usage is not None and usage.completion_tokens == 8 + number % 20
    return text


def together(server: Server, hostile: bool) -> list[str]:
    async def all_of() -> list[str]:
        words = [HOSTILE[number % len(HOSTILE)] if hostile else {} for number in range(COUNT)]
        staying = [ask(server, number, **words[number]) for number in range(COUNT)]
        leaving = [ask(server, number, leaves=True) for number in range(10)]
        return (await asyncio.gather(*staying, *leaving))[:COUNT]

    return asyncio.run(all_of())


def idle(server: Server) -> None:
    for state in ("waiting", "prefilling", "decoding"):
        server.until("headgate_requests", f'state="{state}"', 0)
    assert server.metrics()[("headgate_fallen", "")] == 0 and not server.said("headgate failed")


def test_answers_do_not_depend_on_company_or_policy(server, scratch):
    assert server.said("asynchronous scheduling")
    eventually(lambda: server.uses("eb+"), "eb+ among the metrics")  # its process shows them once a second

    async def alone() -> list[str]:
        return [await ask(server, number) for number in range(COUNT)]

    expected = asyncio.run(alone())
    found = [together(server, hostile=False), together(server, hostile=True)]
    idle(server)
    (scratch / "new.json").write_text(json.dumps(SECOND))
    (scratch / "new.json").replace(scratch / "headgate.json")
    for _ in range(120):  # it takes over at the next plan, so somebody must ask
        together(server, hostile=False)
        if server.metrics().get(("headgate_renewals_total", "")):
            break
    assert server.metrics()[("headgate_renewals_total", "")] == 1
    found += [together(server, hostile=False), together(server, hostile=True)]
    idle(server)
    for texts in found:  # another batch rounds differently on a CPU
        assert sum(one == other for one, other in zip(expected, texts, strict=True)) >= 0.9 * COUNT
