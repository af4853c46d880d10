"""What all studies share: workloads, steady rates, tables on screen and on disk."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.core.policy import Observer
from headgate.experiment.library import card_engine, simulate
from headgate.methods.make import make_policy
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine
from headgate.workloads.lengths import Empirical, Gamma, Geometric, LengthLaw, LogNormal, Uniform
from headgate.workloads.synthetic import WorkloadStage, generate
from headgate.workloads.workload import Workload

HERE = Path(__file__).parent
CARDS = (
    "linear-h200-qwen3-8b",
    "pub-h200-qwen3-8b",
    "pub-h200-qwen3-30b-a3b",
    "pub-rtx-pro-6000-qwen3-8b",
    "pub-rtx-pro-6000-qwen3-30b-a3b",
)
Settings = dict[str, Any]
Row = dict[str, Any]


class Mix(NamedTuple):
    """Prompt and output lengths."""

    prompt: LengthLaw
    output: LengthLaw


def _cut(law: LengthLaw, least: int, most: int) -> Empirical:
    """A law cut to a range, as a large fixed sample."""
    return Empirical(np.clip(law.draw(200_000, np.random.default_rng(0)), least, most))


@cache
def mix(name: str) -> Mix:
    """Lengths by name: `geometric 512/256` and so on, or a data set's published moments.

    The data sets are not here. ShareGPT-like outputs are log-normal cut at 500 with the published mean 280
    and deviation 153 (a fifth are cut), prompts log-normal with mean 105; NuminaMath-like outputs are 800 and
    more with mean 1039 and deviation 228, prompts log-normal with mean 122.
    """
    if name == "sharegpt-like":
        prompt = _cut(LogNormal(105, 1.0), 1, 20448)
        return Mix(prompt, _cut(LogNormal(float(np.exp(5.53220 + 0.80756**2 / 2)), 0.80756), 2, 500))
    if name == "numinamath-like":
        more = Gamma(239, (239 / 228) ** 2).draw(200_000, np.random.default_rng(0))
        return Mix(_cut(LogNormal(122, 0.6), 16, 1395), Empirical(np.minimum(800 + more, 3149)))
    law, _, means = name.partition(" ")
    prompt_mean, output_mean = (float(mean) for mean in means.split("/"))
    laws: dict[str, Callable[[float], LengthLaw]] = {
        "geometric": Geometric,
        "gamma(2)": Gamma,
        "uniform": Uniform,
    }
    return Mix(Uniform(prompt_mean), laws[law](output_mean))


@cache
def requests(name: str, number: int, clients: int, seed: int = 0) -> Workload:
    """A closed loop of so many clients."""
    prompt, output = mix(name)
    return generate(number, seed=seed, prompt=prompt, output=output, clients=clients, name=name)


def staged(stages: Sequence[tuple[str, int, int]], seed: int = 0) -> Workload:
    """A closed loop that changes: lengths, requests and clients of each stage."""
    made = [WorkloadStage(n, None, clients, *mix(name)) for name, n, clients in stages]
    prompt, output = mix(stages[0][0])
    return generate(seed=seed, prompt=prompt, output=output, stages=made, name="stages")


def engine(card: str, slots: int, budget: int = 8192, kv_tokens: int | None = None) -> Engine:
    """A card's engine."""
    return card_engine(card, slots, budget, kv_tokens)


def serve(
    on: Engine, policy: str, settings: Settings, workload: Workload, observers: tuple[Observer, ...] = ()
) -> Run:
    """One run."""
    return simulate(on, make_policy(policy, settings, on)[0], workload, observers=observers)


def finishes(run: Run) -> NDArray[np.float64]:
    """When requests finished, in order."""
    return np.sort(run.requests["finished"])


def rate(run: Run, first: int, last: int) -> float:
    """Requests per second from the `first` finish to the `last`, by the straight line through all of them.

    Finishes come in bursts, so the two at the ends alone would add a cycle's worth of chance.
    """
    times = finishes(run)[first:last]
    return float(np.polyfit(times - times[0], np.arange(last - first), 1)[0])


def first_tokens(run: Run, first: int, last: int) -> float:
    """Mean TTFT of the requests sent as number `first` to `last`."""
    waited = run.requests["first_token"] - run.requests["arrival"]
    return float(np.nanmean(waited[first:last]))


def everywhere(work: Callable[[Any], Row], cells: Iterable[Any], cores: int = 2) -> list[Row]:
    """The rows of all cells, on both cores."""
    with Pool(cores) as pool:
        return pool.map(work, list(cells), chunksize=1)


def show(title: str, rows: list[Row], columns: dict[str, str], name: str) -> None:
    """A table in Markdown on the screen; without a `name` that is all, else all columns as CSV on disk."""
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column), how) for column, how in columns.items()) + " |")
    if not name:
        return
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: object, how: str) -> str:
    return "" if value is None else format(value, how)


def short(card: str) -> str:
    """A card's name for narrow tables."""
    return card.replace("qwen3-", "").replace("rtx-pro-6000", "rtx")
