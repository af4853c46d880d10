"""What counters have gained in the last seconds: rates, shares, percentiles; and a timeline of 15 minutes."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

from prometheus_client import Metric

from headgate.core.version import VERSION
from headgate.live.route.observe import clean

Labels = tuple[tuple[str, str], ...]
Counts = dict[str, dict[Labels, float]]
Row = dict[str, Any]

MOST = {"engines": 64, "classes": 32, "tenants": 20}  # rows in a snapshot
MOST_REASONS = 12
SHAPE = 1  # version of a snapshot: a field that changes its meaning or goes makes it 2
SHORT, LONG = 10.0, 60.0  # seconds: rates are of the first, shares and percentiles of the second
SHARES = 0.5, 0.95
STRIDE, POINTS = 5.0, 180  # seconds between two points of the timeline, and how many are kept
COLUMNS = ("time", "served", "refused", "failed", "output", "running", "waiting", "ttft", "kv")
PROMISES = "headgate_promises_total"
MOST_SAMPLES = 50_000  # of one text; what follows is not read
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")


def collected(families: Iterable[Metric]) -> Counts:
    """Of metrics in this process."""
    counts: Counts = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                counts.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return counts


def parsed(text: str) -> Counts:
    """Of a /metrics page; a line that is none of Prometheus is passed over."""
    counts: Counts = {}
    for line in text.splitlines()[:MOST_SAMPLES]:
        sample = SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if isfinite(number):
            pairs = tuple((key, _unescaped(said)) for key, said in LABEL.findall(labels or ""))
            counts.setdefault(name, {})[pairs] = number
    return counts


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text


class Quantiles(NamedTuple):
    """The median, and what 5 % exceed; None where nothing was observed."""

    p50: float | None = None
    p95: float | None = None


class Change(NamedTuple):
    """Counters before and now. One that is lower now began anew."""

    seconds: float
    now: Counts
    before: Counts

    def by(self, name: str, *labels: str, **only: str) -> dict[tuple[str, ...], float]:
        """What was gained, summed by these labels; what gained nothing is left out, but for buckets."""
        gains: dict[tuple[str, ...], float] = {}
        before = self.before.get(name, {})
        for key, value in self.now.get(name, {}).items():
            gained = value - before.get(key, 0.0)
            if gained == 0 and self.seconds and "le" not in labels:
                continue
            pairs = dict(key)
            if all(pairs.get(label) == wanted for label, wanted in only.items()):
                group = tuple([pairs.get(label, "") for label in labels])
                gains[group] = gains.get(group, 0.0) + (gained if gained >= 0 else value)
        return gains

    def of(self, name: str, label: str, **only: str) -> dict[str, float]:
        """The same by one label."""
        return {value: gained for (value,), gained in self.by(name, label, **only).items()}

    def rate(self, name: str, **only: str) -> float:
        """A second; 0 where no time has passed."""
        return sum(self.by(name, **only).values()) / self.seconds if self.seconds > 0 else 0.0

    def quantiles(self, name: str, label: str = "") -> dict[str, Quantiles]:
        """Of a histogram's new observations, linear within a bucket, by a label or, without one, under ""."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for (value, le), count in self.by(f"{name}_bucket", label, "le").items():
            bound = inf if le in ("+Inf", "Inf") else float(le)
            rows.setdefault(value, []).append((bound, count))
        quantiles = {}
        for value, found in rows.items():
            found.sort()
            if found[-1][1]:
                quantiles[value] = Quantiles(*(_quantile(found, share) for share in SHARES))
        return quantiles


def _quantile(rows: list[tuple[float, float]], share: float) -> float:
    wanted, below, lower = share * rows[-1][1], 0.0, 0.0
    for bound, count in rows:
        if count >= wanted:
            return lower if bound == inf else lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower


def latest(counts: Counts) -> Change:
    """For gauges: values as they are, to be summed by labels."""
    return Change(0.0, counts, {})


def rounded(value: float | None, digits: int = 3) -> float | None:
    """As it is sent: JSON knows neither infinity nor NaN."""
    return round(value, digits) + 0.0 if value is not None and isfinite(value) else None  # no -0.0


def share(kept: float, broken: float) -> float | None:
    """Of promises that could be judged."""
    return rounded(kept / (kept + broken), 4) if kept + broken else None


def kept_share(change: Change) -> float | None:
    """Of all promises; the router and the plug-in count them alike."""
    gained = change.of(PROMISES, "kept")
    return share(gained.get("true", 0.0), gained.get("false", 0.0))


def kept_by_class(change: Change) -> dict[str, dict[str, float | None]]:
    """Of each promise of each class."""
    gained = change.by(PROMISES, "class", "promise", "kept")
    kept: dict[str, dict[str, float | None]] = {}
    for kind, promise, _ in gained:
        counts = (gained.get((kind, promise, word), 0.0) for word in ("true", "false"))
        if (value := share(*counts)) is not None:
            kept.setdefault(kind, {})[clean(promise)] = value
    return kept


def reasons(counts: Mapping[str, float]) -> dict[str, int]:
    """The most frequent ones."""
    most = sorted(((n, clean(reason)) for reason, n in counts.items() if n), reverse=True)
    return {reason: round(n) for n, reason in most[:MOST_REASONS]}


class LiveView:
    """Counters of the last minute, a sample every few seconds, and the timeline that they make.

    A subclass gives the counters of this moment, a row of the timeline, and the rest of a snapshot.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._samples: deque[tuple[float, Counts]] = deque()
        self._points: deque[list[float | None]] = deque(maxlen=POINTS)

    def _counts(self) -> Counts:
        raise NotImplementedError

    def _point(self, change: Change) -> list[float | None]:
        """In the order of COLUMNS, without the time."""
        raise NotImplementedError

    def _shown(self, short: Change, long: Change) -> Row:
        raise NotImplementedError

    def sample(self, now: float) -> None:
        """Called about once a second: keep the counters and a point, if their time has come."""
        if self._samples and now - self._samples[-1][0] < STRIDE - 0.1:
            return
        counts = self._counts()
        point = self._point(self._change(now, counts, 0.0))
        self._points.append([round(time.time(), 1), *(rounded(value) for value in point)])
        self._samples.append((now, counts))
        while len(self._samples) > 2 and self._samples[1][0] <= now - LONG:
            self._samples.popleft()

    def _change(self, now: float, counts: Counts, seconds: float) -> Change:
        """Since the newest sample that is at least so old, or the oldest."""
        if not self._samples:
            return Change(0.0, counts, counts)
        old = [sample for sample in self._samples if sample[0] <= now - seconds]
        at, before = old[-1] if old else self._samples[0]
        return Change(now - at, counts, before)

    def history(self) -> Row:
        """The timeline so far."""
        return {"headgate": SHAPE, "every": STRIDE, "columns": COLUMNS, "rows": list(self._points)}

    def snapshot(self, now: float) -> Row:
        """All of it; JSON of bounded size. What is cut off is counted in `left_out`."""
        counts = self._counts()
        short, long = (self._change(now, counts, seconds) for seconds in (SHORT, LONG))
        shown = self._shown(short, long)
        rows = {name: shown[name] for name in MOST}
        left_out = {name: max(len(rows[name]) - most, 0) for name, most in MOST.items()}
        return {
            "headgate": SHAPE,
            "version": VERSION,
            "kind": self._kind,
            "time": round(time.time(), 3),
            "over_s": [round(short.seconds, 1), round(long.seconds, 1)],
            **shown,
            **{name: rows[name][:most] for name, most in MOST.items()},
            "left_out": left_out | shown.get("left_out", {}),
            "point": self._points[-1] if self._points else None,
        }
