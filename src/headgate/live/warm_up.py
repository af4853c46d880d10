"""Load for a server that has just started, so that its first users meet warm kernels and graphs.

Rounds grow until the longest gap between tokens no longer falls. Their class is promised nothing: a policy
learns step times from them, and takes no stall for a broken promise.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import aiohttp

from headgate.core.errors import InputError
from headgate.live.engine.requests import CLASS
from headgate.live.engine.settings import WARM_UP
from headgate.live.tasks import SHOWN, end_all, why
from headgate.live.trial.load import FIRST_TOKEN_ID, PATIENCE, TOKEN_IDS, key_header, served_model

PROMPTS = (300, 900, 1500)  # tokens
OUTPUT, SHORT = 200, 40  # tokens, of the ramp and of the burst
A_SECOND = 50.0  # requests of the ramp
ROUNDS = 4
SETTLED = 0.9  # of the longest gap of the round before: less than that, and another round may help


class Server(NamedTuple):
    url: str
    model: str
    length: int  # tokens of a prompt and its output


async def warm_up(url: str, most: int, seconds: float, key: str, say: Callable[[str], None]) -> None:
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is no URL; write http://{url}")
    server = Server(url, *await served_model(url, key))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # else it meets those that the server closes
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE)
    about: dict[str, Any] = {"headers": key_header(key), "connector": connector, "timeout": timeout}
    began, before = monotonic(), float("inf")
    async with aiohttp.ClientSession(**about) as session:
        say(f"up to {most} requests at once to {server.model}, for at most {seconds:g} s")
        for number in range(1, ROUNDS + 1):
            left = seconds - (monotonic() - began)
            if left <= 0:
                break
            gaps = await _round(session, server, most, left)
            if not gaps:
                raise InputError(f"no request was answered within {seconds:g} s; see the log of {url}")
            longest, count = max(gaps), len(gaps)
            say(f"round {number}: {count} requests, longest gap between two tokens {1000 * longest:.0f} ms")
            if longest > SETTLED * before:
                say("it no longer falls")
                break
            before = longest
    say(f"done after {monotonic() - began:.0f} s")


async def _round(session: aiohttp.ClientSession, server: Server, most: int, seconds: float) -> list[float]:
    found: list[float] = []
    end = monotonic() + seconds
    for ramp in (True, False):

        async def send(number: int, ramp: bool = ramp) -> None:
            await asyncio.sleep(number / A_SECOND if ramp else 0.0)
            prompt = PROMPTS[number % len(PROMPTS)] if ramp else PROMPTS[-1]
            found.append(await _ask(session, server, prompt, OUTPUT if ramp else SHORT))

        tasks = [asyncio.create_task(send(number)) for number in range(most)]
        done, late = await asyncio.wait(tasks, timeout=max(0.0, end - monotonic()))
        await end_all(late)
        for error in (task.exception() for task in done):
            if error is not None:
                raise InputError(f"the server at {server.url} refused a request: {why(error)}") from None
    return found


async def _ask(session: aiohttp.ClientSession, server: Server, prompt: int, output: int) -> float:
    output = max(1, min(output, server.length // 4))
    prompt = max(1, min(prompt, server.length - output - 1))
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": random.choices(range(FIRST_TOKEN_ID, TOKEN_IDS), k=prompt),
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {CLASS: WARM_UP},
        "custom_params": {CLASS: WARM_UP},
    }
    newest, longest = None, 0.0
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise OSError(f"status {answer.status}, {(await answer.text())[:SHOWN]}")
        async for _ in answer.content.iter_any():
            now = monotonic()
            if newest is not None:
                longest = max(longest, now - newest)
            newest = now
    return longest
