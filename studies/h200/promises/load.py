"""The requests of a run: Poisson arrivals, lengths of published traces, the same for every arm."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError, unknown
from headgate.workloads.traces import BUNDLED, bundled

MOONCAKE = Path(__file__).parents[1] / "data" / "mooncake_conversation_lengths.csv.gz"
WORKLOADS = (*BUNDLED, "mooncake", "batch")
BATCH_PROMPT, BATCH_OUTPUT = 2000, 256  # tokens, half to one and a half times as many
LONGEST_PROMPT, LONGEST_OUTPUT = 15_000, 2_000  # longer ones are cut, so that all fit the model's length
SEED = 21
Whole = npt.NDArray[np.int64]


class Load(NamedTuple):
    """Requests in the order of arrival; those of `batch` were promised nothing."""

    name: str
    rate: float
    arrival: npt.NDArray[np.float64]
    prompt: Whole
    output: Whole
    batch: npt.NDArray[np.bool_] | None = None


def parse(text: str) -> list[tuple[str, float]]:
    """`azure-conv:19` as a workload and its rate; what follows a + is batch beside it, without promises."""
    return [_part(part) for part in text.split("+")]


def _part(text: str) -> tuple[str, float]:
    name, colon, rate = text.rpartition(":")
    if name not in WORKLOADS:
        raise unknown("workload", name or text, WORKLOADS)
    try:
        found = float(rate)
    except ValueError:
        found = 0.0
    if not (colon and found > 0):
        raise InputError(f"load {text!r}: {rate!r} is not a rate; write it as azure-conv:19")
    return name, found


def draw_all(parts: list[tuple[str, float]], seconds: float, seed: int, shrink: int = 1) -> Load:
    """The requests of all parts, those of later ones as batch."""
    loads = [
        draw(name, rate, seconds, seed + 1000 * number, shrink) for number, (name, rate) in enumerate(parts)
    ]
    if len(loads) == 1:
        return loads[0]
    arrival = np.concatenate([load.arrival for load in loads])
    order = np.argsort(arrival, kind="stable")
    batch = np.concatenate([np.full(len(load.arrival), number > 0) for number, load in enumerate(loads)])
    prompt = np.concatenate([load.prompt for load in loads])
    output = np.concatenate([load.output for load in loads])
    name, rate = "+".join(load.name for load in loads), sum(load.rate for load in loads)
    return Load(name, rate, arrival[order], prompt[order], output[order], batch[order])


def draw(name: str, rate: float, seconds: float, seed: int, shrink: int = 1) -> Load:
    """Requests of so many seconds; `shrink` divides lengths, for tiny models."""
    rng = np.random.default_rng([seed, *name.encode()])
    prompts, outputs = lengths(name)
    count = rng.poisson(rate * seconds)
    rows = rng.integers(len(prompts), size=count)
    arrival = np.sort(rng.uniform(0.0, seconds, count))
    prompt = np.clip(prompts[rows] // shrink, 1, LONGEST_PROMPT // shrink)
    output = np.clip(outputs[rows] // shrink, 1, LONGEST_OUTPUT // shrink)
    return Load(name, rate, arrival, prompt, output)


def lengths(name: str) -> tuple[Whole, Whole]:
    """Prompt and output tokens of every request of a trace."""
    if name == "batch":
        share = np.linspace(0.5, 1.5, 1001)
        return (BATCH_PROMPT * share).astype(np.int64), (BATCH_OUTPUT * share[::-1]).astype(np.int64)
    if name != "mooncake":
        trace = bundled(name)
        return trace.prompt.astype(np.int64), trace.output.astype(np.int64)
    with gzip.open(MOONCAKE, "rt", encoding="utf-8") as file:
        rows = np.array([[int(row["prompt"]), int(row["output"])] for row in csv.DictReader(file)])
    return rows[:, 0], rows[:, 1]
