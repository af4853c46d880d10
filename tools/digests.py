"""The tables of random worlds in short: run by both builds of headgate, whose lines must be equal."""

from __future__ import annotations

import sys
from hashlib import sha256
from typing import Any

from headgate.core.build import compiled
from headgate.core.fleet import RoutePolicy
from headgate.core.policy import BatchPolicy
from headgate.cost.laws.terms import HostTerms
from headgate.cost.laws.work import WorkCost, WorkTerms
from headgate.methods.balance.balance import LeastLoaded, RoundRobin
from headgate.methods.make import make_policy
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.names import BATCH
from headgate.methods.split.split import Split
from headgate.record.recorder import FleetRecorder, Recorder
from headgate.sim.engine.simulator import Simulator
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.sim.fleet.kv_handover import Transfer
from headgate_leaderboard.laws import COST, World, world

HOSTED = WorkCost(
    WorkTerms(constant=0.4, per_token=0.01, per_decode=0.02, per_context=0.001, switch=0.1),
    HostTerms(constant=0.2, per_request=0.05, prompts=0.5, ungraphed=2.0, graph=24),
)


class Own(Mixed):
    """A user's subclass, never compiled."""

    name = "own"


def made(name: str, slots: int, budget: int) -> BatchPolicy:
    """A policy by its name."""
    kind: Any = BATCH[name]
    policy: BatchPolicy = kind(slots=slots, budget=budget, cost=COST)
    return policy


def policies(at: World) -> list[BatchPolicy]:
    """Compiled ones, one on top of a compiled one, and interpreted ones."""
    slots, budget = at.engine.running, at.engine.batch_tokens
    return [
        make_policy("mixed", {"budget": str(budget)}, at.engine)[0],
        Own(slots, budget),
        make_policy("eb", {"refill": str(max(1, slots // 2)), "max_gap": "3.0"}, at.engine)[0],
        made("slai", slots, budget),
        made("eb+", slots, budget),
        made("keep", slots, budget),
        made("qoserve", slots, budget),
    ]


def digest(at: World, policy: BatchPolicy, asynchronous: bool) -> str:
    """A fingerprint of all tables of one run, to the last bit."""
    recorder = Recorder([kind.name for kind in at.workload.kinds])
    engine = at.engine._replace(cost=HOSTED) if asynchronous and at.number % 2 else at.engine
    Simulator(engine, policy, at.workload, (recorder,), asynchronous=asynchronous).run()
    return fingerprint(recorder)


def fleet_digest(at: World, router: RoutePolicy) -> str:
    """The same of three engines behind a router."""
    engine, transfer = at.engine, Transfer(0.1, 0.001)

    def policy(role: str) -> BatchPolicy:
        return Mixed(engine.running, engine.batch_tokens)

    fleet = FleetSimulator(engine, 3, policy, router, at.workload, transfer=transfer)
    fleet.run()
    return fingerprint(fleet.recorder)


def fingerprint(recorder: Recorder | FleetRecorder) -> str:
    """Of all tables."""
    found = sha256()
    for table, columns in recorder.tables().items():
        for name, column in columns.items():
            found.update(f"{table}.{name}".encode())
            found.update(column.tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """A line for the build, and one for each run."""
    print("compiled" if compiled() else "pure Python")
    for number in range(int(sys.argv[1])):
        at = world(number)
        for asynchronous in (False, True):
            for policy in policies(at):
                print(number, type(policy).__name__, asynchronous, digest(at, policy, asynchronous))
        for router in (LeastLoaded(3), Split(3, 1), RoundRobin(3)):
            print(number, type(router).__name__, fleet_digest(at, router))


if __name__ == "__main__":
    main()
