"""Many small runs: what to serve, under which policy, on which card, and the figures the papers quote."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import nan
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError, RunError
from headgate.cost.laws.linear import LinearCost
from headgate.experiment.library import card_engine, simulate
from headgate.methods.make import make_policy
from headgate.record.tables import Floats, Run
from headgate.sim.engine.engine import Engine
from headgate.stats.measured import Latencies
from headgate.workloads.lengths import LengthLaw
from headgate.workloads.synthetic import WorkloadStage, generate
from headgate.workloads.workload import Workload

Key = Hashable
BUDGET = 16384
INTERRUPTED = "interrupted"
FEW = 40  # jobs that are not worth processes of their own


class Options(NamedTuple):
    """What a user may choose of a reproduction."""

    seed: int = 0
    quick: bool = False

    def requests(self, full: int) -> int:
        """That many, or a tenth to try things out."""
        return max(100, full // 10) if self.quick else full


class Load(NamedTuple):
    """Requests to be drawn; the same load and seed are the same requests."""

    requests: int
    clients: int | None
    prompt: LengthLaw
    output: LengthLaw
    stages: tuple[WorkloadStage, ...] = ()


class Job(NamedTuple):
    """One run. `phase` replaces the fixed cost of a prefill step, in seconds."""

    key: Key
    card: str
    load: Load
    policy: str
    settings: Mapping[str, Any]
    slots: int
    budget: int = BUDGET
    phase: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The figures of one run, by the paper's definitions: everything, from first arrival to last finish."""

    requests: float  # per s
    tokens: float  # per s, prompt and output
    outputs: float  # output tokens per s
    ttft: float  # mean, s
    tpot: float  # mean, s
    exclusive: float  # share of the time EB+ ran exclusive batches, NaN for others
    evictions: int
    ttfts: Floats = field(repr=False)
    tpots: Floats = field(repr=False)

    @classmethod
    def of(cls, run: Run) -> Outcome:
        table, (begin, end) = run.requests, run.span()
        done, seconds, latencies = run.completed(), end - begin, Latencies.of(run)
        outputs = float(table["output"][done].sum())
        return cls(
            requests=float(done.sum()) / seconds,
            tokens=(outputs + float(table["prompt"][done].sum())) / seconds,
            outputs=outputs / seconds,
            ttft=float(np.nanmean(latencies.ttft)),
            tpot=float(np.nanmean(latencies.tpot)),
            exclusive=_exclusive(run, end),
            evictions=int(table["evictions"].sum()),
            ttfts=latencies.ttft,
            tpots=latencies.tpot,
        )

    def within(self, ttft: float, tpot: float) -> float:
        """Share of all requests within both targets, in seconds; one token alone has no TPOT to miss."""
        return float(np.mean((self.ttfts < ttft) & ~(self.tpots >= tpot)))


class Outcomes:
    """The figures of all jobs by key; a run that could not go on has none, and a line that says why.

    Which figures a run has depends on the paper: `Outcome`, or what its own runs measure.
    """

    def __init__(self) -> None:
        self._found: dict[Key, list[Any]] = {}
        self.failures: dict[Key, str] = {}

    def add(self, key: Key, outcome: Any) -> None:
        """A run that went well; jobs that differ only in their seed may share a key."""
        self._found.setdefault(key, []).append(outcome)

    def every(self, key: Key) -> tuple[Any, ...]:
        """What the runs of a key gave, none where they failed."""
        return tuple(self._found.get(key, ()))

    def figure(self, key: Key, name: str) -> float:
        """One figure by its name, NaN when the run failed."""
        found = self.every(key)
        return float(getattr(found[-1], name)) if found else nan

    def within(self, key: Key, ttft: float, tpot: float) -> float:
        """Share of the requests within both targets, NaN when the run failed."""
        found = self.every(key)
        return float(found[-1].within(ttft, tpot)) if found else nan


@contextmanager
def partly(jobs: Sequence[Any], failures: dict[Any, str]) -> Iterator[list[Any]]:
    """Interrupted, go on with what there is: jobs not in the list that is handed out count as stopped.

    With nothing done there is nothing to judge, and the interrupt is passed on.
    """
    done: list[Any] = []
    try:
        yield done
    except KeyboardInterrupt:
        if not done:
            raise
        failures.update({job.key: INTERRUPTED for job in jobs if job.key not in done})


def carry_out(
    run: Callable[[Any, int], Any],
    jobs: Sequence[Any],
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
    spread: bool = False,
) -> Outcomes:
    """All of them, one after the other; with `spread`, where there are many, in one process per core."""
    outcomes = Outcomes()
    with partly(jobs, outcomes.failures) as done:
        for number, (job, (found, why)) in enumerate(
            zip(jobs, _answers(run, jobs, seed, spread), strict=True)
        ):
            if why:
                outcomes.failures[job.key] = why
            else:
                outcomes.add(job.key, found)
            done.append(job.key)
            progress(number + 1)
    return outcomes


def _answers(
    run: Callable[[Any, int], Any], jobs: Sequence[Any], seed: int, spread: bool
) -> Iterator[tuple[Any, str]]:
    one, cores = partial(_tried, run, seed), os.cpu_count() or 1
    if not spread or len(jobs) <= FEW or cores == 1:
        yield from map(one, jobs)
        return
    with ProcessPoolExecutor(cores, initializer=_leave_interrupts_to_the_parent) as pool:
        yield from pool.map(one, jobs, chunksize=4)


def _tried(run: Callable[[Any, int], Any], seed: int, job: Any) -> tuple[Any, str]:
    """What a run gave, or why it could not go on."""
    try:
        return run(job, seed), ""
    except (RunError, InputError) as error:
        return None, str(error)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_job(job: Job, seed: int) -> Outcome:
    """One of them."""
    engine = engine_of(job)
    policy, _ = make_policy(job.policy, dict(job.settings), engine)
    return Outcome.of(simulate(engine, policy, draw(job.load, seed)))


@lru_cache(maxsize=64)
def draw(load: Load, seed: int) -> Workload:
    """The requests of a load."""
    count = None if load.stages else load.requests
    return generate(
        count, seed=seed, prompt=load.prompt, output=load.output, clients=load.clients, stages=load.stages
    )


def engine_of(job: Job) -> Engine:
    """The card's engine, with another fixed cost of a prefill step if the job says so."""
    engine = _engine(job.card, job.slots, job.budget)
    return engine if job.phase is None else engine._replace(cost=_with_phase(engine, job.phase))


@lru_cache(maxsize=64)
def _engine(card: str, slots: int, budget: int) -> Engine:
    return card_engine(card, slots, budget)


@lru_cache(maxsize=64)
def _with_phase(engine: Engine, phase: float) -> LinearCost:
    cost = linear(engine)
    return LinearCost(cost.decode, replace(cost.prefill, constant=phase), cost.mixed)


def linear(engine: Engine) -> LinearCost:
    """The engine's cost, which on cards is always of this form."""
    assert isinstance(engine.cost, LinearCost)
    return engine.cost


def card_cost(card: str, phase: float | None = None) -> LinearCost:
    """What steps cost on a card, with another fixed cost of a prefill step if given."""
    engine = _engine(card, 64, BUDGET)
    return linear(engine) if phase is None else _with_phase(engine, phase)


def _exclusive(run: Run, end: float) -> float:
    """The share of the time between its first plan and the end in which EB+ ran exclusive batches."""
    modes = run.plans.get("gauge.exclusive")
    if modes is None:
        return nan
    lasted = np.diff(np.append(run.plans["time"], end))
    return float((lasted * modes).sum() / lasted.sum())
