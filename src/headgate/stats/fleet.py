"""A fleet engine by engine: how busy each was, what it served, and what the requests brought."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headgate.record.tables import Floats, Integers, Run
from headgate.stats.flow import Window
from headgate.stats.measured import Measured
from headgate.stats.metrics import without_nan


@dataclass(frozen=True)
class Range:
    """The least, the mean and the most over engines."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, values: Floats | Integers) -> Range:
        if not len(values):
            return cls(math.nan, math.nan, math.nan)
        return cls(float(values.min()), float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class RolePool:
    """The engines of one role."""

    role: str
    engines: int
    busy: Range  # share of the time in steps, however full
    decodes: Range  # that run at once, mean over the time
    requests: Range  # served to their end there; those of a prefill engine end elsewhere
    kv_peak: Range  # tokens


@dataclass(frozen=True)
class FleetFigures:
    """What one sees only with many engines. Revenue is per second of the window, of the whole fleet."""

    engines: int
    router: str
    pools: tuple[RolePool, ...]
    busy: tuple[float, ...]  # engine by engine
    requests: tuple[int, ...]
    revenue: float  # of requests served to their end; NaN where no prices are known
    revenue_per_engine: float
    kind_revenue: dict[str, float]
    prices: dict[str, float]  # of a prompt and an output token

    def as_dict(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))


def compute_fleet(measured: Measured) -> FleetFigures | None:
    """The figures of a fleet; None for a run of one engine without a router. `Measured.fleet` keeps them."""
    run, window = measured.run, measured.window
    replicas = len(np.unique(run.steps["replica"]))
    engines = run.meta.get("engines") or (replicas if replicas > 1 else 0)
    if not engines:
        return None
    roles = np.array(run.meta.get("roles") or ["any"] * engines)
    busy, decodes = _busy(run, window, engines)
    peak = np.zeros(engines)
    np.maximum.at(peak, run.steps["replica"], run.steps["kv"].astype(np.float64))
    done = run.requests["replica"][run.completed()]
    served = np.bincount(done[done >= 0], minlength=engines)
    pools = tuple(
        RolePool(role, int(mine.sum()), *(Range.of(column[mine]) for column in (busy, decodes, served, peak)))
        for role in dict.fromkeys(roles.tolist())
        if len(mine := roles == role)
    )
    by_kind = _revenue(run, window)
    total = sum(by_kind.values()) if by_kind else math.nan
    return FleetFigures(
        engines=engines,
        router=str(run.meta.get("router", "")),
        pools=pools,
        busy=tuple(busy.tolist()),
        requests=tuple(served.tolist()),
        revenue=total,
        revenue_per_engine=total / engines,
        kind_revenue=by_kind,
        prices=dict(run.meta.get("prices") or {}),
    )


def _busy(run: Run, window: Window, engines: int) -> tuple[Floats, Floats]:
    """The share of the window that each engine spent in steps, and its mean number of decodes in it."""
    start, end = run.steps["start"], run.steps["start"] + run.steps["seconds"]
    inside = np.clip(end, window.low, window.high) - np.clip(start, window.low, window.high)
    seconds = window.seconds if window.seconds > 0 else math.nan
    spent = np.bincount(run.steps["replica"], inside, minlength=engines)
    served = np.bincount(run.steps["replica"], inside * run.steps["decodes"], minlength=engines)
    return np.asarray(spent / seconds, np.float64), np.asarray(served / seconds, np.float64)


def _revenue(run: Run, window: Window) -> dict[str, float]:
    """Per second, by kind: prompt and output tokens of the requests that finished in the window."""
    prices = run.meta.get("prices")
    if not prices or window.seconds <= 0:
        return {}
    requests, rows = run.requests, window.counted
    worth = prices["prompt"] * requests["prompt"][rows] + prices["output"] * requests["output"][rows]
    kinds = np.bincount(requests["kind"][rows].astype(np.int64), worth, minlength=len(run.kinds))
    return {
        str(kind.get("name", "")): float(amount) / window.seconds
        for kind, amount in zip(run.kinds, kinds.tolist(), strict=True)
    }
