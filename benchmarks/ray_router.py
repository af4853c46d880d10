"""What HeadgateRouter costs in Ray Serve, beside Ray's power of two choices, in one run on one machine.

    python -m benchmarks.ray_router [--rounds 5] [--requests 200] [--json FILE]

Three deployments of the same replicas, which answer at once: Ray's default router, HeadgateRouter with a gate
in every router, and with the gate actor that all routers share. Times: the three are asked in turn, one
request after another, and what a router adds is the median over its differences to the default's request of
the same turn. Rates: 64 requests at once, the three in turn, and the median over the rounds of their ratios.
So other work on the machine meets all three alike. Prints a table for docs/kubernetes.md.
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

from headgate_ray.router import router_config

REPLICAS = 2
AT_ONCE = 64
BASE, LOCAL, SHARED = "Ray's power of two choices", "headgate, `gate: local`", "headgate, gate actor"
KINDS: dict[str, dict[str, Any] | None] = {BASE: None, LOCAL: {"gate": "local"}, SHARED: {"gate": "shared"}}
GOALS = {LOCAL: 0.5, SHARED: 3.0}  # ms added to the median
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


async def in_turn(handles: dict[str, Any], requests: int) -> dict[str, list[float]]:
    """Milliseconds of each request, the routers asked one after another."""
    found: dict[str, list[float]] = {name: [] for name in handles}
    for number in range(requests):
        for name, handle in handles.items():
            start = time.perf_counter()
            await handle.remote(number)
            found[name].append(1000 * (time.perf_counter() - start))
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
    """Of each router: median time, rate, and both beside the default's; the order turns with the rounds."""
    times: dict[str, list[float]] = {name: [] for name in handles}
    rates: dict[str, list[float]] = {name: [] for name in handles}
    for handle in handles.values():
        await many(handle, requests)
    await in_turn(handles, 20)
    names = [*handles]
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        found = await in_turn({name: handles[name] for name in order}, requests)
        for name in order:
            times[name] += found[name]
            rates[name].append(await many(handles[name], 4 * requests))
    return {name: beside(times[name], rates[name], times[BASE], rates[BASE]) for name in names}


def beside(
    times: list[float], rates: list[float], base_times: list[float], base_rates: list[float]
) -> dict[str, float]:
    """Figures of one router, beside those of the default."""
    added = median(own - base for own, base in zip(times, base_times, strict=True))
    share = median(own / base for own, base in zip(rates, base_rates, strict=True))
    return {"p50_ms": median(times), "rate": median(rates), "added_ms": added, "share": share}


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """A row for each router, with what it adds and whether it keeps to the goals."""
    lines = [
        "| router | median of one request | requests/s | added, rate against the default | goal |",
        "|---|---|---|---|---|",
    ]
    for name, own in found.items():
        beside, goal = "", ""
        if name in GOALS:
            kept = own["added_ms"] <= GOALS[name] and own["share"] >= LEAST_RATE
            beside = f"{own['added_ms']:+.2f} ms, x {own['share']:.2f}"
            goal = f"{GOALS[name]:g} ms, x {LEAST_RATE}: {'kept' if kept else 'MISSED'}"
        lines.append(f"| {name} | {own['p50_ms']:.2f} ms | {own['rate']:.0f} | {beside} | {goal} |")
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    os.environ.update(RAY_worker_niceness="0")  # else replicas wait for whatever else the machine does
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
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
