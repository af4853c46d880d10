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
BURSTS = "-bursts"  # behind a trace: 10 s at 1.58 times the rate, then 20 s at 0.71 times
BURST_SECONDS, CYCLE_SECONDS, BURST_SHARE = 10.0, 30.0, 1.58 / 3
CLOSED = {"batch": (2000, 256), "even": (512, 512)}  # prompt and output tokens, half to one and a half times
WORKLOADS = (*BUNDLED, *(name + BURSTS for name in BUNDLED), "mooncake", *CLOSED)
LONGEST_PROMPT, LONGEST_OUTPUT = 15_000, 2_000  # longer ones are cut, so that all fit the model's length
SEED = 21
CHAT, BATCH, GOLD, FREE = CLASSES = ("chat", "batch", "gold", "free")
Whole = npt.NDArray[np.int64]


class Load(NamedTuple):
    """Requests in the order of arrival, each of a class; and clients that send batch one after the other."""

    name: str
    rate: float
    arrival: npt.NDArray[np.float64]
    prompt: Whole
    output: Whole
    kind: npt.NDArray[np.str_]
    clients: int = 0  # that send one request after the other for as long as the run lasts
    closed: tuple[int, int, str] = (0, 0, BATCH)  # mean prompt and output of theirs, class
    seconds: float = 0.0
    stairs: tuple[float, ...] = ()  # rates, one after the other for the same time each


class Part(NamedTuple):
    """Of a load: at this rate (or these, one after the other), or by so many clients in a closed loop."""

    name: str
    rate: float
    kind: str
    clients: int = 0
    stairs: tuple[float, ...] = ()


def parse(text: str) -> list[Part]:
    """`azure-conv:19`, `azure-conv:12+batch:8`, `azure-conv:12+batch:192c` (clients), `even:640c` (alone)
    or `azure-conv:12@gold+azure-conv:12@free`. Without a class the first of several parts is chat, the others
    are batch. `azure-conv:16/20/24` is a staircase: these rates one after the other, without a pause.
    """
    words = text.split("+")
    several = ["", ""] if len(words) == 1 else [CHAT, BATCH]
    return [_part(part, several[min(place, 1)]) for place, part in enumerate(words)]


def _part(text: str, default: str) -> Part:
    rest, _, kind = text.partition("@")
    name, colon, rate = rest.rpartition(":")
    if name not in WORKLOADS:
        raise unknown("workload", name or text, WORKLOADS)
    if kind and kind not in CLASSES:
        raise unknown("class", kind, CLASSES)
    clients = rate.endswith("c")
    try:
        rates = [float(each) for each in rate.removesuffix("c").split("/")]
    except ValueError:
        rates = [0.0]
    stairs = tuple(rates) if len(rates) > 1 else ()
    if not colon or min(rates) <= 0 or (clients and (name not in CLOSED or stairs)) or (stairs and default):
        raise InputError(f"load {text!r}: {rate!r} is not a rate; write azure-conv:19, or batch:192c clients")
    if clients:
        return Part(name, 0.0, default and BATCH, int(rates[0]))
    return Part(name, float(np.mean(rates)), kind or default, stairs=stairs)


def draw_all(parts: list[Part], seconds: float, seed: int, shrink: int = 1) -> Load:
    """The requests of all parts."""
    loads = [
        draw(part.name, part.rate, seconds, seed + 1000 * number, shrink, part.kind, part.stairs)
        for number, part in enumerate(parts)
    ]
    closed = (0, 0, BATCH)
    for part in parts:
        if part.clients:
            mean_prompt, mean_output = CLOSED[part.name]
            closed = mean_prompt // shrink, mean_output // shrink, part.kind
    arrival = np.concatenate([load.arrival for load in loads])
    order = np.argsort(arrival, kind="stable")
    prompt = np.concatenate([load.prompt for load in loads])
    output = np.concatenate([load.output for load in loads])
    kind = np.concatenate([load.kind for load in loads])
    name = "+".join(f"{part.clients} {part.name} clients" if part.clients else part.name for part in parts)
    return Load(
        name,
        sum(load.rate for load in loads),
        arrival[order],
        prompt[order],
        output[order],
        kind[order],
        clients=sum(part.clients for part in parts),
        closed=closed,
        seconds=seconds,
        stairs=parts[0].stairs,
    )


def draw(
    name: str,
    rate: float,
    seconds: float,
    seed: int,
    shrink: int = 1,
    kind: str = "",
    stairs: tuple[float, ...] = (),
) -> Load:
    """Requests of so many seconds; `shrink` divides lengths, for tiny models."""
    rng = np.random.default_rng([seed, *name.encode()])
    prompts, outputs = lengths(name)
    count = rng.poisson(rate * seconds)
    rows = rng.integers(len(prompts), size=count)
    arrival = np.sort(rng.uniform(0.0, seconds, count))
    if name.endswith(BURSTS):
        cycle, within = np.divmod(arrival, CYCLE_SECONDS)
        shares, moments = (0.0, BURST_SHARE, 1.0), (0.0, BURST_SECONDS, CYCLE_SECONDS)
        arrival = CYCLE_SECONDS * cycle + np.interp(within / CYCLE_SECONDS, shares, moments)
    if stairs:  # the moment at which the staircase has sent this share of its requests
        sent = np.concatenate([[0.0], np.cumsum(stairs)]) / sum(stairs)
        arrival = np.interp(arrival / seconds, sent, np.linspace(0.0, seconds, len(stairs) + 1))
    prompt = np.clip(prompts[rows] // shrink, 1, LONGEST_PROMPT // shrink)
    output = np.clip(outputs[rows] // shrink, 1, LONGEST_OUTPUT // shrink)
    return Load(name, rate, arrival, prompt, output, np.full(count, kind, dtype="U8"), stairs=stairs)


def lengths(name: str) -> tuple[Whole, Whole]:
    """Prompt and output tokens of every request of a trace."""
    if name in CLOSED:
        (prompt, output), share = CLOSED[name], np.linspace(0.5, 1.5, 1001)
        return (prompt * share).astype(np.int64), (output * share[::-1]).astype(np.int64)
    if name != "mooncake":
        trace = bundled(name.removesuffix(BURSTS))
        return trace.prompt.astype(np.int64), trace.output.astype(np.int64)
    with gzip.open(MOONCAKE, "rt", encoding="utf-8") as file:
        rows = np.array([[int(row["prompt"]), int(row["output"])] for row in csv.DictReader(file)])
    return rows[:, 0], rows[:, 1]
