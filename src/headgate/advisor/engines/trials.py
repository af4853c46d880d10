"""Runs of a fleet for a search over its size: every count of engines with every seed, in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.memory import Kept
from headgate.advisor.capacity.search import Fewest
from headgate.advisor.capacity.slo import measure
from headgate.advisor.capacity.traffic import Traffic
from headgate.advisor.capacity.trials import Progress, longest_stay
from headgate.core.errors import RunError
from headgate.experiment.workers import Workers, as_they_end
from headgate.record.tables import Run
from headgate.stats.windows import choose
from headgate.workloads.workload import Workload

EXPECTED = 6  # counts tried by a search, for the progress bar


class Way(NamedTuple):
    """How a fleet serves: its router and the policy of its engines, each with settings."""

    router: str
    policy: str
    router_settings: dict[str, Any]
    settings: dict[str, Any]


class Trial(NamedTuple):
    """One run: a way to serve, by name, on so many engines with a seed."""

    name: str
    way: Way
    engines: int
    seed: int


class Outcome(NamedTuple):
    """How a run stands to its levels, and how busy the engines were; one that stopped misses them all."""

    ratio: float
    worst: str
    values: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    busy: float = 0.0  # share of the engines' time in steps
    seats: float = 0.0  # share of their seats with a decode
    stay: float = 0.0  # seconds from the arrival to the end of a request, the longest


Serve = Callable[[Way, int, int, Workload], Run]  # way, engines, seed, requests


class FleetCase(NamedTuple):
    """All that runs share."""

    serve: Serve
    traffic: Traffic
    rate: float
    seats: int  # of an engine

    def run(self, trial: Trial) -> Outcome:
        requests = self.traffic.at(self.rate, trial.seed)
        try:
            run = self.serve(trial.way, trial.engines, trial.seed, requests)
            kept = measure(run, self.traffic.levels)
        except RunError as error:
            return Outcome(inf, f"the run stopped: {error}")
        used = utilisation(run, trial.engines, self.seats)
        return Outcome(kept.ratio, str(kept.worst), kept.values, kept.shares, *used, longest_stay(run))


def utilisation(run: Run, engines: int, seats: int) -> tuple[float, float]:
    """Shares of the engines' time in steps and of their seats taken by decodes, where rates are measured."""
    window = choose(run)
    start, seconds = run.steps["start"], run.steps["seconds"]
    inside = np.minimum(start + seconds, window.high) - np.maximum(start, window.low)
    inside = np.maximum(inside, 0.0) / (engines * max(window.seconds, np.finfo(float).tiny))
    return float(inside.sum()), float((inside * run.steps["decodes"]).sum()) / seats


Searches = dict[str, Fewest]  # by what the way is called
Outcomes = dict[tuple[str, int, int], Outcome]  # by name, engines and seed


def search_fewest(
    case: FleetCase,
    ways: dict[str, Way],
    searches: Searches,
    seeds: range,
    workers: Workers,
    progress: Progress,
    memory: Kept[Trial, Outcome] | None = None,
) -> Outcomes:
    """Every search to its end. A count is enough when it is enough with every seed.

    Seeds after the first that misses are not run, except with one engine fewer than the answer, or the most,
    which are shown. What runs ahead did beyond is left out, so any number of processes gives the same.
    Interrupted, it returns what was found by then; with no count tried, it passes the interrupt on.
    """
    ran: Outcomes = {}
    total = EXPECTED * len(searches) * len(seeds)
    try:
        with progress("searching", total) as report, workers.start(case.run, total) as pool:

            def run(asked: dict[str, int], whole: bool) -> None:
                trials = (
                    Trial(name, ways[name], count, seed)
                    for seed in seeds
                    for name, count in asked.items()
                    if (name, count, seed) not in ran and (whole or _keeps(ran, name, count, seeds))
                )
                for trial, outcome in as_they_end(pool, _unknown(trials, ran, memory)):
                    ran[trial.name, trial.engines, trial.seed] = outcome
                    report(min(len(ran), total - 1))
                    if memory:
                        memory.put(trial, outcome)

            while asked := {name: count for name, search in searches.items() if (count := search.next())}:
                run(asked, whole=False)
                for name, count in asked.items():
                    searches[name].tell(count, 0.0 if _keeps(ran, name, count, seeds) else inf)
            shown = {name: search.too_few for name, search in searches.items()}
            run({name: count for name, count in shown.items() if count in searches[name].tried}, whole=True)
    except KeyboardInterrupt:
        if not any(search.tried for search in searches.values()):
            raise
    return dict(_in_order(ran, searches, seeds))


def _unknown(trials: Iterable[Trial], ran: Outcomes, memory: Kept[Trial, Outcome] | None) -> Iterator[Trial]:
    """Trials that must be run; outcomes that are known from before are as good as run."""
    for trial in trials:
        if memory and (outcome := memory.get(trial)) is not None:
            ran[trial.name, trial.engines, trial.seed] = outcome
        else:
            yield trial


def _keeps(ran: Outcomes, name: str, count: int, seeds: range) -> bool:
    """Whether no seed that ran missed a level."""
    return all(ran[name, count, seed].ratio <= 1 for seed in seeds if (name, count, seed) in ran)


def _in_order(
    ran: Outcomes, searches: Searches, seeds: range
) -> Iterator[tuple[tuple[str, int, int], Outcome]]:
    """Of each count that was judged the seeds up to the first that missed; all of the one that is shown."""
    for name, search in searches.items():
        for count in search.tried:
            for seed in seeds:
                if (key := (name, count, seed)) not in ran:
                    break
                yield key, ran[key]
                if count != search.too_few and not ran[key].ratio <= 1:
                    break
