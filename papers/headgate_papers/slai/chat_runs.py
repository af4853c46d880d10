"""Runs of the SLAI paper's chat traffic: two classes, Poisson arrivals for 35 minutes, or all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np

from headgate.core.request import Slo
from headgate.cost.laws.tiles import TileCost
from headgate.experiment.library import card_engine, simulate
from headgate.methods.bounds import Requests, tile_bound
from headgate.methods.make import make_policy
from headgate.record.tables import Flags, Floats, Run
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import quantiles
from headgate.stats.gaps import Gaps
from headgate.workloads.arrivals import Poisson
from headgate.workloads.lengths import Pairs
from headgate.workloads.streams import stream
from headgate.workloads.synthetic import generate
from headgate.workloads.traces import bundled
from headgate.workloads.workload import Kind, Workload
from headgate_papers.serving import Key, Outcomes
from headgate_papers.slai.published import LONG_PROMPT

CARD = "pub-rtx-ada-6000-mistral-7b"
KINDS = (Kind("paying", Slo(between_tokens=0.1)), Kind("free", Slo(between_tokens=0.5), priority=1))
SLOTS, BUDGET = 128, 512
UNLIMITED = 1_000_000_000  # KV tokens


class ChatJob(NamedTuple):
    """One run: so many requests per second, so many percent of them paying; stopped after `seconds`.

    A rate of None: `requests` at once, with `kv` tokens of KV, and without `constant` and `floor` if `plain`.
    """

    key: Key
    policy: str
    settings: Mapping[str, Any]
    rate: float | None = None
    paying: int = 5
    seed: int = 0
    seconds: float = 2100.0
    budget: int = BUDGET
    slots: int = SLOTS
    requests: int = 4000
    kv: int | None = None
    plain: bool = False


@dataclass(frozen=True)
class Served:
    """The figures of one run; as in the paper, of requests that finished before the stop."""

    ttft: float  # median, s
    ttft_mean: float
    ttft_all: float  # median over everybody who came, infinite for those without a token at the stop
    ttft_paying: float  # means
    ttft_free: float
    ttft_long: float  # median of the longest tenth of the prompts, of all who came
    longest: float  # the longest wait for a first token, of all who came; they are served after the stop
    tbt_paying: float  # 99th percentile over tokens
    tbt_free: float
    finished: float  # per second
    served: float  # of those who came, the share that finished
    batch: float  # mean seconds of a step
    evictions: float

    @classmethod
    def of(cls, run: Run, stop: float) -> Served:
        """From a run's tables; what happens after the stop does not change what happened before."""
        table = run.requests
        done = run.completed() & (table["finished"] <= stop)
        ttft = table["first_token"] - table["arrival"]
        seen = np.where(table["first_token"] <= stop, ttft, inf)
        paying, gaps, rows = table["kind"] == 0, Gaps(run), run.steps
        before = rows["start"] < stop
        span = min(stop, run.span()[1])
        return cls(
            ttft=_median(ttft[done]),
            ttft_mean=_mean(ttft[done]),
            ttft_all=_median(seen),
            ttft_paying=_mean(ttft[done & paying]),
            ttft_free=_mean(ttft[done & ~paying]),
            ttft_long=_median(seen[table["prompt"] >= LONG_PROMPT]),
            longest=float(ttft.max()),
            tbt_paying=_p99(gaps, done & paying),
            tbt_free=_p99(gaps, done & ~paying),
            finished=float(done.sum()) / span,
            served=float(done.mean()),
            batch=float(rows["seconds"][before].sum() / rows["count"][before].sum()),
            evictions=float(table["evictions"].sum()),
        )


def chat(rate: float, paying: int, seed: int, seconds: float) -> Workload:
    """Everybody who comes in that time: lengths drawn from the trace, classes at random."""
    drawn = _drawn(rate, seed, seconds)
    kind = (stream(seed, "classes").random(len(drawn)) >= paying / 100).astype(np.int64)
    return replace(drawn, kind=kind, kinds=KINDS, priority=kind)


def sample(requests: int, seed: int) -> Workload:
    """So many requests of the trace, drawn with replacement, all there at the start."""
    return generate(requests, seed=seed, pairs=_lengths(), name="sharegpt-8k")


def lengths_of(workload: Workload) -> Requests:
    """Prompts and decode iterations, for the bound."""
    return Requests.of(workload.prompt, workload.output - 1)


def serve(job: ChatJob, seed: int) -> Served:
    """One of them."""
    engine = engine_of(job)
    workload = (
        sample(job.requests, seed)
        if job.rate is None
        else chat(job.rate, job.paying, seed + job.seed, job.seconds)
    )
    run = simulate(engine, make_policy(job.policy, dict(job.settings), engine)[0], workload, watchdog=1e9)
    return Served.of(run, inf if job.rate is None else job.seconds)


def best_rate() -> float:
    """λ* of the whole trace on the card: no policy is stable beyond it."""
    cost = engine_of(ChatJob("", "mixed", {})).cost
    assert isinstance(cost, TileCost)
    return tile_bound(cost.terms, lengths_of(bundled("sharegpt-8k"))).rate


def offered(rate: float, seeds: Sequence[int], seconds: float) -> float:
    """The work that these seeds bring, as a share of the nominal: requests and lengths are drawn."""
    cost = engine_of(ChatJob("", "mixed", {})).cost
    assert isinstance(cost, TileCost)
    brought = 0.0
    for seed in seeds:
        drawn = _drawn(rate, seed, seconds)
        brought += len(drawn) * tile_bound(cost.terms, lengths_of(drawn)).seconds
    return brought / len(seeds) / seconds / rate * best_rate()


def engine_of(job: ChatJob) -> Engine:
    """The calibrated card's engine with the job's limits."""
    engine = card_engine(CARD, job.slots, job.budget, job.kv)
    assert isinstance(engine.cost, TileCost)
    if not job.plain:
        return engine
    return engine._replace(cost=TileCost(replace(engine.cost.terms, constant=0.0, floor=0.0)))


class Seeds:
    """Figures averaged over the seeds of a setting, by the keys of `Outcomes` without the seed."""

    def __init__(self, outcomes: Outcomes, seeds: Sequence[int]) -> None:
        self._outcomes, self._seeds = outcomes, seeds

    def mean(self, key: tuple[Any, ...], name: str) -> float:
        """The mean of one figure."""
        values = [self._outcomes.figure((*key, seed), name) for seed in self._seeds]
        return float(np.mean(values))

    def range(self, key: tuple[Any, ...], name: str) -> tuple[float, float]:
        """Its least and largest value."""
        values = [self._outcomes.figure((*key, seed), name) for seed in self._seeds]
        return min(values), max(values)


@lru_cache(maxsize=4)
def _drawn(rate: float, seed: int, seconds: float) -> Workload:
    enough = int(rate * seconds + 6 * (rate * seconds) ** 0.5) + 10
    return generate(enough, seed=seed, arrivals=Poisson(rate), pairs=_lengths(), name="sharegpt-8k").between(
        0, seconds
    )


@lru_cache(maxsize=1)
def _lengths() -> Pairs:
    trace = bundled("sharegpt-8k")
    return Pairs(trace.prompt, trace.output)


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else nan


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else nan


def _p99(gaps: Gaps, rows: Flags) -> float:
    found = gaps.sample(rows)
    return quantiles(found.values, found.weights, [0.99])[0]
