"""Arrival processes: when the requests of an open loop come."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from headgate.core.errors import InputError, unknown
from headgate.workloads.streams import stream
from headgate.workloads.workload import Real


@dataclass(frozen=True)
class Rated:
    rate: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < (value := getattr(self, field.name)) < np.inf:
                raise InputError(f"{field.name} of arrivals is {value:g}; give a number above 0")


@dataclass(frozen=True)
class Poisson(Rated):
    """Independent arrivals at a rate per second: gaps are exponential."""

    def draw(self, count: int, generator: np.random.Generator) -> Real:
        return np.cumsum(generator.exponential(1 / self.rate, count))


@dataclass(frozen=True)
class GammaArrivals(Rated):
    """Gamma gaps at a rate per second: below 1 burstier than Poisson, 1 the same law, above 1 more even.

    The parameter has the meaning of `vllm bench serve --burstiness`: it is the shape of the gaps. We do not
    stretch the times to hit the rate exactly, as that tool does, so that the load varies as in the law.
    """

    burstiness: float = 1.0

    def draw(self, count: int, generator: np.random.Generator) -> Real:
        return np.cumsum(generator.gamma(self.burstiness, 1 / (self.rate * self.burstiness), count))


@dataclass(frozen=True)
class Constant(Rated):
    def draw(self, count: int, generator: np.random.Generator) -> Real:
        return np.arange(1, count + 1) / self.rate


@dataclass(frozen=True)
class AllAtOnce:
    def draw(self, count: int, generator: np.random.Generator) -> Real:
        return np.zeros(count)


# Each draws sorted arrival times in seconds, the first one gap after the start.
ArrivalProcess = Poisson | GammaArrivals | Constant | AllAtOnce
NAMES = ("poisson", "gamma", "constant", "all-at-once")


def arrival_process(name: str, rate: float | None = None, burstiness: float | None = None) -> ArrivalProcess:
    """The arrival process of this name; burstiness belongs to `gamma` alone.

    Examples:
        >>> import headgate
        >>> headgate.arrival_process("poisson", rate=20.0)
        Poisson(rate=20.0)
    """
    if name not in NAMES:
        raise unknown("arrival process", name, NAMES)
    if burstiness is not None and name != "gamma":
        raise InputError(f"arrivals {name!r} have no burstiness; drop it or choose 'gamma'")
    if name == "all-at-once":
        if rate is not None:
            raise InputError("arrivals 'all-at-once' have no rate; drop it or choose 'poisson'")
        return AllAtOnce()
    if rate is None:
        raise InputError(f"arrivals {name!r} need a rate; give requests per second")
    if name == "gamma":
        return GammaArrivals(rate, 1.0 if burstiness is None else burstiness)
    return Poisson(rate) if name == "poisson" else Constant(rate)


# -- arrivals written down in coarse ticks

LEAST_TICK = 0.5  # seconds; below, an engine's own steps are as coarse
LEAST_REQUESTS = 20
SHARED = 3.0  # requests at one moment, on average, from which on arrivals are bursts
ALIKE = 0.9  # of the distances between moments are whole multiples of the smallest


def tick_of(arrival: Real) -> float:
    moments = np.unique(arrival)
    if len(arrival) < LEAST_REQUESTS or len(moments) < 3 or len(arrival) < SHARED * len(moments):
        return 0.0
    gaps = np.diff(moments)
    tick = float(gaps.min())
    whole = np.abs(gaps / tick - np.rint(gaps / tick)) < 0.01
    return tick if tick >= LEAST_TICK and whole.mean() >= ALIKE else 0.0


def spread(arrival: Real, tick: float, seed: int) -> Real:
    """Each request somewhere in its tick, drawn evenly; order stays by time."""
    draws = stream(seed, "ticks").random(len(arrival)) * tick
    return np.sort(arrival + draws)
