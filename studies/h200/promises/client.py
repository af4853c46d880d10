"""Clients in processes of their own: send each request on time, note when its tokens come."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from studies.h200.promises.load import Load

AHEAD = 5.0  # seconds before the first arrival: processes start and write their requests
OK = b"HTTP/1.1 200"
EVENT = b'data: {"'
CHAT, BATCH = "chat", "batch"  # classes, where a load has both
Row = tuple[float, int, int, bool | None]  # arrival, prompt, output, whether it is batch


class Answer(NamedTuple):
    """What one client saw; times in seconds from the request's arrival, `status` 0 when nothing came."""

    arrival: float
    status: int
    first: float | None
    gaps: list[float]  # between two readings with tokens
    last: float | None
    whole: bool
    batch: bool = False


class Target(NamedTuple):
    """Where requests go."""

    port: int
    model: str
    vocabulary: int
    temperature: float = 0.0  # 1 where greedy tokens of made-up weights would all be the same


def serve(load: Load, target: Target, processes: int, drain: float, seed: int) -> list[Answer]:
    """All requests of a run, from so many processes; waits `drain` seconds for the last ones."""
    batch = [None] * len(load.arrival) if load.batch is None else load.batch.tolist()
    columns = zip(load.arrival.tolist(), load.prompt.tolist(), load.output.tolist(), batch, strict=True)
    rows: list[Row] = list(columns)
    begin = time.monotonic() + AHEAD
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(_part, rows[number::processes], target, begin, drain, seed + number)
            for number in range(processes)
        ]
        answers = [answer for part in parts for answer in part.result()]
    return sorted(answers, key=lambda answer: answer.arrival)


def _part(rows: list[Row], target: Target, begin: float, drain: float, seed: int) -> list[Answer]:
    rng = random.Random(seed)
    bodies = [(at, _body(prompt, output, batch, target, rng)) for at, prompt, output, batch in rows]
    answers = asyncio.run(_all(bodies, target.port, begin, drain))
    return [answer._replace(batch=bool(row[3])) for answer, row in zip(answers, rows, strict=True)]


def _body(prompt: int, output: int, batch: bool | None, target: Target, rng: random.Random) -> bytes:
    words: dict[str, Any] = {
        "model": target.model,
        "prompt": [rng.randrange(10, target.vocabulary) for _ in range(prompt)],
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": target.temperature,
        "stream": True,
    }
    if batch is not None:
        words["vllm_xargs"] = {"headgate_class": BATCH if batch else CHAT}
    text = json.dumps(words).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


async def _all(bodies: list[tuple[float, bytes]], port: int, begin: float, drain: float) -> list[Answer]:
    tasks = [asyncio.create_task(_one(port, at, body, begin)) for at, body in bodies]
    if not tasks:
        return []
    last = begin + bodies[-1][0] + drain
    _, late = await asyncio.wait(tasks, timeout=max(0.0, last - time.monotonic()))
    for task in late:
        task.cancel()
    return list(await asyncio.gather(*tasks))


async def _one(port: int, at: float, body: bytes, begin: float) -> Answer:
    """One request; a cancelled one keeps what it has seen."""
    due = begin + at
    status, first, last, gaps, whole = 0, None, None, [], False
    writer = None
    try:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        while data := await reader.read(1 << 16):
            now = time.monotonic() - due
            if EVENT in data:
                if last is None:
                    first = now
                else:
                    gaps.append(now - last)
                last = now
            whole = whole or b"data: [DONE]" in data
    except (asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return Answer(at, status, first, gaps, last, whole)
