"""Seconds of CPU: an event of the stochastic network by the size of the fleet, and a fluid plan."""

from __future__ import annotations

import time

import numpy as np

from headgate.experiment.fleet import make_router
from headgate.methods.fluid.flows import Flow, Instance
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.network.network import Network
from headgate_papers.network.source import Poisson
from studies.fleets.worlds import INSTANCES

SIZES = (5, 50, 500, 2000)
REQUESTS = 60_000
CLASSES = (2, 8, 50)
PLANS = 300


def main(quick: bool) -> None:
    print("\n| engines | events/request | µs/event | µs/request | 500 engines for 10,000 s would take |")
    print("|---|---|---|---|---|")
    for engines in SIZES:
        _network(engines, REQUESTS // (20 if quick else 1))
    print("\n| classes | plan, ms |")
    print("|---|---|")
    for classes in CLASSES:
        _plans(classes, PLANS // (20 if quick else 1))


def _network(engines: int, requests: int) -> None:
    start = INSTANCES["A1"]
    plan = plan_fluid(start)
    router = make_router("gate-and-route+", plan, engines)
    network = Network(start, engines, router, Poisson(start, engines, 0))
    warm = 60.0
    network.run(warm)
    before, began = network.events, time.process_time()
    network.run(warm + requests / engines)  # one request per second and engine
    spent, events = time.process_time() - began, network.events - before
    per_request = spent / requests
    whole = per_request * 500 * 10_000 / 60
    print(
        f"| {engines} | {events / requests:.2f} | {1e6 * spent / events:.1f} | {1e6 * per_request:.1f} | "
        f"{whole:.1f} min |"
    )


def _plans(classes: int, count: int) -> None:
    """Rates that wander by a few percent, as an online planner sees them."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(100, 3000, (classes, 2)).tolist()
    base = INSTANCES["A1"]
    rates = rng.uniform(0.2, 1.0, classes) / classes * 2

    def drawn() -> Instance:
        wander = (rates * rng.uniform(0.9, 1.1, classes)).tolist()
        rows = enumerate(zip(sizes, wander, strict=True))
        flows = tuple(Flow(f"c{n}", p, d, rate, 0.1) for n, ((p, d), rate) in rows)
        return Instance(flows, base.pace, base.prices)

    instances = [drawn() for _ in range(count)]
    began = time.process_time()
    for each in instances:
        plan_fluid(each)
    print(f"| {classes} | {1000 * (time.process_time() - began) / count:.2f} |")
