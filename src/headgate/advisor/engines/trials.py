"""Runs of a fleet for a search over its size: every count of engines with every seed, in processes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.slo import measure
from headgate.advisor.capacity.traffic import Traffic
from headgate.advisor.capacity.trials import longest_stay
from headgate.core.errors import RunError
from headgate.record.tables import Run
from headgate.stats.windows import choose
from headgate.workloads.workload import Workload


class Way(NamedTuple):
    """How a fleet serves: its router and the policy of its engines, each with settings."""

    router: str
    policy: str
    router_settings: dict[str, Any]
    settings: dict[str, Any]


class Trial(NamedTuple):
    """One run: a way to serve on so many engines with a seed."""

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
        busy, seats = utilisation(run, trial.engines, self.seats)
        return Outcome(
            ratio=kept.ratio,
            worst=str(kept.worst),
            values=kept.values,
            shares=kept.shares,
            busy=busy,
            seats=seats,
            stay=longest_stay(run),
        )


def utilisation(run: Run, engines: int, seats: int) -> tuple[float, float]:
    """Shares of the engines' time in steps and of their seats taken by decodes, where rates are measured."""
    window = choose(run)
    start, seconds = run.steps["start"], run.steps["seconds"]
    inside = np.minimum(start + seconds, window.high) - np.maximum(start, window.low)
    inside = np.maximum(inside, 0.0) / (engines * max(window.seconds, np.finfo(float).tiny))
    return float(inside.sum()), float((inside * run.steps["decodes"]).sum()) / seats
