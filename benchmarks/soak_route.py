"""A router before emulators for a long time, with 1 % faults, 5 % hang-ups and hostile clients: memory and
books stay flat.

Engines, clients and router have a process each, and the router runs on the loop of `headgate route`, so that
what is measured is the memory of a router and nothing else. With several replicas the Redis server between
them is killed and started again four times.

Run: make soak-route, or python -m benchmarks.soak_route --seconds 600 --streams 200 [--replicas 2]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import sys
from collections.abc import Sequence
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from benchmarks.redis_server import RedisServer
from headgate.live.emulate import answer, emulated
from headgate.live.route.config import checked
from headgate.live.route.run import loop_factory
from headgate.live.route.server import RouterApp

FAULTS = ("503", "500", "drop=3", "reset-before-head", "error-event=0", "abort", "reset-mid-event=2", "429")
LEAK = 200  # bytes a request: less than the smallest record that the router has of one
KEPT = 0.5  # objects a request: one that is kept for each would be 1
SAMPLES = 60
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
HOSTILE = {  # what some clients send; none of it may be answered with 200
    "long header": HEAD + b"X: " + b"a" * 100_000,
    "many headers": HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(5000)) + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "half a body": HEAD + b'Content-Length: 100\r\n\r\n{"prompt": ',
    "huge body": HEAD + b"Content-Length: 99999999999\r\n\r\n" + b"a" * 100_000,
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "not HTTP": bytes(range(256)) * 40,
    "deep JSON": HEAD + b"Content-Length: 20000\r\n\r\n" + b"[" * 20_000,
    "wrong types": HEAD + b'Content-Length: 32\r\n\r\n{"prompt": 7, "max_tokens": "1"}',
}
SPEED, LEASE = 2.0, 10.0  # of the engines' clocks; seconds by the router's clock


class Sample(NamedTuple):
    """The router's process at one moment."""

    requests: int  # so far
    memory: float  # resident, MiB
    blocks: int  # of Python's allocator that are in use: about one for each object
    files: int


def sample(requests: int) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Sample(requests, resident, sys.getallocatedblocks(), len(os.listdir("/proc/self/fd")))


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Bytes of memory and objects that each request has added, by least squares after the first third.

    A run that is twice as long is judged as strictly, and memory that levels off after the start is no leak.
    Objects tell a leak from memory that the allocator cannot use again.
    """
    requests, memory, blocks, _ = zip(*samples[len(samples) // 3 :], strict=True)
    return float(np.polyfit(requests, memory, 1)[0]) * 2**20, float(np.polyfit(requests, blocks, 1)[0])


async def client(
    session: aiohttp.ClientSession, urls: list[str], draw: random.Random, counts: dict[str, int]
) -> None:
    """One client after the other; some hang up at a random moment."""
    number = 0
    while True:
        number += 1
        url = urls[0] if len(urls) == 1 else draw.choice(urls)
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
        except aiohttp.ClientError as error:
            counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
            continue
        right = not ended or text == answer(prompt, tokens)
        kind = "broken" if not ended else "whole" if right else "WRONG"
        counts[kind] = counts.get(kind, 0) + 1


async def hostile(ports: list[int], draw: random.Random, counts: dict[str, int]) -> None:
    """Sends what no client should, waits a moment for the answer and hangs up."""
    while True:
        kind = draw.choice(list(HOSTILE))
        reader, writer = await asyncio.open_connection("127.0.0.1", draw.choice(ports))
        status = "no answer"
        try:
            writer.write(HOSTILE[kind])
            async with asyncio.timeout(draw.random() * 2.0):
                line = await reader.readline()
            status = line.split()[1].decode() if line.startswith(b"HTTP/1") else "no answer"
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
        name = "WRONG" if status == "200" else f"hostile: {status}"
        counts[name] = counts.get(name, 0) + 1


def _text(line: bytes) -> str:
    import json

    choices = json.loads(line[6:]).get("choices")
    return str(choices[0]["text"]) if choices else ""


def engines(pipe: Connection) -> None:
    """Emulated engines."""

    async def work() -> None:
        async with emulated(engines=4, slots=64, speed=SPEED, model="m", kv_lease=SPEED * LEASE) as fleet:
            pipe.send(list(fleet))
            for turn in count():
                for faults in fleet.faults:
                    faults.set({"rate": 0.01, "kind": FAULTS[turn % len(FAULTS)]})
                await asyncio.sleep(5.0)

    logging.disable(logging.CRITICAL)
    asyncio.run(work())


def router(pipe: Connection, urls: list[str], name: str, seconds: float, store: str | None) -> None:
    """The router; sends its port, then a sample now and then, at the end what it has left behind."""

    async def work() -> None:
        given = {
            "front": {"port": 0, "admin": "127.0.0.1:0"},
            "router": {"name": name},
            "kv": {"lease": LEASE},
            "engines": [{"url": url, "slots": 64} for url in urls],
            "health": {"fails": 1000, "timeout": 60},
            "replicas": {"store": store},
        }
        app = RouterApp(checked(given))
        await app.start()
        pipe.send(app.port)
        for _ in range(SAMPLES):
            await asyncio.sleep(seconds / SAMPLES)
            pipe.send(sample(app.gate.counts["arrived"]))
        while not pipe.poll():  # until the clients have gone
            await asyncio.sleep(0.1)
        for _ in range(300):  # a busy machine hears late of clients that hung up
            await asyncio.sleep(0.1)
            legs = sum(each.legs for each in app.upstreams.values())
            left = len(app.gate.tickets), legs, app.body_bytes.held
            if left == (0, 0, 0):
                break
        pipe.send((left, app.gate.check(), app.gate.books()["refused"]))
        await app.stop()

    logging.disable(logging.CRITICAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


async def soak(pipes: list[Connection], streams: int, store: RedisServer) -> bool:
    """Whether everything stayed flat."""
    counts: dict[str, int] = {}
    samples: list[list[Sample]] = [[] for _ in pipes]
    ports = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        urls = [f"http://127.0.0.1:{port}/v1/completions" for port in ports]
        tasks = [asyncio.create_task(client(session, urls, random.Random(n), counts)) for n in range(streams)]
        draws = (random.Random(f"hostile {n}") for n in range(max(1, streams // 20)))
        tasks += [asyncio.create_task(hostile(ports, draw, counts)) for draw in draws]
        for turn in range(1, SAMPLES + 1):
            for pipe, of_router in zip(pipes, samples, strict=True):
                of_router.append(await asyncio.to_thread(pipe.recv))
                if turn % (SAMPLES // 6) == 0:
                    requests, used, blocks, files = of_router[-1]
                    print(
                        f"{requests:8,} requests  {used:6.1f} MiB  {blocks:8,} objects  {files:4d} files",
                        flush=True,
                    )
            if len(pipes) > 1 and turn % (SAMPLES // 4) == SAMPLES // 8:
                store.kill()
            if len(pipes) > 1 and turn % (SAMPLES // 4) == SAMPLES // 8 + 2:
                store.start()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        died = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
    flat = not (counts.get("WRONG", 0) or died)
    for pipe, of_router in zip(pipes, samples, strict=True):
        pipe.send("gone")
        left, faulty, refused = await asyncio.to_thread(pipe.recv)
        leaked, kept = growth(of_router)
        print(f"memory: {leaked:.0f} bytes a request after the first third (limit {LEAK})")
        print(f"objects: {kept:.2f} a request after the first third (limit {KEPT})")
        print(f"left behind: {left}; books: {faulty or 'sound'}; refused {refused}")
        flat &= leaked <= LEAK and kept <= KEPT and left == (0, 0, 0) and not faulty
    print(f"results: {counts}; clients that broke: {died}")
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--router", default="split:prefill=1")
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    children = get_context("spawn")
    ours, theirs = children.Pipe()
    fleet = children.Process(target=engines, args=(theirs,), daemon=True)
    fleet.start()
    urls = ours.recv()
    store, pipes, routing = RedisServer(), [], []
    if given.replicas > 1:
        store.start()
    for _ in range(given.replicas):
        ours, theirs = children.Pipe()
        about = theirs, urls, given.router, given.seconds, store.url if given.replicas > 1 else None
        routing.append(children.Process(target=router, args=about, daemon=True))
        routing[-1].start()
        theirs.close()  # a router that dies is the end of the pipe
        pipes.append(ours)
    try:
        flat = asyncio.run(soak(pipes, given.streams, store))
    finally:
        for process in (*routing, fleet):
            process.terminate()
        store.close()
    print("flat" if flat else "not flat")
    sys.exit(0 if flat else 1)


if __name__ == "__main__":
    main()
