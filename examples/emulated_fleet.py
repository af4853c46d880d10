"""Two emulated engines, prefill on one and decode on the other; every token is checked.

    python examples/emulated_fleet.py

The emulators listen on loopback ports for the time of the block. A router under test would stand between.
"""

import asyncio

import aiohttp

from headgate.live.emulate import answer, emulated

PROMPT = "Which engine should do this prompt, and which one should decode it?"
ASK = {"do_remote_decode": True}


async def post(client, url, **body):
    """One completion of the prompt."""
    async with client.post(f"{url}/v1/completions", json={"prompt": PROMPT, **body}) as told:
        return await told.json()


async def main():
    """Prefill on engine 0, decode on engine 1, twice with the same parameters."""
    async with (
        emulated(engines=2, card="cal-h200-qwen3-8b", policy="eb+", speed=20) as urls,
        aiohttp.ClientSession() as client,
    ):
        first = await post(client, urls[0], max_tokens=1, kv_transfer_params=ASK)
        params = first["kv_transfer_params"]
        right = answer(PROMPT, 12)
        for label in ("first read", "second read"):
            told = await post(client, urls[1], max_tokens=12, kv_transfer_params=params)
            text = told["choices"][0]["text"]
            print(f"{label}: {'right' if text == right else 'WRONG'}:{text}")
        print(f"prompt tokens computed by engine 1: {urls.engines[1].tally.computed.sum:g}")


asyncio.run(main())
