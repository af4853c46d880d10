"""Service levels as people write them: ttft=500ms@p50,tbt=100ms@p99:paying; and whether a run keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from headgate.core.durations import duration
from headgate.core.errors import InputError, RunError, unknown
from headgate.core.request import GAP, Slo
from headgate.record.tables import Flags, Floats, Integers, Run
from headgate.stats.figures import quantiles
from headgate.stats.gaps import Gaps
from headgate.stats.promises import Latencies, unservable
from headgate.stats.windows import choose

METRICS = {
    "ttft": "time to first token",
    "tbt": "time between two tokens",
    "tpot": "mean time per token of a request",
    "e2e": "time to the last token",
}
SAME = {"itl": "tbt"}  # one figure, two names
FORM = "write METRIC=TIME@STATISTIC:CLASS, such as ttft=500ms@p50 or tbt=100ms@p99:paying"


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
        return f"{self.statistic} {self.metric.upper()}{of} <= {limit}".lstrip()


def parse_levels(texts: Sequence[str]) -> tuple[Level, ...]:
    """Every level in the texts, each a list with commas; at least one must be checked."""
    levels: list[Level] = []
    for text in texts:
        for part in text.split(","):
            level = _parsed(part.strip())
            if any(level[0:1] + level[2:] == other[0:1] + other[2:] for other in levels):
                raise InputError(f"--slo {part.strip()}: the same level is given twice; drop one of the two")
            levels.append(level)
    if not any(level.statistic for level in levels):
        raise InputError(
            "--slo names no level to keep: say which statistic, such as ttft=500ms@p50; without one it is a "
            "promise that policies know and that is not checked"
        )
    return tuple(levels)


def promise(levels: Sequence[Level], kind: str, known: Slo) -> Slo:
    """What a class of users is promised: the tightest of its levels, or what was known before."""

    def tightest(metrics: tuple[str, ...], before: float | None) -> float | None:
        mine = [each.limit for each in levels if each.metric in metrics and each.kind in ("", kind)]
        return min(mine, default=before)

    between = tightest(("tbt", "tpot"), known.between_tokens)
    of = known.between_kind if between == known.between_tokens else GAP  # a policy keeps a mean gap by gap
    return Slo(tightest(("ttft",), known.first_token), between, of)


def promised_gap(levels: Sequence[Level]) -> float | None:
    """The closest promise between tokens, to any class."""
    return min((level.limit for level in levels if level.metric in ("tbt", "tpot")), default=None)


class Kept(NamedTuple):
    """How a run stands to its levels: each measured value, and which is worst by its limit."""

    values: tuple[float, ...]
    worst: Level
    ratio: float  # of the worst: above 1 it is missed
    shares: tuple[float, ...]  # of requests (of gaps, for tbt) within each limit


def measure(run: Run, levels: Sequence[Level]) -> Kept:
    """Every level that is checked, over the requests that are neither warm-up nor cool-down.

    Requests that never got a token, or never ended, count as infinitely late; those that no engine of this
    size can serve are left out.
    """
    checked = [level for level in levels if level.statistic]
    latencies, keep = Latencies.of(run), choose(run).keep & ~unservable(run)
    gaps = Gaps(run) if any(level.metric == "tbt" for level in checked) else None
    values, shares = [], []
    for level in checked:
        rows = keep & _of_kind(run, level.kind)
        if not rows.any():
            raise RunError(f"no request of class {level.kind!r} was measured; ask for more --requests")
        if level.metric == "tbt" and gaps is not None:
            times, weights, _ = gaps.sample(rows)
        else:
            times = getattr(latencies, level.metric)[rows]
            if level.metric != "tpot":  # one token alone has no time per token
                times = np.where(np.isnan(times), inf, times)
            times = times[~np.isnan(times)]
            weights = np.ones(len(times), np.int64)
        values.append(_statistic(level.statistic, times, weights))
        shares.append(float(np.average(times <= level.limit, weights=weights)) if len(times) else 1.0)
    ratios = [value / level.limit for value, level in zip(values, checked, strict=True)]
    worst = int(np.argmax(ratios))
    return Kept(tuple(values), checked[worst], ratios[worst], tuple(shares))


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


def _of_kind(run: Run, kind: str) -> Flags:
    if not kind:
        return np.ones(len(run.requests["id"]), bool)
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
    if statistic in ("mean", "max"):
        return True
    number = statistic.removeprefix("p")
    plain = number.replace(".", "", 1).isdecimal()
    return statistic.startswith("p") and plain and 0 < float(number) < 100
