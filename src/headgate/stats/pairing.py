"""What two runs on the same requests are compared by: each metric with the spread of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headgate.core.errors import InputError
from headgate.record.tables import Floats, Run
from headgate.stats.figures import BATCHES, Spread, batches, left_out, quantiles, spread_of_mean
from headgate.stats.intervals import Order
from headgate.stats.measured import Measured
from headgate.stats.metrics import Metrics, rate_spread, share_spread

SAME_MOMENT = 1e-9  # seconds; arrivals closer than this are the same


@dataclass(frozen=True)
class Metric:
    """One line of a comparison. Times in seconds."""

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
METRICS = (
    Metric("request throughput", "requests/s", True, lambda found: found.request_rate.value, SHARES),
    Metric("total token throughput", "tokens/s", True, lambda found: found.total_rate.value, SHARES),
    Metric("mean TTFT", "s", False, lambda found: found.ttft.mean.value, MEANS),
    Metric("p99 TTFT", "s", False, lambda found: found.ttft.p99, TAILS),
    Metric("mean TPOT", "s", False, lambda found: found.tpot.mean.value, MEANS),
    Metric("p99 ITL", "s", False, lambda found: found.itl.p99, TAILS),
    Metric("mean E2E", "s", False, lambda found: found.e2e.mean.value, MEANS),
    Metric("longest gap", "s", False, lambda found: found.longest_gap, ALONE),
    Metric("goodput", "share", True, lambda found: _kept(found), MEANS),
    Metric("lost requests", "share", False, lambda found: _lost(found), MEANS, rare=True),
)


def _kept(found: Metrics) -> float:
    """Share of the requests whose promises were kept, NaN when nothing was promised."""
    return found.goodput.share.value if found.goodput else math.nan


def _lost(found: Metrics) -> float:
    """Share of all requests of the run that were abandoned, aborted or refused."""
    counts = found.counts
    lost = counts.abandoned + counts.aborted + counts.refused
    return lost / counts.total if counts.total else math.nan


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
    return spreads | {name: Spread(value[name], parts, Order.BATCHES) for name, parts in tails.items()}


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


def refuse_different(name: str, run: Run, baseline: str, other: Run) -> None:
    """Only runs that met the same requests can be compared.

    Arrivals may differ in a closed loop, where a request is sent when another ends. Outputs must agree
    where both served the request to its end.
    """
    ours, theirs = run.requests, other.requests
    where = f"{name!r} and {baseline!r} did not meet the same requests"
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
