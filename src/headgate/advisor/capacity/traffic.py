"""The traffic of a search, the same requests at any rate, and the service levels that its runs must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, isfinite, log10
from typing import NamedTuple

import numpy as np

from headgate.core.durations import duration
from headgate.core.errors import InputError, RunError, unknown
from headgate.core.request import GAP, Slo
from headgate.experiment import build
from headgate.experiment.settings import Experiment, flag, without_clients
from headgate.methods.bounds import Requests
from headgate.record.tables import Flags, Floats, Integers, Run
from headgate.settings_base import BETWEEN
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import quantiles
from headgate.stats.flow import unservable_rows
from headgate.stats.measured import Measured, envelopes
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.sessions import found_again
from headgate.workloads.streams import stream
from headgate.workloads.workload import Kind, Workload

SEARCHED, OTHER, PROMISE = "is what is searched for", "is another kind of load", "belongs into --slo"
LEAVE = "lets requests leave, which hides that they were late"
REFUSED = {"rate": SEARCHED, "clients": OTHER, "scale_rate": SEARCHED}
REFUSED |= {"stages": "change the load", "patience": LEAVE, "abort": LEAVE}
REFUSED |= dict.fromkeys(("ttft", "tbt", "tpot", "envelope"), PROMISE)
BOUND_FROM = 20_000  # requests drawn to know their law
LONGEST_BESIDE = 300.0  # seconds of a run beside clients
FEWEST_BESIDE = 60  # requests that it has at least


class Level(NamedTuple):
    """One service level: a statistic of a metric, of one class of requests ("": of all), within a limit.

    Without a statistic it is a promise that policies know and that is not checked.
    """

    metric: str
    limit: float
    statistic: str = ""
    kind: str = ""

    def __str__(self) -> str:
        limit = f"{1000 * self.limit:g} ms" if self.limit < 1 else f"{self.limit:g} s"
        of = f" of {self.kind}" if self.kind else ""
        metric = self.metric if self.metric in ("gap", "envelope") else self.metric.upper()
        return f"{self.statistic} {metric}{of} <= {limit}".lstrip()


def shares(rows: Workload) -> bool:
    return rows.contents is not None or bool(rows.cached.any())


@dataclass(frozen=True)
class SearchTraffic:
    """Requests at any rate and seed. `trace` holds the rows to draw from (or to replay); None: laws."""

    words: Experiment
    levels: tuple[Level, ...]
    classes: tuple[tuple[str, float], ...]
    requests: int
    trace: Workload | None
    recorded: bool  # the trace's own times, only faster or slower
    lost: build.Unservable = build.ALL_FIT

    @property
    def drawn(self) -> bool:
        return not self.recorded or bool(self.classes)

    def at(self, rate: float, seed: int) -> Workload:
        if self.trace is None:
            words = self.words.model_copy(update={"rate": rate, "requests": self.number(rate)})
            workload, _ = build.make_workload(words, seed)
        elif self.recorded:
            workload = self.trace.scale_rate(rate / own_rate(self.trace))
        else:
            name = self.words.arrivals or ("gamma" if self.words.burstiness else "poisson")
            process = arrival_process(name, rate, self.words.burstiness)
            workload = build.resampled(self.trace, self.number(rate), seed, process)
        if self.classes:
            shares = np.cumsum([share for _, share in self.classes])
            draws = stream(seed, "classes").random(len(workload)) * shares[-1]
            kind = np.searchsorted(shares[:-1], draws, side="right")
            names = tuple(Kind(name, priority=place) for place, (name, _) in enumerate(self.classes))
            workload = replace(workload, kind=kind, kinds=names, priority=kind.astype(np.int64))
        if self.trace is not None:
            workload = build.beside_clients(self.words, workload, seed)
        kinds = (kind._replace(slo=promise(self.levels, kind.name, kind.slo)) for kind in workload.kinds)
        return replace(workload, kinds=tuple(kinds))

    @property
    def at_rate(self) -> SearchTraffic:
        """Without the classes that clients send: their number depends on how long a run takes."""
        return replace(self, words=without_clients(self.words))

    @property
    def background_said(self) -> str:
        names = [share.name for share in self.words.classes if share.background]
        if not names or all(level.kind for level in self.levels):
            return ""
        of = ", ".join(names)
        return f"levels without a class are not about background work ({of}): nothing is promised to it"

    def lengths(self, engine: Engine) -> Requests:
        many = replace(self.at_rate, requests=max(self.requests, BOUND_FROM))
        rows = self.trace or many.at(1.0, self.words.seed)
        fits, prompts = rows.prompt < engine.longest, rows.prompt
        outputs = np.minimum(np.minimum(rows.output, rows.limit), engine.longest - prompts)[fits]
        if engine.prefix_cache and not (self.trace and not self.recorded):  # drawn rows share nothing
            prompts = prompts - found_again(rows, engine.block)  # no cache finds more than an endless one
        return Requests.of(prompts[fits], outputs - 1)

    def sharing_lost(self, engine: Engine) -> bool:
        return engine.prefix_cache and not self.recorded and self.trace is not None and shares(self.trace)

    def shares_content(self, engine: Engine) -> bool:
        known = self.rows.contents is not None and not self.sharing_lost(engine)
        return engine.prefix_cache and known

    @property
    def rows(self) -> Workload:
        return self.trace or self.at_rate.at(1.0, self.words.seed)

    def sharing_said(self, engine: Engine) -> str:
        rows = self.rows
        if not engine.prefix_cache or not shares(rows):
            return ""
        if self.sharing_lost(engine):
            return "rows drawn from the trace share nothing: no prompt is found in a cache; see --as-recorded"
        share = found_again(rows, engine.block).sum() / rows.prompt.sum()
        if rows.contents is None:
            return f"prefix caching is on: {share:.1%} of the prompt tokens are found, as recorded"
        return f"prefix caching is on: an endless cache would find {share:.1%} of the prompt tokens"

    def number(self, rate: float) -> int:
        """Requests of a run; beside clients, which leave no engine idle, of `LONGEST_BESIDE` at most."""
        if self.recorded or not any(share.clients for share in self.words.classes):
            return self.requests
        return min(self.requests, max(FEWEST_BESIDE, ceil(LONGEST_BESIDE * rate)))


def make_traffic(
    words: Experiment,
    levels: tuple[Level, ...],
    classes: str | None,
    requests: int,
    recorded: bool,
    engine: Engine,
) -> SearchTraffic:
    for word, why in REFUSED.items():
        if word in words.model_fields_set and getattr(words, word):
            raise InputError(f"in a capacity search {flag(word)} {why}; drop it")
    if words.arrivals == "all-at-once":
        raise InputError(
            "--arrivals all-at-once has no rate to search for; choose poisson, gamma or constant"
        )
    build.refuse_many(words.requests or 0)
    trace, lost = None, build.ALL_FIT
    if words.trace is not None:
        own = words.requests if recorded else None
        plain = {"arrivals": None, "burstiness": None, "requests": own, "classes": ()}
        trace, _ = build.make_workload(words.model_copy(update=plain))
        trace, lost = build.servable(trace, engine), build.unservable(trace, engine)
    if recorded:
        _check_recorded(words, trace)
    shares = parse_classes(classes)
    if shares and without_clients(words).classes:
        raise InputError("--classes and the classes of a mix; drop one of the two")
    count = len(trace) if recorded and trace is not None else words.requests or requests
    traffic = SearchTraffic(words, levels, shares, count, trace, recorded, lost)
    first = traffic.at_rate.at(1.0, words.seed)
    beside = [share for share in words.classes if share.clients]
    if beside:
        build.refuse_endless(build.beside_clients(words, first, words.seed), engine)
    _check_kinds(levels, [*(kind.name for kind in first.kinds), *(share.name for share in beside)])
    for share in words.classes:
        if share.background and any(level.kind == share.name for level in levels):
            raise InputError(
                f"--slo is about class {share.name!r}, which is background work: drop one of the two"
            )
    return traffic if trace else replace(traffic, lost=build.unservable(first, engine))


def parse_classes(text: str | None) -> tuple[tuple[str, float], ...]:
    shares: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, equals, share = part.strip().partition("=")
        try:
            value = float(share.removesuffix("%"))
        except ValueError:
            value = 0.0
        if not (equals and name and value > 0 and isfinite(value)):
            raise InputError(f"--classes {part.strip()!r} is not NAME=SHARE; write paying=5%,free=95%")
        if name in shares:
            raise InputError(f"--classes names {name!r} twice; drop one of the two")
        shares[name] = value
    return tuple(shares.items())


def _check_recorded(words: Experiment, trace: Workload | None) -> None:
    if trace is None:
        raise InputError("--as-recorded is about traces; give --trace FILE or drop it")
    if words.arrivals or words.burstiness:
        raise InputError(
            "--as-recorded keeps the trace's times, --arrivals replaces them; drop one of the two"
        )
    own_rate(trace)


def own_rate(trace: Workload, remedy: str = "drop --as-recorded") -> float:
    span = float(trace.arrival[-1] - trace.arrival[0])
    if not span > 0:
        raise InputError(f"the trace has no arrival times, or only one, so its rate is unknown; {remedy}")
    return (len(trace) - 1) / span


def _check_kinds(levels: Sequence[Level], names: Sequence[str]) -> None:
    for level in levels:
        if level.kind and level.kind not in names:
            known = ", ".join(name for name in names if name)
            draw = "name a class column (--columns class=NAME), or draw classes: --classes paying=5%,free=95%"
            remedy = f"choose from: {known}" if known else draw
            raise InputError(f"--slo is about class {level.kind!r}, which no request belongs to; {remedy}")


# -- service levels, and whether a run keeps them

# tbt: every time between two tokens; of a request: the longest (gap), their mean (tpot), and the least T for
# which token j came by arrival + TTFT + j x T (envelope)
METRICS = ("ttft", "tbt", "gap", "tpot", "envelope", "e2e")
SAME = {"itl": "tbt"}  # one figure, two names
METRIC_KINDS = {**BETWEEN, "gap": GAP}  # of the promises between tokens
FORM = "write METRIC=TIME@STATISTIC:CLASS, such as ttft=500ms@p50 or tbt=100ms@p99:paying"


def parse_levels(texts: Sequence[str]) -> tuple[Level, ...]:
    levels: list[Level] = []
    for text in texts:
        for part in text.split(","):
            level = _parsed(part.strip())
            if any(level[0:1] + level[2:] == other[0:1] + other[2:] for other in levels):
                raise InputError(f"--slo {part.strip()}: the same level is given twice; drop one of the two")
            levels.append(level)
    for level in levels:
        if level.metric == "envelope" and _first_token(levels, level.kind) is None:
            of = f":{level.kind}" if level.kind else ""
            raise InputError(
                f"--slo envelope={1000 * level.limit:g}ms{of}: the envelope begins where the first token is "
                f"due; promise that too, such as ttft=500ms@p95{of}"
            )
    if not any(level.statistic for level in levels):
        raise InputError(
            "--slo names no level to keep: say which statistic, such as ttft=500ms@p50; without one it is a "
            "promise that policies know and that is not checked"
        )
    return tuple(levels)


def promise(levels: Sequence[Level], kind: str, known: Slo) -> Slo:
    """What a class of users is promised: the tightest of its levels, or what was known before.

    Background work is promised nothing: levels without a class are not about it.
    """
    if known.background:
        return known

    between = known.between_tokens, known.between_kind
    mine = [each for each in levels if each.metric in METRIC_KINDS and each.kind in ("", kind)]
    if mine:
        tightest = min(mine, key=lambda level: (level.limit, METRIC_KINDS[level.metric] != GAP))
        between = tightest.limit, METRIC_KINDS[tightest.metric]
    first = _first_token(levels, kind, known.first_token)
    return known._replace(first_token=first, between_tokens=between[0], between_kind=between[1])


def _first_token(levels: Sequence[Level], kind: str, known: float | None = None) -> float | None:
    mine = (level.limit for level in levels if level.metric == "ttft" and level.kind in ("", kind))
    return min(mine, default=known)


def promised_gap(levels: Sequence[Level]) -> float | None:
    return min((level.limit for level in levels if level.metric in METRIC_KINDS), default=None)


DIGITS = 3  # of the value proposed, rounded up so that it is kept


def nearest(levels: Sequence[Level], values: Mapping[str, float]) -> str:
    missed = [level for level in levels if values[str(level)] > level.limit]
    wish = ",".join(_wish(level, values[str(level)]) for level in missed)
    said = "; ".join(map(str, missed))
    return f"{said}; the nearest promise that holds is --slo {wish}: ask for that"


def _wish(level: Level, value: float) -> str:
    unit, scale = ("ms", 1000.0) if value < 1 else ("s", 1.0)
    digits = DIGITS - 1 - floor(log10(value * scale))
    limit = ceil(value * scale * 10**digits) / 10**digits
    kind = f":{level.kind}" if level.kind else ""
    return f"{level.metric}={limit:g}{unit}@{level.statistic}{kind}"


class LevelsKept(NamedTuple):
    values: tuple[float, ...]
    worst: Level
    ratio: float  # of the worst: above 1 it is missed
    shares: tuple[float, ...]  # of requests (of gaps, for tbt) within each limit
    tails: tuple[float, ...] = ()  # the p99 of each, then the worst of each


def measure(run: Run | Measured, levels: Sequence[Level]) -> LevelsKept:
    """Every level that is checked, over the requests that are neither warm-up nor cool-down.

    Requests that never got a token, or never ended, count as infinitely late; those that no engine of this
    size can serve are left out.
    """
    checked = [level for level in levels if level.statistic]
    found = Measured.of(run)
    run = found.run
    keep = found.window.keep & ~unservable_rows(run)
    values, shares, tails = [], [], list[list[float]]()
    for level in checked:
        rows = keep & rows_of_kind(run, level.kind)
        if not rows.any():
            raise RunError(f"no request of class {level.kind!r} was measured; ask for more --requests")
        if level.metric == "tbt":
            times, weights, _ = found.gaps.sample(rows)
        else:
            times = times_of(found, level.metric, levels)[rows]
            if level.metric not in ("gap", "tpot"):  # one token alone has no time per token
                times = np.where(np.isnan(times), inf, times)
            times = times[~np.isnan(times)]
            weights = np.ones(len(times), np.int64)
        values.append(_statistic(level.statistic, times, weights))
        tails.append([_statistic(name, times, weights) for name in ("p99", "max")])
        shares.append(float(np.average(times <= level.limit, weights=weights)) if len(times) else 1.0)
    ratios = [value / level.limit for value, level in zip(values, checked, strict=True)]
    worst = int(np.argmax(ratios))
    beyond = (tail for column in zip(*tails, strict=True) for tail in column)
    return LevelsKept(tuple(values), checked[worst], ratios[worst], tuple(shares), tuple(beyond))


def times_of(found: Measured, metric: str, levels: Sequence[Level]) -> Floats:
    if metric == "gap":
        return found.longest
    if metric == "envelope":
        first = []
        for kind in found.run.kinds:
            own = () if kind.get("background") else levels
            limit = _first_token(own, str(kind.get("name", "")), kind.get("first_token"))
            first.append(inf if limit is None else limit)
        limits = np.array(first)[found.run.requests["kind"]]
        return np.where(found.run.completed(), envelopes(found.run, found.gaps, limits), np.nan)
    return getattr(found.latencies, metric)  # type: ignore[no-any-return]


def _statistic(name: str, values: Floats, weights: Integers) -> float:
    if not len(values):
        return 0.0  # outputs of one token have no gap that could be late
    if name == "mean":
        return float(np.average(values, weights=weights))
    if name == "max":
        return float(values.max())
    if np.isinf(values).any():  # interpolating towards infinity makes no sense
        order = np.argsort(values, kind="stable")
        reach = np.cumsum(weights[order])
        place = int(np.searchsorted(reach, float(name[1:]) / 100 * reach[-1]))
        return float(values[order][min(place, len(order) - 1)])
    return quantiles(values, weights, [float(name[1:]) / 100])[0]


def rows_of_kind(run: Run, kind: str) -> Flags:
    if not kind:
        background = [number for number, each in enumerate(run.kinds) if each.get("background")]
        return ~np.isin(run.requests["kind"], background)
    numbers = [number for number, each in enumerate(run.kinds) if each.get("name") == kind]
    return np.isin(run.requests["kind"], numbers)


def _parsed(text: str) -> Level:
    metric, equals, rest = text.partition("=")
    if not equals:
        raise InputError(f"--slo {text!r} is not a service level; {FORM}")
    metric = SAME.get(metric.strip().lower(), metric.strip().lower())
    if metric not in METRICS:
        raise unknown("metric in --slo", metric, (*METRICS, *SAME))
    rest, colon, kind = rest.partition(":")
    time, at, statistic = rest.partition("@")
    if (colon and not kind) or (at and not statistic):
        raise InputError(f"--slo {text!r} ends too early; {FORM}")
    try:
        limit = duration(time)
    except InputError as error:
        raise InputError(f"--slo {text!r}: {error}") from None
    if not limit > 0:
        raise InputError(f"--slo {text!r}: a limit must be above 0; {FORM}")
    if statistic and not _known(statistic):
        raise InputError(f"--slo {text!r}: {statistic!r} is no statistic; write p50, p99, p99.9, mean or max")
    return Level(metric, limit, statistic, kind)


def _known(statistic: str) -> bool:
    number = statistic.removeprefix("p")
    percentile = statistic.startswith("p") and number.replace(".", "", 1).isdecimal()
    return statistic in ("mean", "max") or (percentile and 0 < float(number) < 100)
