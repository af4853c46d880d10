"""The laws every router must keep, tried on one router before small random fleets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.experiment.fleet import FleetSetup
from headgate.experiment.laws import BrokenLawError, Trial, try_worlds
from headgate.experiment.worlds import World, world
from headgate.kv.transfer import Transfer
from headgate.methods.mixed.mixed import Mixed
from headgate.record.tables import Run
from headgate.workloads.workload import Kind, Workload

MOST_ENGINES, MOST_KINDS = 4, 3
TRANSFER = Transfer(0.4, 0.01)


class FleetWorld(NamedTuple):
    """Engines under mixed batching, and the requests that come to them; the same for the same number."""

    setup: FleetSetup
    workload: Workload
    alone: World

    def __str__(self) -> str:
        return f"{self.alone}, {self.setup.engines} engines, {len(self.workload.kinds)} kinds"

    def router(self, name: str, settings: dict[str, Any]) -> RoutePolicy:
        """A fresh router with what it wants to know: a plan, the engines, chance."""
        return self.setup.router(name, settings, self.workload, self.alone.number)[0]

    def serve(self, router: RoutePolicy) -> Run:
        """The whole run; one that ends early breaks a law."""
        engine = self.setup.engine

        def policy(role: str) -> BatchPolicy:
            return Mixed(engine.running, engine.batch_tokens)

        run = self.setup.run(policy, router, self.workload)
        outcome = str(run.meta["outcome"])
        if outcome == "interrupted":
            raise KeyboardInterrupt
        if outcome != "finished":
            raise BrokenLawError(outcome.removeprefix("failed: "))
        return run


def fleet_world(number: int) -> FleetWorld:
    """The fleet of that number."""
    alone = world(number)
    draw = np.random.default_rng((number, 1))
    engine = alone.engine
    running = max(2, engine.running)  # a prompt beside a decode
    engine = engine._replace(running=running, batch_tokens=max(running, engine.batch_tokens))
    kinds = tuple(Kind(f"kind{place}") for place in range(int(draw.integers(1, MOST_KINDS + 1))))
    requests = len(alone.workload)
    workload = replace(alone.workload, kinds=kinds, kind=draw.integers(0, len(kinds), requests))
    setup = FleetSetup(engine, int(draw.integers(1, MOST_ENGINES + 1)), TRANSFER)
    return FleetWorld(setup, workload, alone)


Make = Callable[[], RoutePolicy]  # a fresh router for the fleet in hand


def ends(make: Make, at: FleetWorld) -> None:
    """Every move makes sense; every request is served or leaves."""
    run = at.serve(make())
    left = int((run.requests["how"] < 0).sum())
    if left:
        raise BrokenLawError(f"{left} of {len(at.workload)} requests neither served nor gone")


def same_again(make: Make, at: FleetWorld) -> None:
    """The same history gives the same moves."""
    first, second = at.serve(make()).requests, at.serve(make()).requests
    for column, values in first.items():
        if not np.array_equal(values, second[column], equal_nan=values.dtype.kind == "f"):
            raise BrokenLawError(f"two runs of the same requests differ in {column}")


LAWS: dict[str, Callable[[Make, FleetWorld], None]] = {"ends": ends, "same again": same_again}


def try_router_laws(
    name: str,
    settings: dict[str, Any],
    worlds: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Trial:
    """Every law in fleets `seed`, `seed + 1`, ..."""

    def make(at: FleetWorld) -> RoutePolicy:
        return at.router(name, settings)

    return try_worlds(Trial(name, worlds, seed), LAWS, fleet_world, make, progress)
