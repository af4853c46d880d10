"""What policies learn, as text: their gauges while the traffic changes. `--update-golden` rewrites it.

Schedules alone hide a wrong smoothing, a dwell that is not kept or a threshold learned from the wrong sample.
One line for every change of a gauge, thinned to the first of each stretch of `EVERY` requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.core.plan import Plan
from headgate.core.policy import BatchPolicy, Observer
from headgate.cost.card import load_card
from headgate.experiment.library import simulate
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from headgate_papers.eb.policies import PaperExclusive, PaperPlus
from headgate_papers.wait.lookahead import LookAhead

FOLDER = Path(__file__).parent
COST = load_card("linear-h200-qwen3-8b").cost
SLOTS, BUDGET, REQUESTS = 128, 2048, 1500
EVERY = 40
PRINTED = {"eb-paper": PaperExclusive, "eb-paper+": PaperPlus, "look-ahead": LookAhead}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eb-online": ("eb-online", {"cost": COST, "warm": 20, "review": 25, "window": 100, "prior": 200.0}),
    "eb-paper": ("eb-paper", {"cost": COST, "warm": 20, "review": 25, "window": 100}),
    "eb+": ("eb+", {"cost": COST, "budget": BUDGET, "review": 20, "dwell": 1.0, "light": 8}),
    "eb-paper+": ("eb-paper+", {"cost": COST, "budget": BUDGET, "review": 20, "light": 8}),
    "slai": ("slai", {"cost": COST, "budget": BUDGET, "between_tokens": 0.1, "pace": "average"}),
    "wait": ("wait", {"cost": COST, "warm": 20, "review": 40, "window": 100}),
    "nested-wait": ("nested-wait", {"cost": COST, "warm": 20, "review": 40, "window": 100}),
    "look-ahead": ("look-ahead", {"budget": BUDGET}),
    "rad": ("rad", {"tile": 64, "chunk": 512}),
}


def traffic() -> Workload:
    """Short outputs, then outputs four times as long in a burst, then short ones again."""
    number = np.arange(REQUESTS)
    burst = (number >= 400) & (number < 800)
    output = (60 + number * 37 % 101) * np.where(burst, 4, 1)
    arrival = np.cumsum(np.where(burst, 0.02, 0.08))
    return Workload.of(200 + number * 113 % 397, output, arrival=arrival)


class Gauges(Observer):
    """Keeps what a policy's gauges said, whenever they change."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, dict[str, float]]] = []
        self._came = 0

    def arrived(self, request: Any, now: float) -> None:
        self._came += 1

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        if not self.seen or self.seen[-1][2] != gauges:
            self.seen.append((self._came, now, dict(gauges)))


def trajectory(case: str) -> str:
    name, parameters = CASES[case]
    policy: BatchPolicy = (PRINTED | BATCH)[name](slots=SLOTS, **parameters)
    gauges = Gauges()
    engine = Engine(COST, 200_000, max_model_len=2048, batch_tokens=BUDGET, running=SLOTS, block=16)
    simulate(engine, policy, traffic(), observers=(gauges,))
    lines, last = [f"{case}, {traffic.__doc__}"], -1
    for came, now, found in gauges.seen:
        if came // EVERY != last:
            last = came // EVERY
            values = "  ".join(f"{key} {value:.6g}" for key, value in found.items())
            lines.append(f"{came:4} {now:9.4f}  {values}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_trajectory_is_the_golden_one(case, request):
    file = FOLDER / f"{case}.txt"
    found = trajectory(case)
    if request.config.getoption("--update-golden"):
        file.write_text(found, encoding="utf-8")
    assert file.exists(), "no such golden file; run pytest --update-golden and read it"
    assert found.splitlines() == file.read_text(encoding="utf-8").splitlines()


def test_no_golden_file_is_left_over():
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(CASES)


def test_the_traffic_makes_them_learn():
    """The estimate of outputs follows the burst and comes back; eb+ changes its mode and comes back."""
    lines = [line.split() for line in trajectory("eb-online").splitlines()[1:]]
    outputs = [float(line[line.index("output") + 1]) for line in lines]
    assert max(outputs) > 2 * outputs[-1]
    modes = [line.split("exclusive ")[1][0] for line in trajectory("eb+").splitlines()[1:]]
    assert modes[0] == modes[-1] == "0"
    assert "1" in modes
