"""Clients in processes of their own: send each request on time, note when its tokens come."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from studies.h200.promises.load import BATCH, CHAT, FREE, GOLD, Load

AHEAD = 5.0  # seconds before the first arrival: processes start and write their requests
OK = b"HTTP/1.1 200"
EVENT = b'data: {"'
WORD = re.compile(rb"w\d")  # each token begins with one; nothing else in an answer does
BODIES = 64  # prompts of a process's closed loops, sent again and again (no prefix cache)
STAGGER = 0.02  # seconds between the first requests of two of its clients
Row = tuple[float, int, int, str]  # arrival, prompt, output, class
URGENCY = {CHAT: 0, GOLD: 0, FREE: 1, BATCH: 1}  # vLLM's priorities, for servers that look at them


class Answer(NamedTuple):
    """What one client saw; times in seconds from the request's arrival, `status` 0 when nothing came."""

    arrival: float
    status: int
    first: float | None
    gaps: list[float]  # between two readings with tokens
    last: float | None
    whole: bool
    kind: str = ""
    prompt: int = 0
    tokens: tuple[int, ...] = ()  # in each reading


class Target(NamedTuple):
    """Where requests go."""

    port: int
    model: str
    vocabulary: int
    temperature: float = 0.0  # 1 where greedy tokens of made-up weights would all be the same
    priorities: bool = False  # does the server look at them?


def serve(load: Load, target: Target, processes: int, drain: float, seed: int) -> list[Answer]:
    """All requests of a run, from so many processes; waits `drain` seconds for the last ones.

    Clients of a closed loop send nothing after the load's end, and do not wait.
    """
    columns = (load.arrival, load.prompt, load.output, load.kind)
    rows: list[Row] = list(zip(*(column.tolist() for column in columns), strict=True))
    begin = time.monotonic() + AHEAD
    with ProcessPoolExecutor(2 * processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(_part, rows[number::processes], target, begin, drain, seed + number)
            for number in range(processes)
        ]
        for number in range(processes if load.clients else 0):
            clients = len(range(number, load.clients, processes))
            parts.append(pool.submit(_busy, load, clients, target, begin, seed + number))
        answers = [answer for part in parts for answer in part.result()]
    return sorted(answers, key=lambda answer: answer.arrival)


def _part(rows: list[Row], target: Target, begin: float, drain: float, seed: int) -> list[Answer]:
    rng = random.Random(seed)
    bodies = [(at, _body(prompt, output, kind, target, rng)) for at, prompt, output, kind in rows]
    answers = asyncio.run(_all(bodies, target.port, begin, drain))
    return [answer._replace(prompt=row[1], kind=row[3]) for answer, row in zip(answers, rows, strict=True)]


def _busy(load: Load, clients: int, target: Target, begin: float, seed: int) -> list[Answer]:
    """So many clients in a closed loop; their prompts are written beforehand, to be sent at once."""
    rng = random.Random(seed + 77)
    pool = []
    mean_prompt, mean_output, kind = load.closed
    for share in (0.5 + rng.random() for _ in range(BODIES)):
        prompt, output = int(mean_prompt * share), int(mean_output * (2 - share))
        pool.append((prompt, _body(prompt, output, kind, target, rng)))
    answers = asyncio.run(_loops(clients, pool, target.port, begin, load.seconds, rng))
    return [answer._replace(kind=kind) for answer in answers]


async def _loops(
    clients: int, pool: list[tuple[int, bytes]], port: int, begin: float, seconds: float, rng: random.Random
) -> list[Answer]:
    answers: list[Answer] = []

    async def client(number: int) -> None:
        at = number * STAGGER
        while at < seconds:
            prompt, body = rng.choice(pool)
            answer = await _one(port, at, body, begin)
            answers.append(answer._replace(prompt=prompt))
            if not answer.whole:
                return
            at = time.monotonic() - begin

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def _body(prompt: int, output: int, kind: str, target: Target, rng: random.Random) -> bytes:
    words: dict[str, Any] = {
        "model": target.model,
        "prompt": [rng.randrange(10, target.vocabulary) for _ in range(prompt)],
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": target.temperature,
        "stream": True,
    }
    if kind:
        words["vllm_xargs"] = {"headgate_class": kind}
        if target.priorities:
            words["priority"] = URGENCY[kind]
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
    tokens: list[int] = []
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
                tokens.append(max(data.count(EVENT), len(WORD.findall(data))))  # drafts share an event
            whole = whole or b"data: [DONE]" in data
    except (asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    return Answer(at, status, first, gaps, last, whole, tokens=tuple(tokens))
