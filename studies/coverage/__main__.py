"""How often 95 % intervals hold the truth: `python -m studies.coverage [SEEDS]`, for docs/metrics.md.

Many seeds of one world, each compared on its own as `headgate compare` does with one seed. The truth is the
mean over all seeds. Width is the mean half-width over 1.96 standard deviations between seeds: 1 is just
right, less is too sure of itself. The last table is a queue whose truth is known (M/M/1).
"""

from __future__ import annotations

import sys

import numpy as np

from headgate.cost.card import load_card
from headgate.experiment.library import simulate
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.stats.comparison import Comparison, compare
from headgate.stats.figures import Estimate, batches, spread_of_mean
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Geometric
from headgate.workloads.synthetic import generate
from headgate.workloads.workload import Workload

SLOTS, BUDGET, REQUESTS, QUEUES = 128, 8192, 2000, 400
FIRST = 3000  # the seeds from here on; methods were chosen on others: 0 to 39, 1000 to 1039, 2000 to 2039
WORLDS = {"closed loop, 256 clients": 256, "open loop, 14/s": None, "open loop, 18/s": None}
RATES = {"open loop, 14/s": 14.0, "open loop, 18/s": 18.0}


def workload(world: str, seed: int) -> Workload:
    """Geometric prompts of 512 and outputs of 256 tokens."""
    clients, rate = WORLDS[world], RATES.get(world)
    arrivals = Poisson(rate) if rate else None
    prompt, output = Geometric(512), Geometric(256)
    return generate(REQUESTS, seed=seed, arrivals=arrivals, clients=clients, prompt=prompt, output=output)


def one_seed(world: str, seed: int) -> Comparison:
    """Mixed batches against exclusive ones of at least 16 prompts, on the measured H200 card."""
    card = load_card("linear-h200-qwen3-8b")
    engine = Engine(card.cost, card.kv_tokens, card.max_model_len, BUDGET, SLOTS, card.block)
    met = workload(world, seed)
    runs = {"mixed": simulate(engine, Mixed(SLOTS, BUDGET), met)}
    runs["eb"] = simulate(engine, Exclusive(SLOTS, 16), met)
    return compare({name: [run] for name, run in runs.items()}, "mixed")


def covered(found: list[Estimate], truth: float | None = None) -> str:
    """Share of the intervals that hold the truth, and their width against the one needed."""
    value = np.array([one.value for one in found])
    ends = np.array([(np.nan if one.low is None else one.low, one.high or np.nan) for one in found])
    if np.any(np.isnan(ends)):
        return "no interval |  "
    aim = float(value.mean()) if truth is None else truth
    held = np.mean((ends[:, 0] <= aim) & (aim <= ends[:, 1]))
    return f"{held:.0%} | {np.mean(ends[:, 1] - ends[:, 0]) / 2 / (1.96 * value.std(ddof=1)):.1f}"


def world_table(world: str, seeds: int) -> None:
    """Every metric: the paired difference of EB against mixed, and mixed alone."""
    found = [one_seed(world, seed) for seed in range(FIRST, FIRST + seeds)]
    print(f"\n{world}, {seeds} seeds | difference held | width | alone held | width\n---|---|---|---|---")
    for rows in zip(*(one.rows for one in found), strict=True):
        paired, alone = [row.others["eb"].absolute for row in rows], [row.baseline for row in rows]
        print(f"{rows[0].metric} | {covered(paired)} | {covered(alone)}", flush=True)


def waits(load: float, requests: int, seed: int) -> Estimate:
    """The mean wait of one M/M/1 run, without the first and last tenth."""
    rng = np.random.default_rng(seed)
    gaps, services = rng.exponential(1 / load, requests), rng.exponential(1.0, requests)
    wait = np.zeros(requests)
    for number in range(1, requests):
        wait[number] = max(0.0, wait[number - 1] + services[number - 1] - gaps[number])
    keep = np.zeros(requests, bool)
    keep[requests // 10 : requests - requests // 10] = True
    return spread_of_mean(batches(keep), wait, float(wait[keep].mean())).estimate()


def queue_table() -> None:
    """Mean waits of a single queue, whose truth is known."""
    print("\nM/M/1: load, requests | held | width | marked rough\n---|---|---|---")
    for load, requests in ((0.6, 1000), (0.8, 1000), (0.9, 1000), (0.9, 10000)):
        found = [waits(load, requests, seed) for seed in range(FIRST, FIRST + QUEUES)]
        rough = np.mean([one.rough for one in found])
        print(f"{load}, {requests:,} | {covered(found, load / (1 - load))} | {rough:.0%}", flush=True)


if __name__ == "__main__":
    for name in WORLDS:
        world_table(name, int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    queue_table()
