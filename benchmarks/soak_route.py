"""A router before emulators for a long time, with 1 % faults and 5 % hang-ups: memory and books stay flat.

Run: make soak-route, or python -m benchmarks.soak_route --seconds 600 --streams 200
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import numpy as np

from headgate.live.emulate import answer, emulated
from headgate.live.route.app import RouterApp
from headgate.live.route.config import checked

FAULTS = ("503", "500", "drop=3", "reset-before-head", "error-event=0", "abort", "reset-mid-event=2", "429")
LEAK = 200  # bytes a request: less than the smallest record that the router has of one


def memory() -> float:
    """Resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def growth(samples: Sequence[tuple[int, float]]) -> float:
    """Bytes of memory that each request has added, by least squares over all samples after the first third.

    `samples` are requests so far and MiB. A run that is twice as long is judged as strictly, and memory that
    levels off after the start is no leak.
    """
    requests, used = zip(*samples[len(samples) // 3 :], strict=True)
    return float(np.polyfit(requests, used, 1)[0]) * 2**20


async def client(
    session: aiohttp.ClientSession, url: str, draw: random.Random, counts: dict[str, int]
) -> None:
    """One client after the other; some hang up at a random moment."""
    number = 0
    while True:
        number += 1
        prompt, tokens = f"prompt {draw.random()} " * draw.randint(1, 40), draw.randint(1, 40)
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        patience = draw.random() * 0.5 if draw.random() < 0.05 else None
        text, ended = "", False
        try:
            async with asyncio.timeout(patience):
                async with session.post(url, json=body) as response:
                    if response.status != 200:
                        counts[str(response.status)] = counts.get(str(response.status), 0) + 1
                        continue
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            text += _text(line)
                        ended |= line.startswith(b"data: [DONE]")
        except TimeoutError:
            counts["hung up"] = counts.get("hung up", 0) + 1
            continue
        right = not ended or text == answer(prompt, tokens)
        kind = "broken" if not ended else "whole" if right else "WRONG"
        counts[kind] = counts.get(kind, 0) + 1


def _text(line: bytes) -> str:
    import json

    choices = json.loads(line[6:]).get("choices")
    return str(choices[0]["text"]) if choices else ""


def engines(pipe: Connection) -> None:
    """Emulated engines in a process of their own, so that only the router's memory is measured."""

    async def work() -> None:
        async with emulated(engines=4, slots=64, speed=2.0, model="m", kv_lease=20.0) as fleet:
            pipe.send(list(fleet))
            for turn in count():
                for faults in fleet.faults:
                    faults.set({"rate": 0.01, "kind": FAULTS[turn % len(FAULTS)]})
                await asyncio.sleep(5.0)

    logging.disable(logging.CRITICAL)
    asyncio.run(work())


async def soak(urls: list[str], seconds: float, streams: int, router: str) -> bool:
    """Whether everything stayed flat."""
    counts: dict[str, int] = {}
    samples: list[tuple[int, float]] = []
    given = {
        "front": {"port": 0, "admin": "127.0.0.1:0"},
        "router": {"name": router},
        "kv": {"lease": 10.0},
        "engines": [{"url": url, "seats": 64} for url in urls],
        "health": {"fails": 1000, "timeout": 60},
    }
    app = RouterApp(checked(given))
    await app.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        url = f"http://127.0.0.1:{app.port}/v1/completions"
        tasks = [asyncio.create_task(client(session, url, random.Random(n), counts)) for n in range(streams)]
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            await asyncio.sleep(seconds / 60)
            samples.append((sum(counts.values()), memory()))
            if len(samples) % 10 == 0:
                at, used = time.monotonic() - began, samples[-1][1]
                print(f"{at:6.0f} s  {used:7.1f} MiB  {descriptors():4d} files  {counts}", flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(2.0)
    books, faulty = app.gate.books(), app.gate.check()
    left = len(app.gate.tickets), sum(each.legs for each in app.upstreams.values()), app.body_bytes.held
    await app.stop()
    leaked = growth(samples)
    print(f"memory: {leaked:.0f} bytes a request after the first third (limit {LEAK})")
    print(f"left behind: {left}; books: {faulty or 'sound'}")
    print(f"results: {counts}; refused {books['refused']}")
    wrong = counts.get("WRONG", 0)
    return leaked <= LEAK and left == (0, 0, 0) and not faulty and not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--router", default="split:prefill=1")
    given = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    ours, theirs = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=engines, args=(theirs,), daemon=True)
    child.start()
    try:
        flat = asyncio.run(soak(ours.recv(), given.seconds, given.streams, given.router))
    finally:
        child.terminate()
    print("flat" if flat else "not flat")
    sys.exit(0 if flat else 1)


if __name__ == "__main__":
    main()
