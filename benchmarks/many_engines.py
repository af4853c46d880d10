"""Fleets at token level: what a request costs by the number of engines, and the largest run."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from benchmarks import worlds
from headgate.core.fleet import RoutePolicy
from headgate.drivers.fleet import FleetSimulator
from headgate.drivers.handover import Transfer
from headgate.policies import Mixed
from headgate.policies.balance import LeastLoaded, RoundRobin
from headgate.policies.split import Split
from headgate.workloads.workload import Workload

SIZES = (1, 16, 256)
PER_SIZE, ALL = 8_000, 64_000
RATE = 6.45  # conversations per second and engine


def seconds(engines: int, requests: int, router: RoutePolicy) -> float:
    """CPU seconds of a whole run with its tables."""
    return spent(worlds.conversations(requests, RATE * engines), engines, router)


def in_turn(engines: int, requests: int) -> float:
    """The same work as behind round robin, each engine alone from its first request to its last."""
    workload = worlds.conversations(requests, RATE * engines)
    parts = [workload.subset(slice(place, None, engines)) for place in range(engines)]
    return sum(spent(part, 1, RoundRobin(1)) for part in parts)


def spent(workload: Workload, engines: int, router: RoutePolicy) -> float:
    """CPU seconds of these requests."""
    began = time.process_time()
    fleet = FleetSimulator(
        worlds.engine(),
        engines,
        lambda role: Mixed(512, 16384),
        router,
        workload,
        transfer=Transfer(0.002, 3e-6),
    )
    fleet.run()
    fleet.recorder.tables()
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
    alone = min(in_turn(SIZES[-1], PER_SIZE) for _ in range(3))
    found[f"{SIZES[-1]} engines one after the other: microseconds per request"] = alone / PER_SIZE * 1e6
    command = [sys.executable, "-m", "benchmarks.many_engines"]
    for router in ("round-robin", "least-loaded", "split"):
        answer = subprocess.run([*command, router], check=True, capture_output=True, text=True)
        for key, value in json.loads(answer.stdout).items():
            found[f"256, {router}: {key}"] = value
    return found


def largest(name: str) -> dict[str, float]:
    """What a process of its own does."""
    routers: dict[str, RoutePolicy] = {
        "round-robin": RoundRobin(256),
        "least-loaded": LeastLoaded(256),
        "split": Split(256, 128),
    }
    took = seconds(256, ALL, routers[name])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"CPU seconds": took, "GiB at most": peak}


if __name__ == "__main__":
    print(json.dumps(largest(sys.argv[1])))
