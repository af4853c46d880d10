"""Predictions a second of `headgate predict` on one core: `python -m benchmarks.predictor`.

By the model alone, and over HTTP with bodies read and written, by rows of one call. The client runs in the
same process, so the second is a lower bound.
"""

from __future__ import annotations

import asyncio
import io
import json
import time

import aiohttp
import msgspec
import numpy as np

from headgate.live.emulate.options import PredictOptions
from headgate.live.predict import Predictor, Row, predicting
from headgate.settings_base import checked

SECONDS = 1.0  # of CPU time for each figure
SIZES = (1, 10, 100, 10_000)


def rows(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row(
            kv_cache_percentage=float(rng.random()),
            input_token_length=int(rng.integers(1, 8000)),
            num_request_waiting=int(rng.integers(0, 20)),
            num_request_running=int(rng.integers(20, 300)),
            num_tokens_generated=1,
            prefix_cache_score=float(rng.random()),
            prefill_tokens_in_flight=int(rng.integers(0, 40_000)),
        )
        for _ in range(count)
    ]


def by_model(policy: str, count: int) -> float:
    predictor, states = Predictor(checked(PredictOptions, {"policy": policy})), rows(count)
    done, begun = 0, time.process_time()
    while time.process_time() - begun < SECONDS:
        predictor.predict(states)
        done += count
    return done / (time.process_time() - begun)


async def by_http(policy: str, count: int) -> float:
    body = json.dumps({"requests": msgspec.to_builtins(rows(count))}).encode()
    headers = {"Content-Type": "application/json"}
    async with predicting(policy=policy) as url, aiohttp.ClientSession(url) as session:
        done, begun = 0, time.process_time()
        while time.process_time() - begun < SECONDS:
            call = session.post("/predict/bulk/strict", data=io.BytesIO(body), headers=headers)
            async with call as answer:
                assert answer.status == 200
                await answer.read()
            done += count
        return done / (time.process_time() - begun)


if __name__ == "__main__":
    print("predictions per CPU second (goal: 2,000)")
    for policy in ("mixed", "keep"):
        for count in SIZES:
            model, http = by_model(policy, count), asyncio.run(by_http(policy, count))
            print(f"  {policy:6} {count:6,} rows a call: model {model:9,.0f}, over HTTP {http:9,.0f}")
