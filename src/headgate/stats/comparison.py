"""Policies on the same requests: paired differences with intervals, never bare means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headgate.core.errors import InputError, unknown
from headgate.record.tables import Run
from headgate.stats.figures import Estimate, Spread
from headgate.stats.metrics import without_nan
from headgate.stats.pairing import ALONE, METRICS, Measured, Metric, refuse_different

BETTER, WORSE, SAME = "better", "worse", "no difference seen"
TOO_FEW, ONE_SEED, UNKNOWN = "too few requests", "needs more seeds", "not measured"


@dataclass(frozen=True)
class Difference:
    """One policy against the baseline: its value, the paired difference, absolute and in percent."""

    value: float
    absolute: Estimate
    percent: Estimate
    verdict: str


@dataclass(frozen=True)
class Row:
    """One metric over all policies.

    `best` has the best value; by their paired difference from it, `level` are those that cannot be told
    from it, `apart` those that can. Others may well be told from each other although none is apart.
    """

    metric: str
    unit: str
    higher_is_better: bool
    method: str  # what the runs were paired by
    baseline: Estimate
    others: dict[str, Difference]
    best: str | None
    level: tuple[str, ...]
    apart: tuple[str, ...]

    @property
    def winner(self) -> str | None:
        """The best policy, None when no other can be told from it."""
        return self.best if self.apart else None


@dataclass(frozen=True)
class Comparison:
    """Policies compared with a baseline, metric by metric."""

    baseline: str
    policies: tuple[str, ...]  # the baseline first
    seeds: int
    rule: str  # what was left out of each run
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what to mind when reading it

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for strict JSON: what is not known is None."""
        plain = asdict(self)
        for row, found in zip(plain["rows"], self.rows, strict=True):
            row["winner"] = found.winner
        return dict(without_nan(plain))


def compare(runs: Mapping[str, Sequence[Run]], baseline: str, window: str = "middle") -> Comparison:
    """Compare the runs of several policies on the same requests with those of the baseline.

    With several seeds (the same, in the same order for every policy) differences are paired by seed.
    With one, they are paired within the run: means and percentiles by 20 batches of consecutive arrivals,
    rates by 20 equal shares of the finishes. Intervals are 95 % t intervals of the paired differences that
    mind how neighbouring batches depend on each other (`errors.py`). The longest gap of one run against
    that of another has none. Each row says how it was paired.
    """
    if baseline not in runs:
        raise unknown("baseline", baseline, runs)
    if len(runs) < 2:
        raise InputError("a comparison needs at least two policies; name another")
    seeds = len(runs[baseline])
    for name, own in runs.items():
        if len(own) != seeds or not seeds:
            raise InputError(f"{name!r} has {len(own)} runs, {baseline!r} has {seeds}; run the same seeds")
        for run, other in zip(own, runs[baseline], strict=True):
            refuse_different(name, run, baseline, other)
    order = (baseline, *(name for name in runs if name != baseline))
    measured = {name: Measured.of(runs[name], window) for name in order}
    rows = tuple(row for metric in METRICS if (row := _row(metric, measured, baseline, seeds)) is not None)
    rule = measured[baseline].metrics[0].rule
    return Comparison(baseline, order, seeds, rule, rows, (*_notes(measured), *_rough(rows)))


def _row(metric: Metric, measured: Mapping[str, Measured], baseline: str, seeds: int) -> Row | None:
    """One metric; None when no policy has it (goodput when nothing was promised, losses of nobody)."""
    spreads = {name: found.spreads[metric.name] for name, found in measured.items()}
    known = [name for name, spread in spreads.items() if not math.isnan(spread.value)]
    if not known or (metric.rare and not any(spreads[name].value for name in known)):
        return None
    no_interval = ONE_SEED if seeds == 1 and metric.method == ALONE else TOO_FEW
    others = {
        name: _difference(spread, spreads[baseline], metric.higher, no_interval)
        for name, spread in spreads.items()
        if name != baseline
    }
    sign = -1 if metric.higher else 1
    best = min(known, key=lambda name: sign * spreads[name].value)
    apart = tuple(name for name in known if _apart(spreads[name].minus(spreads[best]).estimate()))
    level = tuple(name for name in known if name != best and name not in apart)
    method = metric.method if seeds == 1 else "by seed"
    estimate = spreads[baseline].estimate()
    estimate = estimate.as_share() if metric.unit == "share" else estimate.cut()
    return Row(metric.name, metric.unit, metric.higher, method, estimate, others, best, level, apart)


def _difference(spread: Spread, base: Spread, higher: bool, no_interval: str) -> Difference:
    """The paired difference and what it says; `no_interval` is the verdict when there is none.

    Percent is the same interval over the measured baseline, so that it never contradicts the verdict. It is
    cut at -100 %, below which nothing can fall that is not negative.
    """
    absolute = spread.minus(base).estimate()
    scale = 100 / base.value if base.value else math.nan
    low, high = (
        None if end is None or math.isnan(scale) else end * scale for end in (absolute.low, absolute.high)
    )
    percent = Estimate(absolute.value * scale, low, high, absolute.rough).cut(-100.0)
    if math.isnan(absolute.value):
        verdict = UNKNOWN
    elif absolute.low is None:
        verdict = no_interval
    elif not _apart(absolute):
        verdict = SAME
    else:
        verdict = BETTER if (absolute.value > 0) == higher else WORSE
    return Difference(spread.value, absolute, percent, verdict)


def _apart(difference: Estimate) -> bool:
    """Whether the interval of a difference leaves out zero."""
    return difference.low is not None and difference.high is not None and difference.low * difference.high > 0


def _notes(measured: Mapping[str, Measured]) -> list[str]:
    """What could mislead: runs that were not stationary, and requests only some policies served."""
    unsettled: dict[str, list[str]] = {}
    for name, found in measured.items():
        reasons = dict.fromkeys(one.reason for one in found.metrics if not one.stationary)
        for reason in list(reasons)[:1]:  # one seed's reason is enough to be warned
            unsettled.setdefault(reason, []).append(name)
    notes = [f"not stationary: {', '.join(names)} ({reason})" for reason, names in unsettled.items()]
    served = {name: sum(one.counts.completed for one in found.metrics) for name, found in measured.items()}
    if len(set(served.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in served.items())
        notes.append(f"not the same number of requests was served to the end: {listed}")
    return notes


def _rough(rows: Sequence[Row]) -> list[str]:
    """Which intervals of differences are to be taken with care."""
    names = [row.metric for row in rows if any(found.absolute.rough for found in row.others.values())]
    listed = ", ".join(names)
    return [f"rough intervals, batches too alike, take more requests or seeds: {listed}"] if names else []
