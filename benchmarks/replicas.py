"""Several routers before eight emulated engines: their revenue beside one router's, and a rolling restart.

Run: python -m benchmarks.replicas [--routers 1 2 4 --rounds 1 --seconds 200], then --restart --streams 200

Engines, clients and every router have a process each, with a Redis server between the routers; all numbers of
routers run side by side, each before engines of its own, because machines are never quiet. Two classes ask
for more than the engines can serve. Revenue counts requests that were served to the end: a prompt token
1, an output token 2. The most requests that an engine had are counted by the engine itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import aiohttp

from benchmarks.redis_server import RedisServer
from headgate.live.emulate import emulated
from headgate.live.emulate.engine import EmulatedEngine, EmulatedJob
from headgate.live.files import more_files
from headgate.live.route.config import checked
from headgate.live.route.run import loop_factory
from headgate.live.route.server import RouterApp

ENGINES, SLOTS, SPEED, CARD = 8, 64, 0.01, "cal-h200-qwen3-8b"
PROMPTS, OUTPUTS = {"chat": 256, "batch": 2048}, {"chat": 60, "batch": 90}
SHARES = {"chat": 0.7, "batch": 0.3}
WARM = 100.0  # seconds before anything counts
ENOUGH = 0.97  # of one router's revenue
MAIN = "from headgate.cli import main; main()"


class Result(NamedTuple):
    """What one run has brought."""

    revenue: float  # a second
    served: dict[str, int]
    refused: int
    broken: int
    most: list[int]  # requests at once, of each engine
    cpu: list[float]  # of each router, cores
    exchange: float  # seconds of one with the store, mean of the routers


def engines(pipe: Connection) -> None:
    """Emulated engines; tells the most that each had at once since it was last asked."""
    most: dict[int, int] = {}
    submit = EmulatedEngine.submit

    def counted(engine: EmulatedEngine, job: EmulatedJob, arrival: float | None = None) -> None:
        submit(engine, job, arrival)
        most[id(engine)] = max(most.get(id(engine), 0), engine.running + engine.waiting)

    async def work() -> None:
        words: dict[str, Any] = {
            "engines": ENGINES,
            "slots": SLOTS,
            "speed": SPEED,
            "card": CARD,
            "model": "m",
        }
        async with emulated(**words) as fleet:
            pipe.send(list(fleet))
            while await asyncio.to_thread(pipe.recv):
                pipe.send([most.get(id(engine), 0) for engine in fleet.engines])
                most.clear()

    setattr(EmulatedEngine, "submit", counted)  # noqa: B010
    logging.disable(logging.CRITICAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


def settings(urls: list[str], store: str | None, name: str, rate: float) -> dict[str, Any]:
    given: dict[str, Any] = {
        "front": {"port": 0, "admin": "127.0.0.1:0"},
        "router": {"name": name, "card": CARD},
        "classes": [
            {"name": kind, "match": {"field": kind}, "rate": rate * SHARES[kind], "prompt": PROMPTS[kind],
             "output": OUTPUTS[kind]}
            for kind in PROMPTS
        ],
        "limits": {"queue_ttl": 10.0},
        "engines": [{"url": url, "slots": SLOTS} for url in urls],
        "health": {"fails": 1000, "timeout": 60.0},
    }  # fmt: skip
    return given | ({"replicas": {"store": store}} if store else {})


def router(pipe: Connection, given: dict[str, Any]) -> None:
    """One router; sends its port, and at the end its CPU time and its time for an exchange."""

    async def work() -> None:
        app = RouterApp(checked(given))
        await app.start()
        pipe.send(app.port)
        await asyncio.to_thread(pipe.recv)
        before, began = time.process_time(), time.monotonic()
        took: list[float] = []
        asked = asyncio.create_task(asyncio.to_thread(pipe.recv))
        while not asked.done():
            await asyncio.sleep(0.5)
            took += [app.replicas.took] if app.replicas is not None else []
        cores = (time.process_time() - before) / (time.monotonic() - began)
        pipe.send((cores, sum(took) / max(1, len(took)), app.gate.check(), app.gate.fallen))
        await app.stop()

    logging.disable(logging.CRITICAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


def clients(pipe: Connection, ports: list[int], rate: float, seconds: float) -> None:
    """Requests at random times, each to a router drawn at random; sends what became of them."""

    async def one(session: aiohttp.ClientSession, kind: str, port: int, ends: Counter[str]) -> None:
        body = {
            "prompt": "a " * PROMPTS[kind], "max_tokens": OUTPUTS[kind], "ignore_eos": True, "stream": True,
            "metadata": {"class": kind},
        }  # fmt: skip
        try:
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                last = b""
                async for part in response.content.iter_any():
                    last = (last + part)[-64:]
            if response.status == 200:
                ends[kind if last.endswith(b"data: [DONE]\n\n") else "broken"] += 1
            else:
                ends["refused" if response.status == 429 else str(response.status)] += 1
        except aiohttp.ClientError as error:
            ends[type(error).__name__] += 1

    async def work() -> None:
        draw, tasks, ends = random.Random(1), set(), Counter[str]()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            loop = asyncio.get_running_loop()
            start = next_at = loop.time()
            counted = False
            while loop.time() < start + WARM + seconds:
                next_at += draw.expovariate(rate)
                await asyncio.sleep(max(0.0, next_at - loop.time()))
                if not counted and loop.time() >= start + WARM:
                    counted = True
                    ends.clear()
                    pipe.send("warm")
                kind = "chat" if draw.random() < SHARES["chat"] else "batch"
                task = asyncio.create_task(one(session, kind, draw.choice(ports), ends))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            pipe.send(dict(ends))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    more_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work())


def started(children: SpawnContext, work: Any, *about: Any) -> tuple[Any, Connection]:
    ours, theirs = children.Pipe()
    process = children.Process(target=work, args=(theirs, *about), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def measured(routers: int, name: str, rate: float, seconds: float, all_ready: Barrier) -> Result:
    """One number of routers before eight engines."""
    children = get_context("spawn")
    process, fleet = started(children, engines)
    urls = fleet.recv()
    with RedisServer() as store:
        given = settings(urls, store.url if routers > 1 else None, name, rate)
        running = [started(children, router, given) for _ in range(routers)]
        ports = [pipe.recv() for _, pipe in running]
        all_ready.wait()
        asking, answers = started(children, clients, ports, rate, seconds)
        assert answers.recv() == "warm"
        fleet.send(True)
        fleet.recv()
        for _, pipe in running:
            pipe.send("count")
        ends = answers.recv()
        for _, pipe in running:
            pipe.send("end")
        told = [pipe.recv() for _, pipe in running]
        fleet.send(True)
        most = fleet.recv()
        for child in (asking, *(each for each, _ in running)):
            child.join(30)
    process.terminate()
    for _, _, faults, fallen in told:
        assert not faults and fallen is None, (faults, fallen)
    served = {kind: ends.pop(kind, 0) for kind in PROMPTS}
    earned = sum(many * (PROMPTS[kind] + 2 * OUTPUTS[kind]) for kind, many in served.items())
    refused = ends.pop("refused", 0)
    exchange = sum(each[1] for each in told) / len(told)
    broken = sum(ends.values())
    return Result(earned / seconds, served, refused, broken, most, [each[0] for each in told], exchange)


def compare(routers: list[int], rounds: int, name: str, rate: float, seconds: float) -> bool:
    """Whether every number of routers earns enough and no engine had more requests than slots."""
    fine, revenues = True, {many: list[float]() for many in routers}
    for _ in range(rounds):
        ready = Barrier(len(routers))
        with ThreadPoolExecutor(len(routers)) as side_by_side:
            runs = [side_by_side.submit(measured, many, name, rate, seconds, ready) for many in routers]
        for many, run in zip(routers, runs, strict=True):
            result = run.result()
            revenues[many].append(result.revenue)
            fine &= max(result.most) <= SLOTS and not result.broken
            print(
                f"{many} routers  {result.revenue:8.1f} a second  served {result.served}  refused "
                f"{result.refused}  broken {result.broken}  most at once {max(result.most)} of {SLOTS}  "
                f"CPU {', '.join(f'{100 * each:.0f} %' for each in result.cpu)}  exchange "
                f"{1000 * result.exchange:.1f} ms",
                flush=True,
            )
    base = sum(revenues[routers[0]])
    for many in routers[1:]:
        share = sum(revenues[many]) / base
        fine &= share >= ENOUGH
        print(f"{many} routers earn {100 * share:.1f} % of what {routers[0]} earns")
    return fine


# -- a rolling restart


async def _stream(session: aiohttp.ClientSession, url: str, stop: asyncio.Event, ends: Counter[str]) -> None:
    body = {"prompt": "a " * 64, "max_tokens": 40, "ignore_eos": True, "stream": True}
    while not stop.is_set():
        try:
            async with session.post(url + "/v1/completions", json=body) as response:
                text = await response.read()
            whole = response.status == 200 and text.endswith(b"data: [DONE]\n\n")
            ends["whole" if whole else f"{response.status} {text[-60:]!r}"] += 1
        except aiohttp.ClientError as error:
            ends[repr(error)[:80]] += 1


async def restart(urls: list[str], streams: int, times: int) -> Counter[str]:
    """What became of requests while all processes of a router were replaced so many times."""
    ends: Counter[str] = Counter()
    with RedisServer() as store, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        tables = "".join(f'[[engines]]\nurl = "{url}"\nslots = 64\n' for url in urls)
        file.write_text(
            f'[front]\nport = 0\nadmin = "127.0.0.1:0"\nprocesses = 2\n[replicas]\nstore = "{store.url}"\n'
            f'[health]\nfails = 1000\ntimeout = "60s"\n{tables}'
        )
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, "route", "--config", str(file), stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        url, replaced, stop = "", 0, asyncio.Event()
        for _ in range(2):
            while "listening on" not in (line := (await parent.stdout.readline()).decode()):
                pass
        url = line.split("listening on ")[1].split(",")[0]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            load = [asyncio.create_task(_stream(session, url, stop, ends)) for _ in range(streams)]
            while replaced < times:
                await asyncio.sleep(5.0)
                parent.send_signal(signal.SIGUSR2)
                while "were replaced" not in (await parent.stdout.readline()).decode():
                    pass
                replaced += 1
                print(f"replaced {replaced} times, {sum(ends.values()):,} requests", flush=True)
            await asyncio.sleep(20.0)  # more than an idle connection lives
            stop.set()
            await asyncio.gather(*load)
        parent.terminate()
        await parent.communicate()
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--router", default="gate-and-route+")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    if given.restart:
        process, fleet = started(get_context("spawn"), engines)
        ends = asyncio.run(restart(fleet.recv(), given.streams, given.times))
        process.terminate()
        print(json.dumps(ends))
        sys.exit(0 if set(ends) == {"whole"} else 1)
    fine = compare(given.routers, given.rounds, given.router, given.rate, given.seconds)
    print("fine" if fine else "not fine")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
