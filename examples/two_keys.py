"""Load for several keys at once, and how long each waited for its first token.

    python examples/two_keys.py http://localhost:9000 20 $ACME=20 $NIGHTLY=400

For 20 s the clients of each key send; each sends its next request when the last one ends.
"""

import asyncio
import sys
import time
from statistics import median

import aiohttp

BODY = {"prompt": "word " * 1000, "max_tokens": 250, "stream": True}


async def client(session, key, until):
    """The times to the first token of one client, and how many requests were refused."""
    waits, refused = [], 0
    while (sent := time.monotonic()) < until:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post("/v1/completions", json=BODY, headers=headers) as answer:
            if answer.status == 200:
                await answer.content.readany()
                waits.append(time.monotonic() - sent)
                await answer.read()
            else:
                refused += 1
                await asyncio.sleep(1)
    return waits, refused


async def main(url, seconds, *keys):
    """All clients of all keys at once."""
    unlimited, until = aiohttp.TCPConnector(limit=0), time.monotonic() + float(seconds)
    async with aiohttp.ClientSession(url, connector=unlimited) as session:
        asked = [(key, int(clients)) for key, _, clients in (each.rpartition("=") for each in keys)]
        every = [asyncio.gather(*(client(session, key, until) for _ in range(n))) for key, n in asked]
        for (_, clients), found in zip(asked, await asyncio.gather(*every), strict=True):
            waits, refused = sorted(wait for one, _ in found for wait in one), sum(no for _, no in found)
            told = f"{len(waits)} requests, {refused} refused; first token after"
            last = f"{median(waits):.2f} s, p95 {waits[len(waits) * 95 // 100]:.2f} s" if waits else "-"
            print(f"{clients} clients: {told} {last}")


asyncio.run(main(*sys.argv[1:]))
