"""The instances and run lengths of the studies, and many runs of them with intervals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.methods.fluid.flows import SEPARATE, EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import plan_fluid
from headgate.stats.figures import PartOrder, half_width
from headgate_papers.network.counts import HANDOFF, MIXED, PREFILLING, SOLO, WAITING
from headgate_papers.network.run import run_network

RESULTS = Path(__file__).parent / "results"
CODE, SUMMARY, EXTRACT = (300.0, 1000.0), (3000.0, 400.0), (3000.0, 50.0)
WARM = 120.0
SIZES = (5, 20, 50, 200, 500)
SECONDS = {5: 4000.0, 20: 2000.0, 50: 600.0, 200: 300.0, 500: 200.0}  # after warming up
SEEDS = {5: 5, 20: 5, 50: 3, 200: 3, 500: 3}
BATCHES = 5  # parts of each run, for intervals
FEW = 2  # runs; their parts tell more than they do


def instance(
    sizes: tuple[tuple[float, float], ...],
    rates: tuple[float, ...],
    slots: int = 16,
    charging: str = "bundled",
) -> Instance:
    flows = tuple(
        Flow(f"class{place}", prompt, output, rate, 0.1)
        for place, ((prompt, output), rate) in enumerate(zip(sizes, rates, strict=True))
    )
    return Instance(flows, EnginePace(slots, 256, 0.0174, 6.2e-5, 45.45), TokenPrices(0.1, 0.2), charging)


INSTANCES = {
    "A1": instance((CODE, SUMMARY), (0.5, 0.5)),
    "B1": instance((CODE, SUMMARY), (0.4, 0.4)),
    "C1": instance((CODE, SUMMARY), (1.0, 1.0)),
    "E1": instance((CODE, SUMMARY), (0.5, 0.5), slots=8),
    "N1": instance((CODE, EXTRACT), (0.5, 5.0)),
    "A2": instance((CODE, SUMMARY), (0.5, 0.5), charging=SEPARATE),
    "C2": instance((CODE, SUMMARY), (1.0, 1.0), charging=SEPARATE),
    "E3": instance((CODE, SUMMARY), (1.2, 1.2), slots=8, charging=SEPARATE),
}


class Case(NamedTuple):
    """Runs of one router on one instance."""

    instance: str
    router: str
    engines: int
    seeds: int
    seconds: float
    levels: Levels = Levels()
    settings: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    law: str = "exponential"
    warm: float = WARM


def run(case: Case, seed: int) -> dict[str, Any]:
    """One of them, as plain numbers."""
    plan = plan_fluid(INSTANCES[case.instance], case.levels)
    marks = [case.warm + case.seconds * part / BATCHES for part in range(BATCHES)]
    until, settings = case.warm + case.seconds, dict(case.settings)
    parts = run_network(plan, case.router, case.engines, seed, marks, until, case.law, settings)
    window = replace(parts[-1], first=parts[0].first)
    row: dict[str, Any] = {
        "instance": case.instance,
        "router": case.label or case.router,
        "engines": case.engines,
        "seed": seed,
        "best": plan.revenue,
        "bundled": window.revenue(),
        "separate": window.revenue(SEPARATE),
        "bundled_parts": [round(part.revenue(), 4) for part in parts],
        "separate_parts": [round(part.revenue(SEPARATE), 4) for part in parts],
    }
    names = {"x": PREFILLING, "mixed": MIXED, "solo": SOLO, "waiting": WAITING, "handoff": HANDOFF}
    return row | {name: window.mean(level).round(6).tolist() for name, level in names.items()}


def carry_out(name: str, cases: list[Case], quick: bool) -> list[dict[str, Any]]:
    """All runs; those already in the results file are not run again."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() and not quick else []
    done = {(row["instance"], row["router"], row["engines"], row["seed"]) for row in rows}
    for case in cases:
        if quick:
            case = case._replace(seeds=2, seconds=case.seconds / 50, warm=20.0)
        for seed in range(case.seeds):
            if (case.instance, case.label or case.router, case.engines, seed) in done:
                continue
            row = run(case, seed)
            rows.append(row)
            print(
                f"{case.instance} {row['router']} n={case.engines} seed {seed}", file=sys.stderr, flush=True
            )
            if not quick:
                RESULTS.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def interval(rows: list[dict[str, Any]], charge: str = "bundled") -> tuple[float, float]:
    """Mean revenue over the plan's, and half of its 95 % interval: over runs, or parts of them if few."""
    runs = [row[charge] / row["best"] for row in rows]
    if len(runs) > FEW:
        half = half_width(np.array(runs))
    else:
        parts = [value / row["best"] for row in rows for value in row[f"{charge}_parts"]]
        half = half_width(np.array(parts), PartOrder.BATCHES)
    return float(np.mean(runs)), float("nan") if half is None else half
