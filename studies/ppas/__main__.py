"""P-PAS's published latencies beside ours on derived cards: python -m studies.ppas.

Arrivals are those of its benchmark (TimoSaemann/ppas-vllm, commit 9ec75bc4): five phases of 10 s, Poisson
with 0.2 requests/s and, in the second and the fourth, with the rate that is named, from Python's generator
with the seed. Prompts have 25,000 tokens, outputs 32. `PUBLISHED` has the mean over the seeds 0 to 4 of the
mean latency in seconds, from the text files under paper_results/.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from headgate import Workload, card_engine, simulate

MODEL = Path(__file__).parent / "qwen2.5-3b.json"
POLICIES = ("ppas", "mixed", "mixed:budget=2048")  # steps of 16,384 tokens, but for the last
PUBLISHED = {
    ("rtx 5090", "209tf-1.79tb-32gb", 0.4): (2.74, 2.76, 3.35),
    ("rtx 5090", "209tf-1.79tb-32gb", 0.8): (4.71, 4.90, 5.21),
    ("rtx 5090", "209tf-1.79tb-32gb", 1.2): (10.25, 13.26, 10.69),
    ("rtx 5090", "209tf-1.79tb-32gb", 1.4): (12.90, 16.65, 12.56),
    ("a100", "a100-sxm", 1.0): (6.85, 7.72, 6.85),
}


def arrivals(rate: float, seed: int) -> list[float]:
    """As its `sample_trace` draws them."""
    draw, times = random.Random(seed), list[float]()
    for phase, own in enumerate((0.2, rate, 0.2, rate, 0.2)):
        time = 10.0 * phase + draw.expovariate(own)
        while time < 10.0 * (phase + 1):
            times.append(time)
            time += draw.expovariate(own)
    return times


def latency(gpu: str, policy: str, rate: float) -> float:
    """The mean over the seeds of the mean latency of a run."""
    engine = card_engine(f"derived:{MODEL}@{gpu}", slots=256, budget=16384)
    means = []
    for seed in range(5):
        times = arrivals(rate, seed)
        requests = Workload.of([25_000] * len(times), [32] * len(times), arrival=times)
        rows = simulate(engine, policy, requests).requests
        means.append(float(np.mean(rows["finished"] - rows["arrival"])))
    return float(np.mean(means))


def main() -> None:
    print(f"{'':20}{'P-PAS':>16}{'16,384':>16}{'2,048':>16}   published, ours")
    for (name, gpu, rate), published in PUBLISHED.items():
        ours = [latency(gpu, policy, rate) for policy in POLICIES]
        cells = "".join(f"{a:8.2f}{b:8.2f}" for a, b in zip(published, ours, strict=True))
        print(f"{name:10}{rate:8.1f}  {cells}")


if __name__ == "__main__":
    main()
