"""What HeadgateRouter costs in Ray Serve, beside Ray's power of two choices, in one run on one machine.

    python -m benchmarks.ray_router [--rounds 5] [--requests 200] [--json FILE]

Three deployments of the same replicas, which answer at once: Ray's default router, HeadgateRouter with a gate
in every router, and with the gate actor that all routers share. Each round asks all three in turn: one
request after another for the time of one, then many at once for the rate. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray import serve

from headgate.live.route.ray import router_config

REPLICAS = 2
AT_ONCE = 64
KINDS: dict[str, dict[str, Any] | None] = {
    "power of two": None,
    "headgate, local gate": {"gate": "local"},
    "headgate, gate actor": {"gate": "shared"},
}
GOALS = {"headgate, local gate": 0.5, "headgate, gate actor": 3.0}  # ms added to the median
LEAST_RATE = 0.8  # of the default's


class Echo:
    """A replica that answers at once."""

    async def __call__(self, number: int) -> int:
        """The same number."""
        return number


def deploy() -> dict[str, Any]:
    """One application for each router, all started together."""
    targets = []
    for number, kwargs in enumerate(KINDS.values()):
        options = {} if kwargs is None else {"request_router_config": router_config(**kwargs)}
        deployment = serve.deployment(
            num_replicas=REPLICAS,
            max_ongoing_requests=1000,
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
            **options,
        )(Echo)
        targets.append(serve.RunTarget(deployment.bind(), name=f"app{number}", route_prefix=None))
    return dict(zip(KINDS, serve.run_many(targets), strict=True))


async def one_by_one(handle: Any, requests: int) -> list[float]:
    """Milliseconds of each request."""
    found = []
    for number in range(requests):
        start = time.perf_counter()
        await handle.remote(number)
        found.append(1000 * (time.perf_counter() - start))
    return found


async def many(handle: Any, requests: int) -> float:
    """Requests/s with AT_ONCE of them under way."""
    left = iter(range(requests))

    async def client() -> None:
        for number in left:
            await handle.remote(number)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return requests / (time.perf_counter() - start)


async def measure(handles: dict[str, Any], rounds: int, requests: int) -> dict[str, dict[str, float]]:
    """Median time and rate of each router; the order turns from round to round."""
    times: dict[str, list[list[float]]] = {name: [] for name in handles}
    rates: dict[str, list[float]] = {name: [] for name in handles}
    names = [*handles]
    for name in names:
        await many(handles[name], requests)
        await one_by_one(handles[name], 20)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(await one_by_one(handles[name], requests))
            rates[name].append(await many(handles[name], 4 * requests))
    return {
        name: {
            "p50_ms": median(median(each) for each in times[name]),
            "rate": median(rates[name]),
        }
        for name in names
    }


def told(found: dict[str, dict[str, float]]) -> list[str]:
    """A line for each router, with what it adds and whether it keeps to the goals."""
    base = found["power of two"]
    lines = []
    for name, own in found.items():
        added, share = own["p50_ms"] - base["p50_ms"], own["rate"] / base["rate"]
        line = f"{name:22} p50 {own['p50_ms']:6.2f} ms  {own['rate']:7.0f} requests/s"
        if name in GOALS:
            kept = added <= GOALS[name] and share >= LEAST_RATE
            line += f"  added {added:+.2f} ms, rate x {share:.2f}: {'kept' if kept else 'MISSED'}"
        lines.append(line)
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    )
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        found = asyncio.run(measure(deploy(), options.rounds, options.requests))
    finally:
        serve.shutdown()
        ray.shutdown()
    print("\n".join(told(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
