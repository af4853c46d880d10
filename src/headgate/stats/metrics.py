"""TTFT, time between tokens, throughput, goodput, use of the engine, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.core.request import OUTPUT_SERVICE
from headgate.cost.card import load_card
from headgate.cost.model import Chunk, Shape
from headgate.record.tables import ENDS, Flags, Floats, Integers, Run
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


@dataclass(frozen=True)
class Goodput:
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

    @property
    def lost(self) -> float:
        """Of all, the share that was neither served to the end nor is still there."""
        return (self.abandoned + self.aborted + self.refused) / self.total if self.total else math.nan


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
    weight: float | None  # None: requests of the class have several, by their priorities
    background: bool
    evictions: int  # over the whole run
    token_rate: float  # prompt and output tokens a second of the requests that finished in the window


@dataclass(frozen=True)
class KindMetrics:
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
    e2e: Figures
    request_rate: Estimate
    output_rate: Estimate  # output tokens of the requests that finished
    total_rate: Estimate  # and their prompts
    goodput: Goodput | None
    longest_gap: float  # between two tokens of one request
    engine: EngineUse
    kinds: tuple[KindMetrics, ...]
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
        plain: dict[str, Any] = without_nan(asdict(self))
        for name in ("prefix_cache", "value_kept", "tenants", "bursts"):
            if getattr(self, name) in (None, False):
                del plain[name]
        for row in plain["kinds"]:
            if row["standing"] is None:
                del row["standing"]
        return plain


def summarise(run: Run | Measured, window: str = "middle") -> Metrics:
    """All figures of a run.

    By default (`window="middle"`) warm-up and cool-down are left out: latencies come from the requests that
    were neither among the first 10 % nor among the last 10 % to be sent, and rates are taken between the
    moments when 10 % and 90 % of the finishes had happened. `window="all"` takes everything. With fewer than
    20 finished requests nothing is left out. The rule that was used is part of the result.

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
    run, chosen, latencies = measured.run, measured.window, measured.latencies
    sample, longest, promises = measured.gap_sample, measured.longest, measured.promises
    requests, (begin, end) = run.requests, run.span()
    value = None
    if promises is not None and weighed(run):
        judged, worth = chosen.keep & promises.judged, weights(run)
        value = _share(worth[judged & promises.met], float(worth[judged].sum()))
    each, outputs = np.ones(len(requests["id"])), requests["output"].astype(float)
    # the mean gap by batch: the decode time of its requests over their gaps
    decode, deliveries = (per_batch(chosen.batch, part) for part in (latencies.decode, latencies.deliveries))
    gaps = Spread.of_ratio(decode, deliveries)
    return Metrics(
        measured.window_name, chosen.rule, chosen.seconds, end - begin, _counts(run, chosen),
        ttft=_latency(latencies.ttft, chosen),
        tpot=_latency(latencies.tpot, chosen),
        itl=figures(sample.values, gaps, sample.weights),
        e2e=_latency(latencies.e2e, chosen),
        request_rate=rate_spread(chosen, each).estimate().cut(),
        output_rate=rate_spread(chosen, outputs).estimate().cut(),
        total_rate=rate_spread(chosen, outputs + requests["prompt"]).estimate().cut(),
        goodput=_goodput(promises, chosen, each > 0),
        longest_gap=_largest(longest[chosen.keep]),
        engine=_engine(run, chosen),
        kinds=tuple(_kind(run, kind, chosen, latencies, longest, promises) for kind in range(len(run.kinds))),
        stationary=measured.trend.stationary, reason=measured.trend.reason,
        prefix_cache=prefix_hits(run),
        value_kept=value,
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


def share_spread(promises: Promises, window: Window) -> Spread:
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
    rows, kind, mine = run.requests, run.kinds[number], run.requests["kind"] == number
    every = latencies.ttft, latencies.tpot, latencies.e2e
    ttft, tpot, e2e = (_latency(np.where(mine, values, np.nan), window) for values in every)
    standing = None
    if weighed(run):
        counted = window.counted[mine[window.counted]]
        tokens = float((rows["prompt"][counted] + rows["output"][counted]).sum())
        rate = tokens / window.seconds if window.seconds > 0 else math.nan
        evictions, background = int(rows["evictions"][mine].sum()), bool(kind.get("background"))
        worth = {*weights(run)[mine].tolist()}
        standing = Standing(worth.pop() if len(worth) == 1 else None, background, evictions, rate)
    return KindMetrics(
        str(kind.get("name", "")), kind.get("first_token"), kind.get("between_tokens"),
        between_kind=between_kind(kind),
        measured=int(np.sum(mine & window.keep)),
        completed=int(np.sum(mine & run.completed())),
        ttft=ttft, tpot=tpot, e2e=e2e,
        longest_gap=_largest(longest[mine & window.keep]),
        goodput=_goodput(promises, window, mine) if promised(kind) else None,
        standing=standing,
    )  # fmt: skip


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
    return float(part.sum()) / whole if whole else math.nan


def _largest(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else math.nan


def without_nan(value: Any) -> Any:
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
    )


def _saved(run: Run, cached: Integers) -> Floats | None:
    try:
        seconds = load_card(run.meta["card"]).cost.seconds
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


# -- what tenants got, and how far one got ahead of another that waited

MOST = 12  # tenants listed one by one; the rest are one row
MOMENTS = 20_000  # at which service is compared, at most


@dataclass(frozen=True)
class TenantShare:
    """One tenant over the whole run; `service` are the prompt tokens and twice the output tokens it got."""

    name: str
    requests: int
    service: float
    kept: float  # share of its promised requests, of those that are measured; NaN without any
    contended: float = math.nan  # its share of what the waiting got while it and another waited


@dataclass(frozen=True)
class TenantFigures:
    """`apart` is the most tokens of service by which one gained on the other in any stretch of time in which
    both had a request that waited for admission: what fair queueing bounds.
    """

    tenants: tuple[TenantShare, ...]  # by service, the largest first
    rest: TenantShare | None  # those beyond `MOST`, summed
    apart: float  # NaN: no two ever waited at the same time
    ahead: str  # which gained
    behind: str


def compute_tenants(run: Run, window: Window, promises: Promises | None) -> TenantFigures | None:
    """None where the run does not say whose its requests are, or all are of one."""
    if "tenant" not in run.requests:
        return None
    known, places = np.unique(run.requests["tenant"], return_inverse=True)
    numbers = known.tolist()
    if len(numbers) < 2:
        return None
    rows, started = run.requests, np.isfinite(run.requests["first_token"])
    service_of = np.where(started, rows["prompt"] + OUTPUT_SERVICE * rows["output"], 0.0)
    served = np.bincount(places, weights=service_of)
    order = [numbers[place] for place in np.argsort(-served, kind="stable")]
    names = run.tenants
    judged = window.keep & promises.judged if promises else window.keep

    def share(name: str, mine: Flags, contended: float = math.nan) -> TenantShare:
        kept = promises.met[mine & judged] if promises else np.empty(0)
        share_kept = float(kept.mean()) if len(kept) else math.nan
        return TenantShare(name, int(mine.sum()), float(service_of[mine].sum()), share_kept, contended)

    def named(number: int) -> str:
        return (names[number] or "-") if number < len(names) else str(number)

    shown, others = order[:MOST], order[MOST:]
    mine_of = {number: rows["tenant"] == number for number in shown}
    apart, ahead, behind, while_both = _furthest(run, mine_of)
    return TenantFigures(
        tenants=tuple(share(named(each), mine_of[each], while_both[each]) for each in shown),
        rest=share(f"{len(others)} others", np.isin(rows["tenant"], others)) if others else None,
        apart=apart,
        ahead="" if math.isnan(apart) else named(ahead),
        behind="" if math.isnan(apart) else named(behind),
    )


def _furthest(run: Run, rows: dict[int, Flags]) -> tuple[float, int, int, dict[int, float]]:
    """The most that one tenant gained on another while both waited, which, on which; and `contended`."""
    requests, end = run.requests, run.span()[1]
    times = np.unique(np.concatenate([requests[name] for name in ("arrival", "admitted", "first_token")]))
    times = np.unique(np.append(times[~np.isnan(times)], end))
    if len(times) > MOMENTS:
        times = times[np.linspace(0, len(times) - 1, MOMENTS).astype(np.int64)]
    served = {number: served_by(run, mine, times) for number, mine in rows.items()}
    left = np.where(np.isnan(requests["admitted"]), requests["finished"], requests["admitted"])
    left = np.where(np.isnan(left), np.inf, left)
    waits = {}
    for number, mine in rows.items():
        came, gone = (
            _summed(at[mine], np.ones(int(mine.sum())), times) for at in (requests["arrival"], left)
        )
        waits[number] = (came - gone > 0) & (times < end)
    crowd = np.sum([*waits.values()], axis=0) > 1
    got = {each: np.diff(served[each], append=served[each][-1]) * waits[each] * crowd for each in rows}
    every = np.sum([*got.values()], axis=0)
    sums = {each: float(every[waits[each]].sum()) for each in rows}
    shares = {each: float(got[each].sum()) / sums[each] if sums[each] > 0 else math.nan for each in rows}
    furthest, ahead, behind = math.nan, -1, -1
    for one, other in combinations(rows, 2):
        both = waits[one] & waits[other]
        lead = served[one] - served[other]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], both, [False])).astype(np.int8)))
        for begin, stop in zip(edges[::2], edges[1::2], strict=True):
            # what the stretch up to its end brought counts too: the moment after the last is its end
            stretch = lead[begin : min(stop + 1, len(lead))]
            gain = float((stretch - np.minimum.accumulate(stretch)).max())
            loss = float((np.maximum.accumulate(stretch) - stretch).max())
            for most, first, second in ((gain, one, other), (loss, other, one)):
                if not most <= furthest:
                    furthest, ahead, behind = most, first, second
    return furthest, ahead, behind, shares


def served_by(run: Run, mine: Flags, times: Floats, output: float = OUTPUT_SERVICE) -> Floats:
    """Service by then: a prompt with its first token, outputs evenly from there to the last."""
    rows, end = run.requests, run.span()[1]
    got = mine & np.isfinite(rows["first_token"])
    first = rows["first_token"][got]
    last = np.where(np.isnan(rows["finished"][got]), end, rows["finished"][got])
    pace = output * rows["output"][got] / np.maximum(last - first, 1e-9)
    prompts = _summed(first, rows["prompt"][got].astype(np.float64), times)
    # a ramp is its pace times (time - first) less the same from its last token on
    begun = _summed(first, pace, times) * times - _summed(first, pace * first, times)
    ended = _summed(last, pace, times) * times - _summed(last, pace * last, times)
    return np.asarray(prompts + begun - ended)


def _summed(moments: Floats, values: Floats, times: Floats) -> Floats:
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    return np.asarray(sums[np.searchsorted(moments[order], times, side="right")])


# -- fleets, engine by engine


@dataclass(frozen=True)
class Range:
    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class RolePool:
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
    run, window = measured.run, measured.window
    replicas = len(np.unique(run.steps["replica"]))
    engines = run.meta.get("engines") or (replicas if replicas > 1 else 0)
    if not engines:
        return None
    roles = np.array(run.meta.get("roles") or ["any"] * engines)
    start, replica = run.steps["start"], run.steps["replica"]
    stop, seconds = start + run.steps["seconds"], window.seconds if window.seconds > 0 else math.nan
    inside = np.clip(stop, window.low, window.high) - np.clip(start, window.low, window.high)
    busy = np.bincount(replica, inside, minlength=engines) / seconds
    decodes = np.bincount(replica, inside * run.steps["decodes"], minlength=engines) / seconds
    peak = np.zeros(engines)
    np.maximum.at(peak, replica, run.steps["kv"].astype(np.float64))
    done = run.requests["replica"][run.completed()]
    served = np.bincount(done[done >= 0], minlength=engines)

    def pool(role: str) -> RolePool:
        mine = roles == role
        columns = (column[mine] for column in (busy, decodes, served, peak))
        ranges = (Range(float(one.min()), float(one.mean()), float(one.max())) for one in columns)
        return RolePool(role, int(mine.sum()), *ranges)

    by_kind: dict[str, float] = {}
    prices = run.meta.get("prices") or {}
    if prices and window.seconds > 0:
        rows, requests = window.counted, run.requests
        worth = prices["prompt"] * requests["prompt"][rows] + prices["output"] * requests["output"][rows]
        sums = np.bincount(requests["kind"][rows].astype(np.int64), worth, minlength=len(run.kinds))
        for kind, amount in zip(run.kinds, sums.tolist(), strict=True):
            by_kind[str(kind.get("name", ""))] = float(amount) / window.seconds
    total = sum(by_kind.values()) if by_kind else math.nan
    return FleetFigures(
        engines=engines,
        router=str(run.meta.get("router", "")),
        pools=tuple(pool(role) for role in dict.fromkeys(roles.tolist())),
        busy=tuple(busy.tolist()),
        requests=tuple(served.tolist()),
        revenue=total,
        revenue_per_engine=total / engines,
        kind_revenue=by_kind,
        prices=dict(prices),
    )
