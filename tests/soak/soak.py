"""Minutes of attack on a real server, against plain vLLM under the same traffic: `make soak`.

Clients ask, stream, hang up and send hostile parameters; the settings file changes under them. Half of the
time goes to plain vLLM, half to headgate. Exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import openai
import psutil
import tiny
from checks import Soaked, verdicts
from http_server import MAIN, Server, start, stop, wait

SEATS, PROMPTS, TOKENS = 32, 400, 24
CARD = {"card": "linear-h200-qwen3-8b"}
POLICIES: list[dict[str, Any]] = [
    {"policy": "eb+", **CARD},
    {"policy": "slai", **CARD},
    {"policy": "eb", "set": {"refill": 4}},
    {"policy": "look-ahead"},
    {"policy": "mixed"},
    {"policy": "rad", **CARD},
]
BASE = {
    "clients_may": ["class", "ttft", "tbt", "guess"],
    "classes": {"chat": {"ttft": "2s", "tbt": "100ms"}, "batch": {}},
    "trace": "steps.jsonl",
}
HOSTILE: list[Callable[[Random], dict[str, Any]]] = [
    lambda random: {},
    lambda random: {"headgate_class": "chat"},
    lambda random: {"headgate_class": "x" * random.choice([1, 65, 100_000])},
    lambda random: {"headgate_tbt": 1e-9, "headgate_ttft": 1e300},
    lambda random: {"headgate_ttft": "1" * 15_000 + "!"},
    lambda random: {"headgate_guess": random.choice([1e300, -1, "nan", "1" * 5000, 2**62])},
    lambda random: {f"headgate_{number}": number for number in range(random.choice([1, 3000]))},
    lambda random: {"headgate_" + "y" * 200_000: 1},
    lambda random: {"headgate_class": ["chat"] * 20_000},
]


class Client:
    """Asks one thing after another until its time is over."""

    def __init__(self, api: openai.AsyncOpenAI, random: Random, soaked: Soaked) -> None:
        self.api, self.random, self.soaked = api, random, soaked
        self.sent = self.answered = self.hung_up = 0

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            self.sent += 1
            try:
                await self.ask(self.random.randrange(PROMPTS))
            except Exception as error:
                if len(self.soaked.failures) < 5:
                    self.soaked.failures.append(f"{type(error).__name__}: {str(error)[:100]}")

    async def ask(self, number: int) -> None:
        words = self.random.choice(HOSTILE)(self.random)  # plain vLLM gets them too, and ignores them
        began, tokens = time.monotonic(), 1 + number * 7 % TOKENS
        leaves = self.random.random() < 0.1
        parts = await self.api.completions.create(
            model="tiny",
            prompt=f"request {number}: " + "x" * (number * 13 % 150),
            max_tokens=400 if leaves else tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "vllm_xargs": words} if words else {"ignore_eos": True},
        )
        text, usage = "", None
        async for part in parts:
            text += part.choices[0].text if part.choices else ""
            usage = part.usage or usage
            if leaves and text:
                await parts.close()
                self.hung_up += 1
                return
        assert usage is not None and usage.completion_tokens == tokens, f"{usage} in place of {tokens} tokens"
        self.answered += 1
        self.soaked.texts.setdefault(number, set()).add(text)
        self.soaked.seconds.append(time.monotonic() - began)


def engine_of(server: Server) -> psutil.Process:
    """The process of the engine: by its name, or the one with the most memory."""
    family = psutil.Process(server.child.pid).children(recursive=True)
    named = [each for each in family if "EngineCore" in " ".join(each.cmdline() or [""])]
    return (named or sorted(family, key=lambda each: each.memory_info().rss))[-1]


async def soak(server: Server, minutes: float, clients: int, change: Callable[[int], None] | None) -> Soaked:
    """The traffic, and once a second the engine's memory."""
    found = Soaked(0, 0, 0, [], {}, [], [])
    until = time.monotonic() + 60 * minutes
    engine = engine_of(server)
    api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600.0, max_retries=0)
    async with api:
        crowd = [Client(api, Random(number), found) for number in range(clients)]
        tasks = [asyncio.create_task(client.run(until)) for client in crowd]
        beat = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1.0)
            beat += 1
            finished = sum(client.answered + client.hung_up for client in crowd)
            found.memory.append((finished, engine.memory_info().rss))
            if change is not None and beat % 10 == 0 and time.monotonic() < until:
                change(beat // 10)
        await asyncio.gather(*tasks)
    sums = (sum(getattr(client, name) for client in crowd) for name in ("sent", "answered", "hung_up"))
    return found._replace(**dict(zip(("sent", "answered", "hung_up"), sums, strict=True)))


def main() -> int:
    """Both servers, one after the other, and the checks."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=48)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-soak-") as place:
        scratch = Path(place)
        model = tiny.model(scratch / "model")
        plain = one(scratch, [str(Path(sys.executable).with_name("vllm")), "serve", str(model)], asked, None)[
            0
        ]
        settings = scratch / "headgate.json"

        def change(number: int) -> None:
            (scratch / "new.json").write_text(json.dumps({**BASE, **POLICIES[number % len(POLICIES)]}))
            (scratch / "new.json").replace(settings)

        change(0)
        command = [sys.executable, "-c", MAIN, "serve", str(model), "--config", str(settings)]
        gated, left, fallen = one(scratch, command, asked, change)
    passed = True
    print(f"plain: {plain.answered} answers; headgate: {gated.answered} answers, {gated.hung_up} hung up")
    for name, seen, good in verdicts(plain, gated, left, fallen):
        print(f"{'ok  ' if good else 'FAIL'} {name}: {seen}")
        passed = passed and good
    return 0 if passed else 1


def one(
    scratch: Path, command: list[str], asked: argparse.Namespace, change: Callable[[int], None] | None
) -> tuple[Soaked, dict[str, float], float]:
    """One server through its half of the time; what its books hold when idle, how often policies fell."""
    server = start(command, scratch, "--max-num-seqs", str(SEATS))
    try:
        wait(server)
        found = asyncio.run(soak(server, asked.minutes / 2, asked.clients, change))
        left, fallen = {}, 0.0
        if change is not None:
            with suppress(AssertionError):
                server.until("headgate_requests", 'state="decoding"', 0)
            metrics = server.metrics()
            left = {labels: value for (name, labels), value in metrics.items() if name == "headgate_requests"}
            fallen = sum(value for (name, _), value in metrics.items() if name == "headgate_fallbacks_total")
        return found, left, fallen
    finally:
        stop(server)


if __name__ == "__main__":
    sys.exit(main())
