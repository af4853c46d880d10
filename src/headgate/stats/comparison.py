"""Policies on the same requests: paired differences with intervals, never bare means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from headgate.core.errors import InputError, unknown
from headgate.record.tables import Floats, Run
from headgate.stats.figures import (
    BATCHES,
    Estimate,
    PartOrder,
    Spread,
    batches,
    left_out,
    quantiles,
    spread_of_mean,
)
from headgate.stats.measured import Measured
from headgate.stats.metrics import Metrics, rate_spread, share_spread, without_nan

BETTER, WORSE, SAME = "better", "worse", "no difference seen"
NEAR = 0.25  # values further apart than this share of the larger are never called level
CANNOT_TELL = "cannot tell"  # a difference within the error of a card that was not measured
TOO_FEW, ONE_SEED, UNKNOWN = "too few requests", "needs more seeds", "not measured"
GROWS, UNSETTLED, ABOVE = "backlog grows", "not stationary", "above the bound"  # no verdict on throughput
EDGES = 1.01  # of the bound; by more a rate exceeds it only through what was served outside the window
CHANCE = 0.25  # of the seeds; so many may look as if they had a trend where there is none (docs/metrics.md)


@dataclass(frozen=True)
class Difference:
    value: float
    absolute: Estimate
    percent: Estimate
    verdict: str


@dataclass(frozen=True)
class MetricRow:
    """`best` has the best value; by their paired difference from it, `level` are those that cannot be told
    from it, `apart` those that can. A policy that is neither was measured too badly to say: without an
    interval, or with one so wide that values far apart cannot be told from each other. Others may well be
    told from each other although none is apart.
    """

    metric: str
    unit: str
    higher_is_better: bool
    method: str  # what the runs were paired by
    baseline: Estimate
    others: dict[str, Difference]
    best: str | None = None
    level: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def winner(self) -> str | None:
        return self.best if self.apart else None


@dataclass(frozen=True)
class Whole:
    """From the first arrival to the last finish, of all seeds."""

    served: int
    seconds: float

    @classmethod
    def of(cls, own: Sequence[Measured]) -> Whole:
        spans = (one.run.span() for one in own)
        served = sum(int(one.run.completed().sum()) for one in own)
        return cls(served, sum(end - begin for begin, end in spans))

    @property
    def rate(self) -> float:
        return self.served / self.seconds if self.seconds > 0 else math.nan

    @classmethod
    def rates(cls, own: Sequence[Measured]) -> tuple[Estimate, Estimate]:
        """Of requests, and of the tokens of those that were served to their end."""
        whole, tokens = cls.of(own), 0.0
        for one in own:
            requests, done = one.run.requests, one.run.completed()
            tokens += float((requests["prompt"] + requests["output"])[done].sum())
        return Estimate(whole.rate), Estimate(tokens / max(whole.seconds, 1e-9))


@dataclass(frozen=True)
class Comparison:
    """`doubts` says of a policy why its throughput is not compared: in the measured window its backlog grows
    or it is not stationary in another way, so that the order in which it serves decides how many requests end
    there, or it serves more there than any policy can in the long run. `whole` can be compared instead.
    """

    baseline: str
    policies: tuple[str, ...]  # the baseline first
    seeds: int
    rule: str  # what was left out of each run
    rows: tuple[MetricRow, ...]
    notes: tuple[str, ...]  # what to mind when reading it
    doubts: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    bound: float | None = None  # requests/s that no policy exceeds, where it is known

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for plain_row, row in zip(plain["rows"], self.rows, strict=True):
            plain_row["winner"] = row.winner
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
    mind how neighbouring batches depend on each other (`figures.half_width`). The longest gap of one run
    against that of another has none. Each row says how it was paired.

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
    errors = CardErrors.of(measured)
    doubts = doubts_of(measured, bound)
    for name in doubts:  # in an open loop the order of service decides what ends in the window
        if all(one.run.sending == "open" for one in measured[name]):
            for metric, rate in zip((REQUESTS, TOKENS), Whole.rates(measured[name]), strict=True):
                every[name][metric] = Spread(rate.value, np.empty(0))
    rows = tuple(
        row
        for metric in METRICS
        if (row := _row(metric, every, baseline, seeds, errors, doubts if metric.method == SHARES else {}))
    )
    return Comparison(
        baseline,
        order,
        seeds,
        rule=measured[baseline][0].window.rule,
        rows=rows,
        notes=tuple(_notes(measured, rows, errors)),
        doubts=doubts,
        whole={name: Whole.of(own) for name, own in measured.items()},
        bound=bound,
    )


def doubts_of(measured: Mapping[str, Sequence[Measured]], bound: float | None) -> dict[str, str]:
    """Why the throughput of a policy says nothing about the long run; policies of which it does left out."""
    doubts: dict[str, str] = {}
    for name, own in measured.items():
        unsettled = [one for one in own if not one.trend.stationary]
        served = sum(one.metrics.request_rate.value for one in own) / len(own)
        if len(unsettled) > CHANCE * len(own):
            doubts[name] = GROWS if any(one.trend.growing for one in unsettled) else UNSETTLED
        elif bound is not None and served > EDGES * bound:
            doubts[name] = ABOVE
    return doubts


class CardErrors(NamedTuple):
    """How far a card that was not measured may be off, in percent: rates, and times. Zero for others."""

    rates: float = 0.0
    times: float = 0.0

    @classmethod
    def of(cls, measured: Mapping[str, Sequence[Measured]]) -> CardErrors:
        errors = [one.run.meta.get("expected_error") or {} for own in measured.values() for one in own]
        rates = max((float(error.get("throughput", 0.0)) for error in errors), default=0.0)
        steps = (error.get(kind, 0.0) for error in errors for kind in ("decode", "prefill", "mixed"))
        return cls(100 * rates, 100 * max(map(float, steps), default=0.0))


def _row(
    metric: Metric,
    every: Mapping[str, Mapping[str, Spread]],
    baseline: str,
    seeds: int,
    errors: CardErrors,
    doubts: Mapping[str, str],
) -> MetricRow | None:
    """One metric; None when no policy has it (goodput when nothing was promised, or no request was lost).

    Policies in doubt get no verdict, and are neither the best nor told from it.
    """
    spreads = {name: own[metric.name] for name, own in every.items()}
    error = errors.rates if metric.higher else errors.times
    known = [name for name, spread in spreads.items() if not math.isnan(spread.value)]
    if not known or (metric.rare and not any(spreads[name].value for name in known)):
        return None
    untested = ONE_SEED if seeds == 1 and metric.method == ALONE else TOO_FEW
    others = {
        name: _difference(spread, spreads[baseline], metric.higher, untested, error)
        for name, spread in spreads.items()
        if name != baseline
    }
    for name, other in others.items():
        if why := doubts.get(name) or doubts.get(baseline):
            others[name] = replace(other, verdict=why)
    estimate = spreads[baseline].estimate()
    row = MetricRow(
        metric.name,
        metric.unit,
        metric.higher,
        method=metric.method if seeds == 1 else "by seed",
        baseline=estimate.as_share() if metric.unit == "share" else estimate.cut(),
        others=others,
    )
    known = [name for name in known if name not in doubts]
    if not known:
        return row
    sign = -1 if metric.higher else 1
    best = min(known, key=lambda name: sign * spreads[name].value)
    top = spreads[best].value
    least = abs(top) * error / 100
    behind = {name: spreads[name].minus(spreads[best]).estimate() for name in known if name != best}
    apart = tuple(name for name, gap in behind.items() if _apart(gap, least))
    # a test was made and saw nothing, and there is not much that it could have missed
    near = {name: max(least, NEAR * max(abs(spreads[name].value), abs(top))) for name in behind}
    tested = [name for name, gap in behind.items() if gap.low is not None and name not in apart]
    level = tuple(name for name in tested if abs(behind[name].value) <= near[name])
    return replace(row, best=best, level=level, apart=apart)


def _difference(spread: Spread, base: Spread, higher: bool, untested: str, error: float = 0.0) -> Difference:
    """The paired difference and what it says; `untested` is the verdict when there is none.

    Percent is the same interval over the measured baseline, so that it never contradicts the verdict. It is
    cut at -100 %, below which nothing can fall that is not negative. `error` is the card's in percent.
    """
    absolute = spread.minus(base).estimate()
    scale = 100 / base.value if base.value else math.nan
    ends = absolute.low, absolute.high
    low, high = (None if end is None or math.isnan(scale) else end * scale for end in ends)
    percent = Estimate(absolute.value * scale, low, high, absolute.rough).cut(-100.0)
    if math.isnan(absolute.value):
        verdict = UNKNOWN
    elif absolute.low is None:
        verdict = untested
    elif not _apart(absolute):
        verdict = SAME
    elif error and not abs(percent.value) > error:
        verdict = CANNOT_TELL
    else:
        verdict = BETTER if (absolute.value > 0) == higher else WORSE
    return Difference(spread.value, absolute, percent, verdict)


def _notes(
    measured: Mapping[str, Sequence[Measured]], rows: Sequence[MetricRow], errors: CardErrors
) -> Iterator[str]:
    unsettled: dict[str, list[str]] = {}
    for name, own in measured.items():
        trend = next((one.trend for one in own if not one.trend.stationary), None)
        if trend is not None:
            unsettled.setdefault(trend.said, []).append(name)
    for said, names in unsettled.items():
        yield f"{said} ({', '.join(names)})"
    served = {name: sum(one.metrics.counts.completed for one in own) for name, own in measured.items()}
    if len(set(served.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in served.items())
        yield f"Different numbers of requests were served to the end: {listed}"
    if rough := [row.metric for row in rows if any(one.absolute.rough for one in row.others.values())]:
        listed = ", ".join(rough)
        yield f"Intervals unreliable: samples are correlated ({listed}); use more requests or seeds"
    if errors.rates:
        close = [row.metric for row in rows if any(one.verdict == CANNOT_TELL for one in row.others.values())]
        yield (
            f"The card was derived, not measured: differences within {errors.rates:.0f} % of a rate or "
            f"{errors.times:.0f} % of a time cannot be told{': ' * bool(close)}{', '.join(close)}"
        )


def _apart(difference: Estimate, least: float = 0.0) -> bool:
    if difference.low is None or difference.high is None or abs(difference.value) < least:
        return False
    return difference.low * difference.high > 0


# -- metrics that are compared

SAME_MOMENT = 1e-9  # seconds; arrivals closer than this are the same


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    higher: bool  # is better
    read: Callable[[Metrics], float]
    method: str  # how runs of one seed are paired
    rare: bool = False  # shown only when some run has any


SHARES = "by 20 equal shares of the finishes"
MEANS = "by request in 20 batches of consecutive arrivals"
TAILS = "by what each batch of arrivals adds to the percentile"
ALONE = "not at all for the longest gap (one seed: no interval)"


REQUESTS, TOKENS = "request throughput", "total token throughput"
METRICS = (
    Metric(REQUESTS, "requests/s", True, lambda run: run.request_rate.value, SHARES),
    Metric(TOKENS, "tokens/s", True, lambda run: run.total_rate.value, SHARES),
    Metric("mean TTFT", "s", False, lambda run: run.ttft.mean.value, MEANS),
    Metric("p99 TTFT", "s", False, lambda run: run.ttft.p99, TAILS),
    Metric("mean TPOT", "s", False, lambda run: run.tpot.mean.value, MEANS),
    Metric("p99 ITL", "s", False, lambda run: run.itl.p99, TAILS),
    Metric("mean E2E", "s", False, lambda run: run.e2e.mean.value, MEANS),
    Metric("longest gap", "s", False, lambda run: run.longest_gap, ALONE),
    Metric("goodput", "share", True, lambda run: run.goodput.share.value if run.goodput else math.nan, MEANS),
    Metric("lost requests", "share", False, lambda run: run.counts.lost, MEANS, rare=True),
)


def spreads_of(runs: Sequence[Measured]) -> dict[str, Spread]:
    """Each metric of one policy with its spread: over the seeds, or over batches within its only run."""
    if len(runs) == 1:
        return _within(runs[0])
    values = {metric.name: np.array([metric.read(one.metrics) for one in runs]) for metric in METRICS}
    return {name: Spread.of_values(column) for name, column in values.items()}


def _within(found: Measured) -> dict[str, Spread]:
    """Every metric of one run, with its deviations by batch; the longest gap has none.

    A run has one longest gap, and the longest of a part says nothing of how far that of another run
    would be from it.
    """
    run, chosen, latencies, promises = found.run, found.window, found.latencies, found.promises
    requests, total = run.requests, len(run.requests["id"])
    means = {"mean TTFT": latencies.ttft, "mean TPOT": latencies.tpot, "mean E2E": latencies.e2e}
    value = {metric.name: metric.read(found.metrics) for metric in METRICS}
    spreads = {name: spread_of_mean(chosen.batch, column, value[name]) for name, column in means.items()}
    spreads["request throughput"] = rate_spread(chosen, np.ones(total))
    tokens = requests["prompt"] + requests["output"]
    spreads["total token throughput"] = rate_spread(chosen, tokens.astype(np.float64))
    spreads["goodput"] = Spread(math.nan, np.empty(0)) if promises is None else share_spread(promises, chosen)
    lost = ((requests["how"] >= 0) & ~run.completed()).astype(np.float64)
    spreads["lost requests"] = spread_of_mean(batches(np.ones(total, bool)), lost, value["lost requests"])
    tails = {
        "longest gap": np.empty(0),
        "p99 TTFT": left_out(chosen.batch, latencies.ttft, 0.99),
        "p99 ITL": _gap_influence(found, 0.99),
    }
    return spreads | {name: Spread(value[name], parts, PartOrder.BATCHES) for name, parts in tails.items()}


def _gap_influence(found: Measured, share: float) -> Floats:
    """What each batch adds to a quantile of all gaps, whose number makes its slope well known.

    A batch with more gaps beyond the quantile than its part pulls it up by the excess times the slope of
    the quantile function, taken half of the tail to either side. Deviations sum to zero around the pooled
    quantile itself, so centre and spread belong together.
    """
    window, gaps = found.window, found.gaps
    if not np.any(window.batch >= 0):
        return np.empty(0)
    pooled, reach = found.gap_sample, (1.0 - share) / 2
    total = int(pooled.weights.sum())
    if not total:
        return np.full(BATCHES, math.nan)
    low, middle, high = quantiles(pooled.values, pooled.weights, (share - reach, share, share + reach))
    samples = [gaps.sample(window.batch == number) for number in range(BATCHES)]
    number = np.array([float(sample.weights.sum()) for sample in samples])
    beyond = np.array([float(sample.weights[sample.values > middle].sum()) for sample in samples])
    excess = beyond - number * (beyond.sum() / total)
    return np.asarray(excess * (BATCHES / total) * (high - low) / (2 * reach), np.float64)


def _open_part(run: Run) -> Run:
    kinds = [place for place, kind in enumerate(run.kinds) if kind.get("name") in run.meta["clients_beside"]]
    rows = ~np.isin(run.requests["kind"], kinds)
    requests = {name: column[rows] for name, column in run.requests.items()}
    meta = {**run.meta, "clients_beside": None}
    return replace(run, meta=meta, requests={**requests, "id": np.arange(int(rows.sum()))})


def refuse_different(name: str, run: Run, baseline: str, other: Run) -> None:
    """Only runs that met the same requests can be compared.

    Arrivals may differ in a closed loop, where a request is sent when another ends. Outputs must agree
    where both served the request to its end. Of runs with clients beside an open loop, the open loop counts.
    """
    where = f"{name!r} and {baseline!r} did not meet the same requests"
    if run.meta.get("clients_beside") and run.kinds == other.kinds:
        if run.meta["clients_beside"] != other.meta.get("clients_beside"):
            raise InputError(f"{where}: the clients of their classes differ; use one workload and seed")
        run, other = _open_part(run), _open_part(other)
    ours, theirs = run.requests, other.requests
    if run.sending != other.sending or run.kinds != other.kinds:
        raise InputError(f"{where}: one was sent {run.sending}, the other {other.sending}, or kinds differ")
    if len(ours["id"]) != len(theirs["id"]):
        numbers = f"{len(ours['id'])} against {len(theirs['id'])}"
        raise InputError(f"{where}: {numbers} of them; use one workload and seed")
    both = run.completed() & other.completed()
    differs = {column: ours[column] != theirs[column] for column in ("id", "kind", "prompt")}
    differs["output"] = both & (ours["output"] != theirs["output"])
    if run.sending != "closed":
        differs["arrival"] = np.abs(ours["arrival"] - theirs["arrival"]) > SAME_MOMENT
    for column, rows in differs.items():
        if np.any(rows):
            first = int(ours["id"][np.argmax(rows)])
            raise InputError(f"{where}: {column} of request {first} differs; use one workload and seed")
