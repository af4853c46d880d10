"""Fleets at token level: what a request costs by the number of engines, and the largest run."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from benchmarks import worlds
from headgate.core.fleet import RoutePolicy
from headgate.methods.balance.balance import LeastLoaded, RoundRobin
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.split.split import Split
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.workload import Workload

SIZES = (1, 16, 256)
PER_SIZE, PER_ENGINE, ALL = 8_000, 125, 64_000
RATE = 6.45  # conversations per second and engine


class Asked(RoundRobin):
    """Round robin that cannot tell its choices beforehand, so that all engines run at once."""

    ahead = RoutePolicy.ahead


def seconds(engines: int, requests: int, router: RoutePolicy) -> float:
    """CPU seconds of a whole run with its tables."""
    workload = worlds.conversations(requests, RATE * engines)
    began = time.process_time()
    fleet = made(workload, engines, router)
    fleet.run()
    fleet.recorder.tables()
    return time.process_time() - began


def orders(engines: int, requests: int) -> tuple[float, float]:
    """CPU seconds of the same steps, without making engines and tables: all engines, and one after another.

    Behind round robin a fleet does the work of so many single engines; only the order differs. The router is
    asked in both, as one whose choice depends on engines is.
    """
    workload = worlds.conversations(requests, RATE * engines)
    parts = [workload.subset(slice(place, None, engines)) for place in range(engines)]
    return spent([made(workload, engines, Asked(engines))]), spent(
        [made(part, 1, Asked(1)) for part in parts]
    )


def made(workload: Workload, engines: int, router: RoutePolicy) -> FleetSimulator:
    """A fleet that has not run yet."""
    return FleetSimulator(
        worlds.engine(),
        engines,
        lambda role: Mixed(512, 16384),
        router,
        workload,
        transfer=Transfer(0.002, 3e-6),
    )


def spent(fleets: list[FleetSimulator]) -> float:
    """CPU seconds of their runs, one after another."""
    began = time.process_time()
    for fleet in fleets:
        fleet.run()
    return time.process_time() - began


def many_engines() -> dict[str, float]:
    """(h) Conversations at 6.45/s and engine: microseconds per request, and 64,000 on 256 engines."""
    found: dict[str, float] = {}
    costs = []
    for engines in SIZES:
        best = min(seconds(engines, PER_SIZE, RoundRobin(engines)) for _ in range(3))
        costs.append(best / PER_SIZE * 1e6)
        found[f"{engines} engines: microseconds per request"] = costs[-1]
    found["largest over smallest"] = max(costs) / min(costs)
    together, apart = orders(SIZES[-1], PER_ENGINE * SIZES[-1])
    found[f"{SIZES[-1]} engines at once over one after another"] = together / apart
    command = [sys.executable, "-m", "benchmarks.many_engines"]
    for router in ("round-robin", "least-loaded", "split"):
        answer = subprocess.run([*command, router], check=True, capture_output=True, text=True)
        for key, value in json.loads(answer.stdout).items():
            found[f"256, {router}: {key}"] = value
    return found


def largest(name: str, engines: int = 256, requests: int = ALL) -> dict[str, float]:
    """What a process of its own does: `python -m benchmarks.many_engines ROUTER [ENGINES REQUESTS]`."""
    routers: dict[str, RoutePolicy] = {
        "round-robin": RoundRobin(engines),
        "least-loaded": LeastLoaded(engines),
        "split": Split(engines, engines // 2),
    }
    took = seconds(engines, requests, routers[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"CPU seconds": took, "GiB at most": peak}


if __name__ == "__main__":
    print(json.dumps(largest(sys.argv[1], *map(int, sys.argv[2:]))))
