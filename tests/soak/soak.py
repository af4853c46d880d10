"""Minutes of attack on a real server, against plain vLLM under the same traffic: `make soak`.

Clients ask, stream, hang up and send hostile parameters; the settings file changes under them. Both servers
run all the time and get the same requests in turns of 20 s. Exit code 1 where a check fails.
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
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import openai
import psutil
import tiny
from checks import Soaked, verdicts
from http_server import MAIN, Server, ready, start

SLOTS, PROMPTS, TOKENS = 32, 400, 24
TURN = 20.0  # seconds
CARD = {"card": "linear-h200-qwen3-8b"}
POLICIES: list[dict[str, Any]] = [
    {"policy": "eb+", **CARD},
    {"policy": "slai", **CARD},
    {"policy": "eb", "set": {"refill": 4}},
    {"policy": "sarathi"},
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
        self.label = ""

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
        self.soaked.seconds.setdefault(self.label, []).append(time.monotonic() - began)


def engine_of(server: Server) -> psutil.Process:
    """The process of the engine: by its name, or the one with the most memory."""
    family = psutil.Process(server.child.pid).children(recursive=True)
    named = [each for each in family if "EngineCore" in " ".join(each.cmdline() or [""])]
    return (named or sorted(family, key=lambda each: each.memory_info().rss))[-1]


class Arm:
    """One server, its crowd of clients, and what they have seen. Both arms get the same requests in turns."""

    def __init__(self, server: Server, clients: int) -> None:
        self.server, self.engine = server, engine_of(server)
        self.found = Soaked(0, 0, 0, [], {}, {}, [])
        self.api = openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=600.0, max_retries=0
        )
        self.crowd = [Client(self.api, Random(number), self.found) for number in range(clients)]

    def call(self, label: str) -> None:
        """What latencies are from now on booked under."""
        for client in self.crowd:
            client.label = label

    async def turn(self, midway: Callable[[], str]) -> None:
        """The traffic of a turn, and once a second the engine's memory."""
        until = time.monotonic() + TURN
        tasks = [asyncio.create_task(client.run(until)) for client in self.crowd]
        changed = False
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1.0)
            if not changed and time.monotonic() > until - TURN / 2:
                changed = True
                self.call(midway())
            finished = sum(client.answered + client.hung_up for client in self.crowd)
            self.found.memory.append((finished, self.engine.memory_info().rss))
        await asyncio.gather(*tasks)

    @property
    def soaked(self) -> Soaked:
        names = ("sent", "answered", "hung_up")
        sums = {name: sum(getattr(client, name) for client in self.crowd) for name in names}
        return self.found._replace(**sums)


async def soak(plain: Arm, gated: Arm, minutes: float, change: Callable[[int], str]) -> None:
    """In turns: what else the machine does meets both. Settings also change in the middle of a turn."""
    end, numbers = time.monotonic() + 60 * minutes, count()
    plain.call("plain")
    async with plain.api, gated.api:
        while time.monotonic() < end:
            await plain.turn(lambda: "plain")
            gated.call(change(next(numbers)))
            await gated.turn(lambda: change(next(numbers)))


def main() -> int:
    """Both servers, turn by turn, and the checks."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=48)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-soak-") as place:
        scratch = Path(place)
        model = tiny.model(scratch / "model")
        settings = scratch / "headgate.json"

        def change(number: int) -> str:
            policy = POLICIES[number % len(POLICIES)]
            (scratch / "new.json").write_text(json.dumps({**BASE, **policy}))
            (scratch / "new.json").replace(settings)
            return str(policy["policy"])

        change(0)
        commands = [
            [str(Path(sys.executable).with_name("vllm")), "serve", str(model)],
            [sys.executable, "-c", MAIN, "serve", str(model), "--config", str(settings)],
        ]
        with ready(
            [start(command, scratch, "--max-num-seqs", str(SLOTS)) for command in commands]
        ) as servers:
            plain, gated = (Arm(server, asked.clients) for server in servers)
            asyncio.run(soak(plain, gated, asked.minutes, change))
            left, fallen = books(gated.server)
    return show(plain.soaked, gated.soaked, left, fallen)


def books(server: Server) -> tuple[dict[str, float], float]:
    """What the engine's books hold when idle, and how often policies were disabled."""
    with suppress(AssertionError):
        server.until("headgate_requests", 'state="decoding"', 0)
    metrics = server.metrics()
    left = {labels: value for (name, labels), value in metrics.items() if name == "headgate_requests"}
    fallen = sum(value for (name, _), value in metrics.items() if name == "headgate_fallbacks_total")
    return left, fallen


def show(plain: Soaked, gated: Soaked, left: dict[str, float], fallen: float) -> int:
    """Everything that was seen; 1 where a check failed."""
    print(f"plain: {plain.answered} answers; headgate: {gated.answered} answers, {gated.hung_up} hung up")
    for label, seconds in {**plain.seconds, **gated.seconds}.items():
        p50, p99 = np.percentile(seconds, (50, 99))
        print(f"     {label}: {len(seconds)} answers, p50 {p50:.2f} s, p99 {p99:.2f} s")
    quarters = {name: found.memory[:: max(1, len(found.memory) // 4)] for name, found in
                (("plain", plain), ("headgate", gated))}  # fmt: skip
    for name, points in quarters.items():
        print(f"     memory of {name}: " + ", ".join(f"{at}: {size / 2**20:.1f} MiB" for at, size in points))
    passed = True
    for name, seen, good in verdicts(plain, gated, left, fallen):
        print(f"{'ok  ' if good else 'FAIL'} {name}: {seen}")
        passed = passed and good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
