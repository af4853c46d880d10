"""Policies on the same requests: paired differences with intervals, never bare means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.record.tables import Run
from headgate.stats.figures import Estimate, Spread
from headgate.stats.measured import Measured
from headgate.stats.metrics import without_nan
from headgate.stats.pairing import ALONE, METRICS, SHARES, Metric, refuse_different, spreads_of

BETTER, WORSE, SAME = "better", "worse", "no difference seen"
NEAR = 0.25  # values further apart than this share of the larger are never called level
CANNOT_TELL = "cannot tell"  # a difference within the error of a card that was not measured
TOO_FEW, ONE_SEED, UNKNOWN = "too few requests", "needs more seeds", "not measured"
GROWS, UNSETTLED, ABOVE = "backlog grows", "not stationary", "above the bound"  # no verdict on throughput
EDGES = 1.01  # of the bound; by more a rate exceeds it only through what was served outside the window
CHANCE = 0.25  # of the seeds; so many may look as if they had a trend where there is none (docs/metrics.md)


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
    from it, `apart` those that can. Who is neither was measured too badly to say: without an interval, or
    with one so wide that values far apart cannot be told from each other. Others may well be told from each
    other although none is apart.
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
class Whole:
    """What a policy served over its whole runs, from the first arrival to the last finish."""

    served: int
    seconds: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.served / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class Comparison:
    """Policies compared with a baseline, metric by metric.

    `doubts` says of a policy why its throughput is not compared: in the measured window its backlog grows or
    it is not stationary in another way, so that the order in which it serves decides how many requests end
    there, or it serves more there than any policy can in the long run. `whole` can be compared instead.
    """

    baseline: str
    policies: tuple[str, ...]  # the baseline first
    seeds: int
    rule: str  # what was left out of each run
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what to mind when reading it, as JSON has it
    cautions: tuple[str, ...] = ()  # the same as a report says it
    doubts: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    bound: float | None = None  # requests/s that no policy exceeds, where it is known

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for strict JSON: what is not known is None."""
        plain = asdict(self)
        del plain["cautions"]
        for row, found in zip(plain["rows"], self.rows, strict=True):
            row["winner"] = found.winner
        return dict(without_nan(plain))


def compare(
    runs: Mapping[str, Sequence[Run | Measured]],
    baseline: str,
    window: str = "middle",
    bound: float | None = None,
) -> Comparison:
    """Compare the runs of several policies on the same requests with those of the baseline.

    With several seeds (the same, in the same order for every policy) differences are paired by seed.
    With one, they are paired within the run: means and percentiles by 20 batches of consecutive arrivals,
    rates by 20 equal shares of the finishes. Intervals are 95 % t intervals of the paired differences that
    mind how neighbouring batches depend on each other (`intervals.py`). The longest gap of one run against
    that of another has none. Each row says how it was paired.

    Throughputs get no verdict where one of the two runs is not stationary or serves more than `bound`.
    """
    if baseline not in runs:
        raise unknown("baseline", baseline, runs)
    if len(runs) < 2:
        raise InputError("a comparison needs at least two policies; name another")
    order = (baseline, *(name for name in runs if name != baseline))
    measured = {name: [Measured.of(run, window) for run in runs[name]] for name in order}
    seeds = len(runs[baseline])
    for name, own in measured.items():
        if len(own) != seeds or not seeds:
            raise InputError(f"{name!r} has {len(own)} runs, {baseline!r} has {seeds}; run the same seeds")
        for one, other in zip(own, measured[baseline], strict=True):
            refuse_different(name, one.run, baseline, other.run)
    every = {name: spreads_of(own) for name, own in measured.items()}
    bars = _bars(measured)
    doubts = _doubts(measured, bound)
    rows = tuple(
        row
        for metric in METRICS
        if (row := _row(metric, every, baseline, seeds, bars, doubts if metric.method == SHARES else {}))
    )
    rule = measured[baseline][0].window.rule
    cautions = (*_unsettled(measured), *_unequal(measured), *_rough(rows), *_derived(rows, bars))
    notes, said = (tuple(each[place] for each in cautions) for place in (0, 1))
    whole = {name: _whole(own) for name, own in measured.items()}
    return Comparison(baseline, order, seeds, rule, rows, notes, said, doubts, whole, bound)


def _whole(own: Sequence[Measured]) -> Whole:
    spans = (one.run.span() for one in own)
    return Whole(sum(int(one.run.completed().sum()) for one in own), sum(end - begin for begin, end in spans))


def _doubts(measured: Mapping[str, Sequence[Measured]], bound: float | None) -> dict[str, str]:
    """Why the throughput of a policy says nothing about the long run; policies of which it does left out."""
    found: dict[str, str] = {}
    for name, own in measured.items():
        unsettled = [one for one in own if not one.trend.stationary]
        served = sum(one.metrics.request_rate.value for one in own) / len(own)
        if len(unsettled) > CHANCE * len(own):
            grows = any(one.trend.growth > 0 for one in unsettled)
            found[name] = GROWS if grows else UNSETTLED
        elif bound is not None and served > EDGES * bound:
            found[name] = ABOVE
    return found


Caution = tuple[str, str]  # what could mislead, as JSON has it and as a report says it


class Bars(NamedTuple):
    """How far a card that was not measured may be off, in percent: rates, and times. Zero for others."""

    rates: float = 0.0
    times: float = 0.0

    def of(self, metric: Metric) -> float:
        """The one for a metric: rates are those of which more is better."""
        return self.rates if metric.higher else self.times


def _bars(measured: Mapping[str, Sequence[Measured]]) -> Bars:
    """The widest among the runs."""
    kinds = ("decode", "prefill", "mixed")
    found = [one.run.meta.get("expected_error") or {} for own in measured.values() for one in own]
    rates = max((float(each.get("throughput", 0.0)) for each in found), default=0.0)
    times = max((float(each.get(kind, 0.0)) for each in found for kind in kinds), default=0.0)
    return Bars(100 * rates, 100 * times)


def _derived(rows: Sequence[Row], bars: Bars) -> list[Caution]:
    """Which differences are real in simulation and still no answer."""
    if not bars.rates:
        return []
    names = [row.metric for row in rows if any(each.verdict == CANNOT_TELL for each in row.others.values())]
    listed = f": {', '.join(names)}" if names else ""
    note = f"the card was derived, not measured: differences within {bars.rates:.0f} % of a rate or "
    note += f"{bars.times:.0f} % of a time cannot be told{listed}"
    return [(note, note[0].upper() + note[1:])]


def _row(
    metric: Metric,
    every: Mapping[str, Mapping[str, Spread]],
    baseline: str,
    seeds: int,
    bars: Bars,
    doubts: Mapping[str, str],
) -> Row | None:
    """One metric; None when no policy has it (goodput when nothing was promised, or no request was lost).

    Policies in doubt get no verdict, and are neither the best nor told from it.
    """
    spreads = {name: found[metric.name] for name, found in every.items()}
    known = [name for name, spread in spreads.items() if not math.isnan(spread.value)]
    if not known or (metric.rare and not any(spreads[name].value for name in known)):
        return None
    no_interval = ONE_SEED if seeds == 1 and metric.method == ALONE else TOO_FEW
    others = {
        name: _difference(spread, spreads[baseline], metric.higher, no_interval, bars.of(metric))
        for name, spread in spreads.items()
        if name != baseline
    }
    for name, other in others.items():
        if why := doubts.get(name) or doubts.get(baseline):
            others[name] = replace(other, verdict=why)
    method = metric.method if seeds == 1 else "by seed"
    estimate = spreads[baseline].estimate()
    estimate = estimate.as_share() if metric.unit == "share" else estimate.cut()
    known = [name for name in known if name not in doubts]
    if not known:
        return Row(metric.name, metric.unit, metric.higher, method, estimate, others, None, (), ())
    sign = -1 if metric.higher else 1
    best = min(known, key=lambda name: sign * spreads[name].value)
    least = abs(spreads[best].value) * bars.of(metric) / 100
    behind = {name: spreads[name].minus(spreads[best]).estimate() for name in known if name != best}
    apart = tuple(name for name, gap in behind.items() if _apart(gap, least))
    level = tuple(
        name for name, gap in behind.items() if _level(gap, least, spreads[name].value, spreads[best].value)
    )
    return Row(metric.name, metric.unit, metric.higher, method, estimate, others, best, level, apart)


def _difference(spread: Spread, base: Spread, higher: bool, no_interval: str, bar: float = 0.0) -> Difference:
    """The paired difference and what it says; `no_interval` is the verdict when there is none.

    Percent is the same interval over the measured baseline, so that it never contradicts the verdict. It is
    cut at -100 %, below which nothing can fall that is not negative. `bar` is the card's error in percent.
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
    elif bar and not abs(percent.value) > bar:
        verdict = CANNOT_TELL
    else:
        verdict = BETTER if (absolute.value > 0) == higher else WORSE
    return Difference(spread.value, absolute, percent, verdict)


def _apart(difference: Estimate, least: float = 0.0) -> bool:
    """Whether the interval of a difference leaves out zero, and it is more than `least`."""
    if difference.low is None or difference.high is None or abs(difference.value) < least:
        return False
    return difference.low * difference.high > 0


def _level(difference: Estimate, least: float, *values: float) -> bool:
    """Whether a test was made and saw nothing, and there is not much that it could have missed."""
    if difference.low is None or _apart(difference, least):
        return False
    return abs(difference.value) <= max(least, NEAR * max(map(abs, values)))


def _unsettled(measured: Mapping[str, Sequence[Measured]]) -> list[Caution]:
    """Runs that are not stationary; the reason of one seed is enough."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, own in measured.items():
        trend = next((one.trend for one in own if not one.trend.stationary), None)
        if trend is not None:
            found.setdefault((trend.reason, trend.said), []).append(name)
    return [
        (f"not stationary: {', '.join(names)} ({reason})", f"{said} ({', '.join(names)})")
        for (reason, said), names in found.items()
    ]


def _unequal(measured: Mapping[str, Sequence[Measured]]) -> list[Caution]:
    """Requests that only some policies served."""
    served = {name: sum(one.metrics.counts.completed for one in own) for name, own in measured.items()}
    if len(set(served.values())) == 1:
        return []
    listed = ", ".join(f"{name} {number}" for name, number in served.items())
    note = f"not the same number of requests was served to the end: {listed}"
    return [(note, f"Different numbers of requests were served to the end: {listed}")]


def _rough(rows: Sequence[Row]) -> list[Caution]:
    """Which intervals of differences are to be taken with care."""
    names = [row.metric for row in rows if any(found.absolute.rough for found in row.others.values())]
    if not names:
        return []
    listed = ", ".join(names)
    note = f"rough intervals, batches too alike, take more requests or seeds: {listed}"
    said = f"Intervals unreliable: samples are correlated ({listed}); use more requests or seeds"
    return [(note, said)]
