"""A small client for tests: whole answers, events of a stream, and emulators in a thread of their own."""

import asyncio
import json
import threading
from contextlib import contextmanager

import aiohttp

from headgate.live.emulate import emulated

PATIENCE = 300.0  # seconds for what takes a moment: only what hangs takes so long
SMALL = {"card": "cal-h200-qwen3-8b", "slots": 32, "budget": 2048, "model": "tiny"}
FAST = SMALL | {"speed": 50.0}


def run(main, loops=asyncio):
    """An async test, with a limit; `loops` may be uvloop, on which the command runs where it is installed."""
    return loops.run(asyncio.wait_for(main, PATIENCE))


def served(test, **options):
    """One emulator for `test(client, url)`; it holds nothing afterwards."""

    async def main():
        async with emulated(**FAST | options) as urls, session() as client:
            await test(client, urls[0])
            assert urls.at_rest

    run(main())


async def post(session, url, body, chat=False, **headers):
    """Status and JSON of an answer."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with session.post(url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


def events_of(text):
    """The events of a stream as objects; the last must be [DONE]."""
    parts = [part for part in text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts), text
    assert parts[-1] == "data: [DONE]", text[-200:]
    return [json.loads(part[6:]) for part in parts[:-1]]


async def stream(session, url, body, chat=False, **headers):
    """The events of a streamed answer."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with session.post(url + path, json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(await answer.text())


def text_of(events, index=0):
    """The text of one choice of a stream."""
    found = ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                found += choice["text"] if "text" in choice else choice["delta"]["content"]
    return found


async def until(condition, what="never", patience=PATIENCE):
    """Wait for a condition, not for a time."""
    end = asyncio.get_running_loop().time() + patience
    while not condition():
        assert asyncio.get_running_loop().time() < end, what
        await asyncio.sleep(0.005)


@contextmanager
def in_thread(**words):
    """Emulators in another thread, for clients that block."""
    ready, found = threading.Event(), {}

    async def serve():
        found["loop"], found["stop"] = asyncio.get_running_loop(), asyncio.Event()
        async with emulated(**words) as urls:
            found["urls"] = urls
            ready.set()
            await found["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield found["urls"]
    finally:
        if "loop" in found:
            found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join(PATIENCE)


def session():
    """A client without a limit on connections."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
