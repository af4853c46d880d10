"""Runs of the stochastic network for reproductions: one window after warming up, several seeds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any, NamedTuple

import numpy as np

from headgate.methods.fluid.plan import FluidPlan
from headgate_papers.network.counts import Window
from headgate_papers.network.run import run_network
from headgate_papers.serving import Options, Outcomes

WARM = 150.0  # seconds; a decode takes some 20 to 30
QUICK_SECONDS, QUICK_WARM, QUICK_ENGINES = 40.0, 20.0, 10


class NetworkJob(NamedTuple):
    """One router on one plan; `run` tells seeds apart."""

    key: Hashable
    plan: FluidPlan
    router: str
    engines: int
    seconds: float
    run: int = 0
    law: str = "exponential"
    settings: Mapping[str, Any] = {}
    warm: float = WARM


@dataclass(frozen=True)
class Measured:
    """What the runs of one key gave."""

    windows: tuple[Window, ...]

    def mean(self, figure: Callable[[Window], float]) -> float:
        """Averaged over seeds; NaN without a run."""
        return float(np.mean([figure(window) for window in self.windows])) if self.windows else nan

    def error(self, figure: Callable[[Window], float]) -> float:
        """Standard error over seeds; NaN with one."""
        if len(self.windows) < 2:
            return nan
        values = [figure(window) for window in self.windows]
        return float(np.std(values, ddof=1)) / sqrt(len(values))


def measured(outcomes: Outcomes, key: Hashable) -> Measured:
    """All runs of a key."""
    return Measured(outcomes.every(key))


def run(job: NetworkJob, seed: int) -> Window:
    """The window after warming up."""
    until = job.warm + job.seconds
    return run_network(
        job.plan, job.router, job.engines, seed + job.run, (job.warm,), until, job.law, job.settings
    )[0]


def short(job: NetworkJob, options: Options) -> NetworkJob:
    """To try things out: a small fleet for a short time."""
    if not options.quick:
        return job
    engines = min(job.engines, QUICK_ENGINES)
    return job._replace(engines=engines, seconds=QUICK_SECONDS, warm=QUICK_WARM)


def quick_note(options: Options) -> tuple[str, ...]:
    """What --quick did to the runs."""
    said = f"--quick: every fleet has at most {QUICK_ENGINES} engines and runs for {QUICK_SECONDS:.0f} s."
    return (said,) if options.quick else ()


def revenue(window: Window) -> float:
    """Bundled, per second and engine."""
    return window.revenue()


def level(number: int, kind: int | None = None) -> Callable[[Window], float]:
    """The mean of a level per engine, of one class or of all."""

    def figure(window: Window) -> float:
        mean = window.mean(number)
        return float(mean.sum() if kind is None else mean[kind])

    return figure
