"""The same requests through the stochastic network and through engines at token level: what differs."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import numpy as np

from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.fleet import make_router
from headgate.methods.fluid.flows import Instance
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.sim.fleet.fleet import FleetSimulator
from headgate.stats.figures import half_width
from headgate.workloads.workload import Kind, Workload
from headgate_papers.network.run import run_network
from headgate_papers.network.source import Block, Poisson
from studies.fleets.worlds import INSTANCES, RESULTS

ROUTERS = ("gate-and-route", "gate-and-route+", "token-bucket", "density-first", "fi-wsp")
ENGINES, SECONDS, WARM, SEEDS = 50, 400.0, 150.0, 3
LAWS = ("exponential", "fixed", "lognormal")
ENDLESS_KV = 1 << 24


class Run(NamedTuple):
    """What is run."""

    instance: str
    router: str
    law: str
    seed: int
    engines: int = ENGINES
    seconds: float = SECONDS
    warm: float = WARM


def engine(instance: Instance) -> Engine:
    """An engine with the paper's two step times: one chunk beside at most B - 1 decodes, or decodes alone."""
    pace = instance.pace
    fixed, per_token = pace.mixed_fixed, pace.mixed_per_token
    cost = LinearCost(
        DecodeTerms(1 / pace.solo_speed, 0.0),
        PrefillTerms(fixed, per_token),
        MixedTerms(constant=fixed, per_prefill=per_token),
    )
    budget = pace.chunk + pace.slots - 1
    return Engine(cost, ENDLESS_KV, ENDLESS_KV, budget, pace.slots, 16)


def requests(instance: Instance, run: Run) -> Workload:
    """The network's own requests, as tokens: prefill time over the time of a token, outputs rounded up."""
    source, until = Poisson(instance, run.engines, run.seed, run.law), run.warm + run.seconds
    blocks: list[Block] = []
    while not blocks or blocks[-1].time[-1] < until:
        blocks.append(source.next_block())
    names = ("time", "kind", "prompt", "output", "patience")
    columns = [np.concatenate([getattr(block, name) for block in blocks]) for name in names]
    time, kind, prompt, output, patience = (column[columns[0] < until] for column in columns)
    per_token = instance.pace.mixed_step / instance.pace.chunk
    return Workload.of(
        np.maximum(1, np.rint(prompt / per_token)).astype(np.int64),
        np.maximum(1, np.rint(output)).astype(np.int64),
        arrival=time,
        kind=kind.astype(np.int64),
        patience=patience,
        kinds=tuple(Kind(flow.name) for flow in instance.flows),
    )


def token_run(run: Run) -> tuple[float, float]:
    """Value of the requests that end after warming up, per second and engine, over the plan's.

    And how many prompts of the first class begin per second and engine.
    """
    instance = INSTANCES[run.instance]
    plan, one = plan_fluid(instance), engine(instance)
    router = make_router(run.router, plan, run.engines, run.seed)
    fleet = FleetSimulator(
        one,
        run.engines,
        lambda role: Mixed(one.running, one.batch_tokens),
        router,
        requests(instance, run),
    )
    fleet.run()
    table = fleet.recorder.tables()["requests"]
    inside = (table["finished"] >= run.warm) & (table["finished"] < run.warm + run.seconds)
    done = inside & (table["how"] <= 1)
    worth = np.array(instance.values())[table["kind"][done].astype(np.int64)]
    begun = (table["admitted"] >= run.warm) & (table["admitted"] < run.warm + run.seconds)
    prompts = np.count_nonzero(begun & (table["kind"] == 0))
    engine_seconds = run.engines * run.seconds
    return float(worth.sum()) / engine_seconds / plan.revenue, prompts / engine_seconds


def network_revenue(run: Run) -> float:
    """The same in the network."""
    plan = plan_fluid(INSTANCES[run.instance])
    until = run.warm + run.seconds
    (window,) = run_network(plan, run.router, run.engines, run.seed, [run.warm], until, run.law)
    return window.revenue() / plan.revenue


def main(quick: bool) -> None:
    cases = [(name, router, "exponential") for name in ("A1", "C1") for router in ROUTERS]
    cases += [(name, "gate-and-route+", law) for name in ("A1", "C1") for law in LAWS[1:]]
    path = RESULTS / "tokens.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and not quick else []
    done = {(row["instance"], row["router"], row["law"], row["seed"]) for row in rows}
    for name, router, law in cases:
        for seed in range(SEEDS):
            if (name, router, law, seed) in done:
                continue
            run = Run(name, router, law, seed)
            if quick:
                run = run._replace(engines=10, seconds=40.0, warm=20.0)
            row: dict[str, Any] = run._asdict()
            row |= {"network": network_revenue(run), "tokens": token_run(run)[0]}
            rows.append(row)
            print(f"{name} {router} {law} seed {seed}", file=sys.stderr, flush=True)
            if not quick:
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    table(rows, cases)


def table(rows: list[dict[str, Any]], cases: list[tuple[str, str, str]]) -> None:
    """Revenue over the optimum both ways, and the paired difference."""
    print(f"\nRevenue / optimum, {ENGINES} engines, {SECONDS:.0f} s, {SEEDS} seeds\n")
    print("| instance | router | lengths | network | token level | difference |\n|---|---|---|---|---|---|")
    for name, router, law in cases:
        mine = [row for row in rows if (row["instance"], row["router"], row["law"]) == (name, router, law)]
        network, tokens = (np.array([row[key] for row in mine]) for key in ("network", "tokens"))
        cells = " | ".join(_cell(values) for values in (network, tokens, tokens - network))
        print(f"| {name} | `{router}` | {law} | {cells} |")


def _cell(values: Any) -> str:
    half = half_width(values)
    return f"{values.mean():.3f}" + (f" ± {half:.3f}" if half is not None else "")
