"""WAIT's theorems as an experiment: how the loss against the fluid optimum falls with the horizon."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isfinite, log, nan, pi
from typing import Any, NamedTuple

import numpy as np

from headgate.experiment.library import simulate
from headgate.methods.make import make_policy
from headgate.workloads.workload import Workload
from headgate_papers.report import LIMIT, Cell, Count, Report, Row, Section
from headgate_papers.serving import Options, Outcomes
from headgate_papers.wait.runs import FOR_EVER, Machine, Mix, draw
from headgate_papers.wait.study import by_type, nested

NAME = "wait-theorems"
ABOUT = "throughput gap and latency of WAIT and Nested WAIT over growing horizons, with the fitted rates"
MEMORY, SPARE, LOAD = 4000, 400, 0.9  # KV tokens that thresholds fill; more, for rounding; of the rate
SLOW = Machine(1.0, 1e-4, kv=MEMORY + SPARE)
TYPES = ((1.0, 10, 20), (0.5, 10, 40))
HORIZONS = (500.0, 2000.0, 8000.0)
LONG = (
    *HORIZONS,
    32_000.0,
    128_000.0,
    512_000.0,
)  # where n = λΔT: what is in service at T hides its loss for long
FITTED = 3  # of the horizons, the longest: exponents are fitted to these
SCALE = 4.0  # ζ: arrivals and steps so many times as fast
SWAY, PERIOD = 0.05, 100.0  # of the rates that vary: by so much up and down, in so many seconds
MERGED = 0.5  # of the fluid optimum's rate: one segment for both lengths holds more KV
SEEDS, FEW_SEEDS = range(4), range(2)  # where n = λΔT; elsewhere, where seeds hardly differ
NEAR = 0.15  # a fitted exponent this near to the theorem's counts as it
CRITICAL = "WAIT, n = λΔT"
# By case the exponents of gap and latency that the theorems give.
CASES = {
    CRITICAL: (-0.5, 0.5),  # Theorem 1
    "WAIT, n > λΔT": (-1.0, 0.0),
    "Nested WAIT": (-1.0, 0.0),  # Theorem 2
    "Nested, rates vary": (-1.0, 0.0),  # Theorem 3
    "Nested, 1 segment": (-1.0, 0.0),  # Theorem 4
}


class HorizonJob(NamedTuple):
    """One run up to a horizon (of ζ = 1); `scale` is ζ, rates go up and down by the share `sway`."""

    key: tuple[str, float, float, int]
    machine: Machine
    mix: Mix
    policy: str
    settings: dict[str, Any]
    sway: float = 0.0


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
    below, half = mix.times(LOAD), mix.times(MERGED)
    blind = nested(0.02)(SLOW, below)
    merged = nested(0.02, (max(decodes for _, _, decodes in TYPES),))(SLOW, half)
    ways = {
        CRITICAL: (mix, *wait, 0.0),
        "WAIT, n > λΔT": (below, *wait, 0.0),
        "Nested WAIT": (below, *blind, 0.0),
        "Nested, rates vary": (below.times(1 - SWAY), *blind, SWAY),
        "Nested, 1 segment": (half, *merged, 0.0),
    }
    found = [
        HorizonJob((name, horizon, 1.0, seed), SLOW, *way)
        for name, way in ways.items()
        for horizon in _horizons(options, name)
        for seed in _seeds(options, name)
    ]
    fast = SLOW._replace(fixed=SLOW.fixed / SCALE, per_kv=SLOW.per_kv / SCALE)
    return found + [
        HorizonJob((CRITICAL, horizon, SCALE, seed), fast, mix.times(SCALE), *wait)
        for horizon in _horizons(options)[:2]
        for seed in _seeds(options)
    ]


def _horizons(options: Options, name: str = "") -> tuple[float, ...]:
    return HORIZONS[:2] if options.quick else LONG if name == CRITICAL else HORIZONS


def _seeds(options: Options, name: str = CRITICAL) -> range:
    return SEEDS if name == CRITICAL and not options.quick else FEW_SEEDS


def run(job: HorizonJob, seed: int) -> Loss:
    """One of them."""
    _, horizon, scale, place = job.key
    seconds = horizon / scale
    requests = _swaying(draw(job.mix, seconds, 1000 * seed + place), seconds, job.sway)
    engine = job.machine.engine()
    policy, _ = make_policy(job.policy, dict(job.settings), engine)
    found = simulate(engine, policy, requests, watchdog=1e12)
    table, done = found.requests, found.completed()
    offered = float((requests.output - 1).sum())
    served = float((table["output"][done] - 1).sum())
    latency = (table["finished"] - table["arrival"])[done]
    waits = float(latency.mean()) / job.machine.fixed if len(latency) else nan
    return Loss((offered - served) / offered, waits)


def _swaying(requests: Workload, seconds: float, sway: float) -> Workload:
    """The same requests with a rate that goes up and down; whole periods bring as many as before."""
    if not sway:
        return requests
    times = np.linspace(0, seconds, 1 + int(50 * seconds / PERIOD))
    come = times + sway * PERIOD / (2 * pi) * (1 - np.cos(2 * pi * times / PERIOD))
    arrival = np.interp(requests.arrival, come, times)
    return replace(requests, arrival=arrival, abort=seconds - arrival)


class Curve(NamedTuple):
    """Means over seeds, horizon by horizon, and the exponents fitted to them."""

    gaps: list[float]
    latencies: list[float]
    gap_rate: float
    latency_rate: float


def curve(outcomes: Outcomes, name: str, options: Options, scale: float = 1.0) -> Curve:
    """Of one case."""
    horizons, seeds = _horizons(options, name)[: 2 if scale != 1 else None], _seeds(options, name)
    gaps, latencies = (
        [
            float(np.mean([outcomes.figure((name, each, scale, seed), figure) for seed in seeds]))
            for each in horizons
        ]
        for figure in ("gap", "latency")
    )
    return Curve(gaps, latencies, _exponent(horizons, gaps), _exponent(horizons, latencies))


def _exponent(horizons: tuple[float, ...], values: list[float]) -> float:
    """The slope of a straight line in both logarithms, through the longest horizons."""
    horizons, values = horizons[-FITTED:], values[-FITTED:]
    if not all(isfinite(value) and value > 0 for value in values):
        return nan
    return float(np.polyfit([log(each) for each in horizons], [log(value) for value in values], 1)[0])


def _between(horizons: tuple[float, ...], values: list[float]) -> str:
    """The exponents from each horizon to the next."""
    pairs = zip(pairwise(horizons), pairwise(values), strict=True)
    return ", ".join(f"{_exponent(ends, list(both)):.2f}" for ends, both in pairs)


def _row(name: str, values: list[float], wanted: int) -> Row:
    """Our numbers, and none at the horizons that only one case has."""
    return Row(name, tuple(Cell(nan, value) for value in [*values, *[nan] * (wanted - len(values))]))


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Gaps, latencies, and the fitted rates beside the theorems'."""
    curves = {name: curve(outcomes, name, options) for name in CASES}
    critical, spans = curves[CRITICAL], _horizons(options, CRITICAL)
    fast = curve(outcomes, CRITICAL, options, SCALE)
    drawn = [outcomes.figure((CRITICAL, spans[-1], 1.0, seed), "gap") for seed in _seeds(options)]
    heads = tuple(f"T={horizon:g}" for horizon in spans)
    mix, step = fluid()
    rates = tuple(
        Row(name, (Cell(CASES[name][0], found.gap_rate), Cell(CASES[name][1], found.latency_rate)))
        for name, found in curves.items()
    )
    gaps = [_row(name, [100 * gap for gap in found.gaps], len(spans)) for name, found in curves.items()]
    waits = [_row(name, found.latencies, len(spans)) for name, found in curves.items()]
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
            f"M*. n > λΔT, Nested WAIT: {LOAD:g} of that; rates vary: {LOAD * (1 - SWAY):.3f} of it, "
            f"{100 * SWAY:g} % up and down every {PERIOD:g} s; 1 segment for both lengths: {MERGED:g} of it. "
            f"Seeds: {len(_seeds(options))} at the optimum, {len(FEW_SEEDS)} below. Requests not complete at "
            "the horizon T count as lost.",
            f"Exponents: of a straight line through the logarithms of the {FITTED} longest horizons and of "
            "the means. Theorem 1: gap O((ζT)^-1/2) and latency O((ζT)^1/2) where (9) holds with equality, "
            "O(1/(ζT)) and O(1) where it is strict; Theorems 2, 3 and 4: the latter for Nested WAIT, for "
            "rates that vary, and for several lengths in a segment.",
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
            f"(gap) and {_between(spans, critical.latencies)} (latency). The loss at T is one draw a seed, "
            f"{100 * min(drawn):.2f} to {100 * max(drawn):.2f} % at the longest; latency is a mean over T.",
            f"ζ times the rate on an engine ζ times as fast is another unit of time: {SCALE:g} times as fast "
            f"up to T/{SCALE:g} loses {', '.join(f'{100 * gap:.2f}' for gap in fast.gaps)} %, as above.",
        ),
    )
