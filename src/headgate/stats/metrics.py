"""TTFT, time between tokens, throughput, goodput, use of the engine, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.cost.card import recorded_card
from headgate.cost.model import Chunk, Shape
from headgate.record.tables import ENDS, Flags, Floats, Integers, Run
from headgate.stats import flow
from headgate.stats.figures import Estimate, Figures, PartOrder, Spread, figures, per_batch, spread_of_mean
from headgate.stats.flow import Window
from headgate.stats.measured import (
    Latencies,
    Measured,
    Promises,
    between_kind,
    promised,
    speculates,
    weighed,
    weights,
)
from headgate.stats.tenants import TenantFigures, compute_tenants


@dataclass(frozen=True)
class Goodput:
    """Share of the requests whose promises were kept, and how many of them per second."""

    share: Estimate
    rate: Estimate


@dataclass(frozen=True)
class Counts:
    """What became of the requests of the whole run; `measured` are those that latencies are taken from."""

    total: int
    measured: int
    completed: int
    aborted: int
    abandoned: int
    refused: int
    unfinished: int


@dataclass(frozen=True)
class EngineUse:
    """What the engines did in the window (preemptions: in the whole run). Shares lie between 0 and 1.

    KV is averaged over the time steps ran, per replica; within a row of equal steps it is taken to grow
    by the row's tokens at each step.
    """

    replicas: int
    utilisation: float  # time in steps, of all time
    kv_mean: float  # tokens
    kv_peak: float
    kv_tokens: float  # what one replica can hold, NaN when not said
    steps: dict[str, float]  # share of the steps that were "mixed", "decode" or "prefill"
    time: dict[str, float]  # share of the time in them
    preemptions: int
    wasted: int  # KV tokens they dropped, to be computed again
    wasted_share: float  # of all tokens computed


@dataclass(frozen=True)
class Standing:
    """What a class is worth beside others, and what that meant for it."""

    weight: float | None  # None: by the priority of each request
    background: bool
    evictions: int  # over the whole run
    token_rate: float  # prompt and output tokens a second of the requests that finished in the window


@dataclass(frozen=True)
class KindMetrics:
    """The same figures for one kind of request."""

    name: str
    first_token: float | None  # promises, in seconds
    between_tokens: float | None
    between_kind: str  # "gap": every gap of a request, "mean": its TPOT, or "envelope"
    measured: int
    completed: int  # over the whole run
    ttft: Figures
    tpot: Figures
    e2e: Figures
    longest_gap: float
    goodput: Goodput | None
    standing: Standing | None = None  # None: no class has a weight, and none is background work


@dataclass(frozen=True)
class CacheHits:
    """Of the prompt tokens of admitted requests, those that were found when they were first admitted."""

    tokens: int
    share: float
    saved: float | None  # seconds by the card: whole prompts alone, less their rest behind what was found


@dataclass(frozen=True)
class PrefixHits:
    """Over the whole run; `evicted` are cached blocks that were taken for other content, None: not known."""

    all: CacheHits
    evicted: int | None
    kinds: dict[str, CacheHits]
    engines: dict[int, CacheHits]
    evicted_by_engine: dict[int, int]


@dataclass(frozen=True)
class Metrics:
    """All figures of one run. Times in seconds, rates per second."""

    window: str
    rule: str  # what was left out, in words
    seconds: float  # the time rates are taken over
    duration: float  # of the whole run
    counts: Counts
    ttft: Figures
    tpot: Figures
    itl: Figures
    itl_exact: bool  # false: gaps were gathered in bins 0.1 % wide
    e2e: Figures
    request_rate: Estimate
    output_rate: Estimate  # output tokens of the requests that finished
    total_rate: Estimate  # and their prompts
    goodput: Goodput | None
    longest_gap: float  # between two tokens of one request
    engine: EngineUse
    kinds: tuple[KindMetrics, ...]
    queue_times: tuple[float, ...]
    queue_lengths: tuple[int, ...]
    stationary: bool
    reason: str
    prefix_cache: PrefixHits | None = None  # None: there was none, or requests shared nothing
    value_kept: float | None = None  # weights of kept promises over those of all; None: none has a weight
    tenants: TenantFigures | None = None
    bursts: bool = False  # steps may bring several tokens: `itl` and `longest_gap` are between deliveries

    @property
    def rough(self) -> tuple[str, ...]:
        """Latencies whose batches are too alike: the interval of their mean, though widened, is rough."""
        means = {"TTFT": self.ttft, "TPOT": self.tpot, "ITL": self.itl, "E2E": self.e2e}
        return tuple(name for name, latency in means.items() if latency.mean.rough)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for strict JSON: what is not known is None."""
        plain: dict[str, Any] = without_nan(asdict(self))
        for name in ("prefix_cache", "value_kept", "tenants", "bursts"):
            if getattr(self, name) in (None, False):
                del plain[name]
        for kind, row in zip(self.kinds, plain["kinds"], strict=True):
            if kind.standing is None:
                del row["standing"]
        return plain


def summarise(run: Run | Measured, window: str = "middle") -> Metrics:
    """All figures of a run.

    By default (`window="middle"`) warm-up and cool-down are left out: latencies come from the requests
    that were neither among the first 10 % nor among the last 10 % to be sent, and rates are taken
    between the moments when 10 % and 90 % of the finishes had happened. `window="all"` takes
    everything. With fewer than 20 finished requests nothing is left out. The rule that was used is part
    of the result.

    Intervals of means and rates are 95 % t intervals over 20 consecutive batches (of requests in the
    order they were sent, or of finishes), widened where neighbouring batches are alike and cut at zero:
    there is none with fewer than 40 requests.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> run = headgate.simulate(engine, "mixed", headgate.Workload.of([512] * 100, [128] * 100))
        >>> figures = headgate.summarise(run)
        >>> figures.counts.completed, figures.stationary
        (100, False)
    """
    return Measured.of(run, window).metrics


def compute_metrics(measured: Measured) -> Metrics:
    """The figures themselves; `Measured.metrics` keeps them."""
    run, chosen, latencies = measured.run, measured.window, measured.latencies
    sample, longest, promises = measured.gap_sample, measured.longest, measured.promises
    requests, (begin, end) = run.requests, run.span()
    times, lengths = flow.queue_length(run)
    each, outputs = np.ones(len(requests["id"])), requests["output"].astype(float)
    return Metrics(
        measured.window_name, chosen.rule, chosen.seconds, end - begin, _counts(run, chosen),
        ttft=_latency(latencies.ttft, chosen),
        tpot=_latency(latencies.tpot, chosen),
        itl=figures(sample.values, gap_spread(latencies, chosen), sample.weights),
        itl_exact=sample.exact,
        e2e=_latency(latencies.e2e, chosen),
        request_rate=rate_spread(chosen, each).estimate().cut(),
        output_rate=rate_spread(chosen, outputs).estimate().cut(),
        total_rate=rate_spread(chosen, outputs + requests["prompt"]).estimate().cut(),
        goodput=_goodput(promises, chosen, each > 0),
        longest_gap=_largest(longest[chosen.keep]),
        engine=_engine(run, chosen),
        kinds=tuple(_kind(run, kind, chosen, latencies, longest, promises) for kind in range(len(run.kinds))),
        queue_times=tuple(times.tolist()), queue_lengths=tuple(lengths.tolist()),
        stationary=measured.trend.stationary, reason=measured.trend.reason,
        prefix_cache=prefix_hits(run),
        value_kept=_value_kept(run, chosen, promises),
        tenants=compute_tenants(run, chosen, promises),
        bursts=speculates(run),
    )  # fmt: skip


def rate_spread(window: Window, amount: Floats) -> Spread:
    """What finished requests brought per second of the window, by equal shares of the finishes."""
    if window.seconds <= 0:
        return Spread(math.nan, np.empty(0))
    if not len(window.edges):
        return Spread(float(amount[window.counted].sum()) / window.seconds, np.empty(0))
    return Spread.of_ratio(per_batch(window.share, amount), np.diff(window.edges), PartOrder.CURVE)


def gap_spread(latencies: Latencies, window: Window) -> Spread:
    """The mean gap between deliveries by batch: the decode time of its requests over their gaps."""
    gaps = per_batch(window.batch, latencies.deliveries)
    return Spread.of_ratio(per_batch(window.batch, latencies.decode), gaps)


def share_spread(promises: Promises, window: Window) -> Spread:
    """The share of judged requests whose promises were kept, by batch."""
    held = window.keep & promises.judged
    value = float(np.mean(promises.met[held])) if np.any(held) else math.nan
    return spread_of_mean(window.batch, np.where(promises.judged, promises.met, np.nan), value)


def _latency(values: Floats, window: Window) -> Figures:
    held = values[window.keep]
    return figures(held[~np.isnan(held)], spread_of_mean(window.batch, values, math.nan))


def _goodput(promises: Promises | None, window: Window, mine: Flags) -> Goodput | None:
    if promises is None:
        return None
    own = Promises(promises.judged & mine, promises.met & mine)
    rate = rate_spread(window, own.met.astype(float))
    return Goodput(share_spread(own, window).estimate().as_share(), rate.estimate().cut())


def _kind(
    run: Run, number: int, window: Window, latencies: Latencies, longest: Floats, promises: Promises | None
) -> KindMetrics:
    kind, mine = run.kinds[number], run.requests["kind"] == number
    ttft, tpot, e2e = (
        _latency(np.where(mine, values, np.nan), window)
        for values in (latencies.ttft, latencies.tpot, latencies.e2e)
    )
    return KindMetrics(
        str(kind.get("name", "")), kind.get("first_token"), kind.get("between_tokens"),
        between_kind=between_kind(kind),
        measured=int(np.sum(mine & window.keep)),
        completed=int(np.sum(mine & run.completed())),
        ttft=ttft, tpot=tpot, e2e=e2e,
        longest_gap=_largest(longest[mine & window.keep]),
        goodput=_goodput(promises, window, mine) if promised(kind) else None,
        standing=_standing(run, kind, window, mine) if weighed(run) else None,
    )  # fmt: skip


def _standing(run: Run, kind: dict[str, Any], window: Window, mine: Flags) -> Standing:
    rows = run.requests
    counted = window.counted[mine[window.counted]]
    tokens = float((rows["prompt"][counted] + rows["output"][counted]).sum())
    return Standing(
        weight=kind.get("weight"),
        background=bool(kind.get("background")),
        evictions=int(rows["evictions"][mine].sum()),
        token_rate=tokens / window.seconds if window.seconds > 0 else math.nan,
    )


def _value_kept(run: Run, window: Window, promises: Promises | None) -> float | None:
    """Of the requests that were promised anything and are measured."""
    if promises is None or not weighed(run):
        return None
    classes = np.array([promised(kind) for kind in run.kinds])[run.requests["kind"].astype(np.int64)]
    judged, worth = window.keep & promises.judged & classes, weights(run)
    return _share(worth[judged & promises.met], float(worth[judged].sum()))


def _counts(run: Run, window: Window) -> Counts:
    how = run.requests["how"]
    ended = {end: int(np.sum(how == number)) for number, end in enumerate(ENDS)}
    return Counts(
        total=len(how),
        measured=int(window.keep.sum()),
        completed=int(run.completed().sum()),
        aborted=ended[End.ABORTED],
        abandoned=ended[End.ABANDONED],
        refused=ended[End.REFUSED],
        unfinished=int(np.sum(how < 0)),
    )


def _engine(run: Run, window: Window) -> EngineUse:
    """Use of time and KV; a row that reaches over an edge of the window counts with its part inside."""
    steps = run.steps
    start, seconds = steps["start"], steps["seconds"]
    inside = np.clip(start + seconds, window.low, window.high) - np.clip(start, window.low, window.high)
    count = steps["count"] * np.divide(inside, seconds, out=np.zeros(len(start)), where=seconds > 0)
    decodes, prefill = steps["decodes"] > 0, steps["prefill"] > 0
    groups = {"mixed": decodes & prefill, "decode": decodes & ~prefill, "prefill": ~decodes & prefill}
    busy, number = float(inside.sum()), float(count.sum())
    grown = (steps["count"] - 1) / 2 * (steps["decodes"] + steps["prefill"])
    level = np.maximum(steps["kv"] - grown, 0.0)
    replicas = int(run.meta.get("engines") or max(len(np.unique(steps["replica"])), 1))
    computed = float(((steps["decodes"] + steps["prefill"]) * steps["count"]).sum())
    return EngineUse(
        replicas,
        utilisation=busy / (window.seconds * replicas) if window.seconds > 0 and len(start) else math.nan,
        kv_mean=_share(level * inside, busy),
        kv_peak=_largest(steps["kv"][inside > 0].astype(float)),
        kv_tokens=float(run.meta.get("kv_tokens") or math.nan),
        steps={name: _share(count[rows], number) for name, rows in groups.items()},
        time={name: _share(inside[rows], busy) for name, rows in groups.items()},
        preemptions=int(run.requests["evictions"].sum()),
        wasted=int(run.requests["wasted"].sum()),
        wasted_share=_share(run.requests["wasted"], computed),
    )


def _share(part: Floats, whole: float) -> float:
    """The sum of a part as a share of the whole, NaN of nothing."""
    return float(part.sum()) / whole if whole else math.nan


def _largest(values: Floats) -> float:
    """The largest known value, NaN when there is none."""
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else math.nan


def without_nan(value: Any) -> Any:
    """The same with None for every number that is not finite."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def prefix_hits(run: Run) -> PrefixHits | None:
    """None: the requests shared nothing that was known, or the engine had no cache."""
    rows, prompt = run.requests, run.requests["prompt"]
    cached = np.where(rows["cached"] < prompt, rows["cached"], 0)  # a whole prompt is KV from another engine
    evicted: Sequence[int] | None = run.meta.get("prefix_evicted")
    if evicted is None and not cached.any():
        return None
    served, saved = np.isfinite(rows["admitted"]), _saved(run, cached)

    def hits(part: Flags) -> CacheHits:
        tokens, whole = int(cached[part].sum()), int(prompt[part].sum())
        seconds = None if saved is None else float(saved[part].sum())
        return CacheHits(tokens, tokens / whole if whole else 0.0, seconds)

    engines = np.unique(rows["replica"][served]).tolist()
    kinds = {str(kind["name"]): place for place, kind in enumerate(run.kinds)}
    return PrefixHits(
        all=hits(served),
        evicted=None if evicted is None else sum(evicted),
        kinds={name: hits(served & (rows["kind"] == place)) for name, place in kinds.items()},
        engines={engine: hits(served & (rows["replica"] == engine)) for engine in engines},
        evicted_by_engine=dict(enumerate(evicted or ())),
    )


def _saved(run: Run, cached: Integers) -> Floats | None:
    """Seconds of prefill that each request was spared; None where the card is not there any more."""
    try:
        seconds = recorded_card(run.meta["card"]).cost.seconds
    except (InputError, KeyError, TypeError):
        return None
    saved = np.zeros(len(cached))
    prices: dict[tuple[int, int], float] = {}
    for row in np.flatnonzero(cached).tolist():
        prompt, there = pair = int(run.requests["prompt"][row]), int(cached[row])
        if pair not in prices:
            whole = Shape(prefill=prompt, chunks=(Chunk(0, prompt),))
            rest = Shape(prefill=prompt - there, behind=there, chunks=(Chunk(there, prompt - there),))
            prices[pair] = seconds(whole) - seconds(rest)
        saved[row] = prices[pair]
    return saved
