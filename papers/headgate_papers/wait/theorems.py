"""WAIT's theorems 1 and 2 as an experiment: how the loss against the fluid optimum falls with the horizon."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, log, nan
from typing import Any, NamedTuple

import numpy as np

from headgate.experiment.library import simulate
from headgate.methods.make import make_policy
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, draw
from headgate_papers.wait.study import by_type, nested

NAME = "wait-theorems"
ABOUT = "throughput gap and latency of WAIT and Nested WAIT over growing horizons, with the fitted rates"
MEMORY, SPARE, LOAD = 4000, 400, 0.9  # KV tokens that thresholds fill; more, for rounding; of the rate
SLOW = Machine(1.0, 1e-4, kv=MEMORY + SPARE)
TYPES = ((1.0, 10, 20), (0.5, 10, 40))
HORIZONS = (500.0, 2000.0, 8000.0, 32000.0)
SCALE = 4.0  # ζ: arrivals and steps so many times as fast
SEEDS, QUICK_SEEDS = range(4), range(2)
NEAR = 0.15  # a fitted exponent this near to the theorem's counts as it
# By case the exponents of gap and latency that the theorems give.
CASES = {
    "WAIT, n = λΔT": (-0.5, 0.5),
    "WAIT, n > λΔT": (-1.0, 0.0),
    "Nested WAIT, n > λΔT": (-1.0, 0.0),
}


class HorizonJob(NamedTuple):
    """One run up to a horizon (of ζ = 1); `scale` is ζ."""

    key: tuple[str, float, float, int]
    machine: Machine
    mix: Mix
    policy: str
    settings: dict[str, Any]


class Loss(NamedTuple):
    """Offered less completed decode tokens per second, by what was offered; mean latency in steps d0."""

    gap: float
    latency: float


def fluid() -> tuple[Mix, float]:
    """The mix at which the memory is exactly full (C = M*), and the length of a full iteration."""
    mix = Mix(TYPES)
    step = SLOW.fixed + SLOW.per_kv * MEMORY
    work = sum(part.rate * part.work for part in mix.parts)
    return mix.times(MEMORY / (work * step)), step


def jobs(options: Options) -> list[HorizonJob]:
    """Every case at every horizon and seed, and the first one with arrivals and steps four times as fast."""
    mix, step = fluid()
    sizes = by_type([part.rate * step for part in mix.parts])
    wait = ("wait", {"thresholds": sizes, **FOR_EVER})
    below = mix.times(LOAD)
    ways = {
        "WAIT, n = λΔT": (mix, *wait),
        "WAIT, n > λΔT": (below, *wait),
        "Nested WAIT, n > λΔT": (below, *nested(0.02)(SLOW, below)),
    }
    found = [
        HorizonJob((name, horizon, 1.0, seed), SLOW, *way)
        for name, way in ways.items()
        for horizon in _horizons(options)
        for seed in _seeds(options)
    ]
    fast = SLOW._replace(fixed=SLOW.fixed / SCALE, per_kv=SLOW.per_kv / SCALE)
    name = "WAIT, n = λΔT"
    return found + [
        HorizonJob((name, horizon, SCALE, seed), fast, mix.times(SCALE), *wait)
        for horizon in _horizons(options)[:2]
        for seed in _seeds(options)
    ]


def _horizons(options: Options) -> tuple[float, ...]:
    return HORIZONS[:2] if options.quick else HORIZONS


def _seeds(options: Options) -> range:
    return QUICK_SEEDS if options.quick else SEEDS


def run(job: HorizonJob, seed: int) -> Loss:
    """One of them."""
    _, horizon, scale, place = job.key
    seconds = horizon / scale
    requests = draw(job.mix, seconds, 1000 * seed + place)
    engine = job.machine.engine()
    policy, _ = make_policy(job.policy, dict(job.settings), engine)
    found = simulate(engine, policy, requests, watchdog=1e12)
    table, done = found.requests, found.completed()
    offered = float((requests.output - 1).sum())
    served = float((table["output"][done] - 1).sum())
    latency = (table["finished"] - table["arrival"])[done]
    waits = float(latency.mean()) / job.machine.fixed if len(latency) else nan
    return Loss((offered - served) / offered, waits)


class Curve(NamedTuple):
    """Means over seeds, horizon by horizon, and the exponents fitted to them."""

    gaps: list[float]
    latencies: list[float]
    gap_rate: float
    latency_rate: float


def curve(outcomes: Outcomes, name: str, options: Options, scale: float = 1.0) -> Curve:
    """Of one case."""
    horizons = _horizons(options)[: 2 if scale != 1 else None]
    gaps, latencies = (
        [
            float(np.mean([outcomes.figure((name, each, scale, seed), figure) for seed in _seeds(options)]))
            for each in horizons
        ]
        for figure in ("gap", "latency")
    )
    return Curve(gaps, latencies, _exponent(horizons, gaps), _exponent(horizons, latencies))


def _exponent(horizons: tuple[float, ...], values: list[float]) -> float:
    """The slope of a straight line in both logarithms."""
    if not all(isfinite(value) and value > 0 for value in values):
        return nan
    return float(np.polyfit([log(each) for each in horizons], [log(value) for value in values], 1)[0])


def _between(horizons: tuple[float, ...], values: list[float]) -> str:
    """The exponents from each horizon to the next."""
    pairs = zip(pairwise(horizons), pairwise(values), strict=True)
    return ", ".join(f"{_exponent(ends, list(both)):.2f}" for ends, both in pairs)


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Gaps, latencies, and the fitted rates beside the theorems'."""
    curves = {name: curve(outcomes, name, options) for name in CASES}
    critical, spans = curves["WAIT, n = λΔT"], _horizons(options)
    fast = curve(outcomes, "WAIT, n = λΔT", options, SCALE)
    heads = tuple(f"T={horizon:g}" for horizon in spans)
    mix, step = fluid()
    rates = tuple(
        Row(name, (Cell(CASES[name][0], found.gap_rate), Cell(CASES[name][1], found.latency_rate)))
        for name, found in curves.items()
    )
    gaps = [Row(name, tuple(Cell(nan, 100 * gap) for gap in found.gaps)) for name, found in curves.items()]
    waits = [Row(name, tuple(Cell(nan, each) for each in found.latencies)) for name, found in curves.items()]
    kept = [cell.ours <= cell.published + NEAR for row in rates for cell in row.cells]
    near = [abs(cell.published - cell.ours) <= NEAR for row in rates for cell in row.cells]
    same = [abs(a / b - 1) < 0.01 for a, b in zip(fast.gaps, critical.gaps, strict=False)]
    return Report(
        NAME,
        "how fast the loss against the fluid optimum falls",
        (
            "d0 = 1 s, d1 = 0.1 ms per KV token; two types (prompts of 10, 20 and 40 decode iterations) "
            f"whose thresholds fill {MEMORY} KV tokens exactly, an iteration of {step:g} s. n = λΔT: "
            f"arrivals at the fluid optimum ({sum(rate for rate, _, _ in mix.types):.2f} requests/s), C = "
            f"M*. n > λΔT: {LOAD:g} of that. {len(_seeds(options))} seeds. Requests not complete at the "
            "horizon T count as lost.",
            "Exponents: of a straight line through the logarithms of horizon and mean. Theorem 1: gap "
            "O((ζT)^-1/2) and latency O((ζT)^1/2) where (9) holds with equality, O(1/(ζT)) and O(1) where it "
            "is strict; Theorem 2: the latter for Nested WAIT.",
        ),
        (
            Section("Fitted exponents", "case", ("gap", "latency"), rates, against=LIMIT),
            Section("Decode tokens lost, % of those offered", "case", heads, tuple(gaps)),
            Section("Mean latency, in units of d0", "case", heads, tuple(waits)),
        ),
        (
            Count(f"exponents at most {NEAR} above the theorem's, which is a bound", sum(kept), len(kept)),
            Count(f"exponents within {NEAR} of the theorem's", sum(near), len(near)),
            Count(f"the same gap with ζ = {SCALE:g} and T/{SCALE:g}", sum(same), len(same)),
        ),
        (
            "The theorems are upper bounds: an exponent below theirs agrees with them. At the fluid optimum "
            "the requests in service at T, which are lost too, fall as 1/T and hide the slower part at short "
            f"horizons. From each horizon to the next the exponents are {_between(spans, critical.gaps)} "
            f"(gap) and {_between(spans, critical.latencies)} (latency). Whether they end at -1/2 and 1/2 "
            "these horizons do not show.",
            f"ζ times the rate on an engine ζ times as fast is another unit of time: {SCALE:g} times as fast "
            f"up to T/{SCALE:g} loses {', '.join(f'{100 * gap:.2f}' for gap in fast.gaps)} %, as above.",
        ),
    )
