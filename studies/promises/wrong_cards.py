"""Capacity where the card is wrong or steps jitter: `python -m studies.promises.wrong_cards --help`.

The engine is the calibrated H200. Policies are told a card whose times are all so many times the engine's, or
the right card of an engine whose steps take at random more or less. Each search appends a line to
results/wrong-cards.jsonl; lines that are there are not made again. `--table` prints the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np

from headgate.cost.laws.work import WorkCost
from headgate.cost.model import Shape, Terms
from studies.promises.__main__ import RESULTS, capacity
from studies.promises.worlds import World, world

FILE = RESULTS / "wrong-cards.jsonl"
RIGHT = "card 1"
# A card so many times as slow as the engine; or the spread of steps, and the share that takes 30 % more.
CASES: dict[str, float | tuple[float, float]] = {
    RIGHT: 1.0,
    "card 0.8": 0.8,
    "card 0.9": 0.9,
    "card 1.1": 1.1,
    "card 1.25": 1.25,
    "noise 5 %": (0.05, 0.0),
    "noise 10 %": (0.1, 0.0),
    "noise 3 %, stalls": (0.03, 0.01),
}
Line = dict[str, Any]
Some = TypeVar("Some", bound=Terms)


class Noisy(WorkCost):
    """Steps take at random a little more or less (lognormal), and now and then 30 % more."""

    def __init__(self, plain: WorkCost, spread: float, stalls: float, rng: np.random.Generator) -> None:
        super().__init__(plain.terms, plain.host)
        self._spread, self._stalls, self._rng = spread, stalls, rng

    def unhosted(self) -> WorkCost:
        return Noisy(super().unhosted(), self._spread, self._stalls, self._rng)

    def _factor(self) -> float:
        return float(self._rng.lognormal(0.0, self._spread) + 0.3 * (self._rng.random() < self._stalls))

    def seconds(self, shape: Shape) -> float:
        return super().seconds(shape) * self._factor()

    def decode_line(self, decodes: int) -> tuple[float, float]:
        """Asked once for the decode steps that are jumped over together: one, while anybody waits."""
        fixed, slope = super().decode_line(decodes)
        factor = self._factor()
        return fixed * factor, slope * factor


def case(where: World, name: str, seed: int) -> World:
    """The same workload in such a case."""
    truth, how = where.engine.cost, CASES[name]
    assert isinstance(truth, WorkCost) and truth.host is not None
    if isinstance(how, tuple):
        noisy = Noisy(truth, *how, np.random.default_rng(seed))
        return where._replace(engine=where.engine._replace(cost=noisy))
    told = WorkCost(_times(truth.terms, how), _times(truth.host, how))
    return where._replace(known=where.engine._replace(cost=told))


def _times(terms: Some, factor: float) -> Some:
    floats = {each.name: getattr(terms, each.name) for each in fields(terms)}  # type: ignore[arg-type]
    times = {name: factor * value for name, value in floats.items() if isinstance(value, float)}
    return replace(terms, **times)  # type: ignore[type-var]


def options(argv: list[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m studies.promises.wrong_cards", description=__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", default=["azure-conv", "sharegpt-8k"])
    add("--policies", nargs="+", default=["keep"])
    add("--cases", nargs="+", default=list(CASES), choices=CASES)
    add("--seeds", type=int, default=2)
    add("--precision", type=float, default=0.02)
    add("--table", action="store_true", help="print the table of the results that are there")
    asked = parser.parse_args(argv)
    asked.synchronous = False
    return asked


def main(argv: list[str]) -> None:
    """Run what is missing, print the table."""
    asked = options(argv)
    lines = [json.loads(row) for row in FILE.read_text().splitlines()] if FILE.exists() else []
    if not asked.table:
        _fill(asked, lines)
    print(table(lines))


def _fill(asked: argparse.Namespace, lines: list[Line]) -> None:
    """Every search that has no line yet; it begins with what was found for the case or the seed before."""
    for seed, workload, policy in product(range(asked.seeds), asked.workloads, asked.policies):
        where = world(workload, "100ms")
        for name in asked.cases:
            mine = [line for line in lines if (line["workload"], line["policy"]) == (workload, policy)]
            if any((line["case"], line["seed"]) == (name, seed) for line in mine):
                continue
            near = [line["kept"] for line in mine if line["case"] == name or line["seed"] == seed]
            found = capacity(asked, case(where, name, seed), policy, seed, near[-1] if near else None)
            lines.append({"workload": workload, "policy": policy, "case": name, "seed": seed, **found})
            with FILE.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(workload, policy, name, seed, f"{found['kept']:.2f}/s", file=sys.stderr, flush=True)


def table(lines: list[Line]) -> str:
    """Requests per second with all levels kept, mean over seeds, and against the right card."""
    columns = list(dict.fromkeys((line["policy"], line["workload"]) for line in lines))
    rows = [["", *(f"`{policy}`, {workload}" for policy, workload in columns)], ["---"] * (1 + len(columns))]
    for name in CASES:
        cells = []
        for column in columns:
            mine = [line for line in lines if (line["policy"], line["workload"]) == column]
            kept = {line["seed"]: line["kept"] for line in mine if line["case"] == name}
            right = {line["seed"]: line["kept"] for line in mine if line["case"] == RIGHT}
            change = [100 * (kept[seed] / right[seed] - 1) for seed in kept.keys() & right.keys()]
            cells.append(f"{np.mean([*kept.values()]):.2f} ({np.mean(change):+.1f} %)" if change else "-")
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    main(sys.argv[1:])
