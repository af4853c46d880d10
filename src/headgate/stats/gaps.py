"""The time between tokens: all gaps as a sample or one by one; the longest and the envelope of a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headgate.record.tables import Columns, Flags, Floats, Integers, Run

EXACT = 5_000_000  # distinct values kept one by one; beyond, they are gathered in bins
GRAIN = 1e-3  # relative width of a bin
SHORTER = 1e-9  # by which share steps of a row become shorter at least; less is rounding
ROWS = 1 << 18  # rows of the step table looked at together


class Sample(NamedTuple):
    """Values and how often each occurred. `exact` is false once values were gathered in bins."""

    values: Floats
    weights: Integers
    exact: bool


class Gaps:
    """All gaps between consecutive deliveries of tokens to the requests of one run.

    With speculation several tokens may come at once: they are one delivery and have no gap between them.
    All requests that ran in two consecutive ticks saw the same gap, so gaps are counted per tick and not per
    request: a stay contributes its own first gap, and from its second tick on it is one of many.
    """

    def __init__(self, run: Run) -> None:
        stays = run.stays
        self.requests = len(run.requests["id"])
        self.ticks = Ticks.of(run.steps)
        self.request = run.rows_of(stays["request"])
        replica = stays.get("replica", run.requests["replica"][self.request])
        self.first = self.ticks.numbers(stays["first_tick"].astype(np.int64), replica.astype(np.int64))
        self.length = stays["ticks"].astype(np.int64)
        self.opened = stays["opened"]
        self.before = stays["gap"]  # seconds before the token that opened the stay
        ran = np.flatnonzero(self.length > 0)
        self.entry = np.full(len(self.request), np.nan)  # seconds before the stay's first tick
        self.entry[ran] = self.ticks.end_of(*self.ticks.place(self.first[ran])) - self.opened[ran]

    def sample(self, keep: Flags | None = None) -> Sample:
        """Every gap of the requests in `keep` (rows of the request table; all when None), with its weight.

        Exact up to five million distinct values. Beyond, values within 0.1 % of each other are gathered
        and stand for their weighted mean: the mean stays exact, quantiles move by less than 0.1 %.
        """
        chosen = np.ones(len(self.request), bool) if keep is None else keep[self.request]
        own = np.concatenate((self.before[chosen], self.entry[chosen]))
        own = own[~np.isnan(own)]
        shared = chosen & (self.length > 1)
        begin, stop = np.sort(self.first[shared] + 1), np.sort((self.first + self.length)[shared])
        low, high = self._rows(begin, stop)
        length, flat = np.diff(self.ticks.base[low : high + 1]), self.ticks.slope[low:high] == 0
        exact = len(own) + int(np.where(flat, np.minimum(length, 2), length).sum()) <= EXACT
        parts = [(own, np.ones(len(own), np.int64))]
        if not exact:
            parts = [_binned(*parts[0])]
        for values, weights in self._shared(begin, stop, exact):
            parts.append((values, weights) if exact else _binned(values, weights))
        values, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Sample(*((values, weights) if exact else _binned(values, weights)), exact)

    def _rows(self, begin: Integers, stop: Integers) -> tuple[int, int]:
        if not len(begin):
            return 0, 0
        ends, _ = self.ticks.place(np.array([begin[0], stop[-1] - 1]))
        return int(ends[0]), int(ends[1]) + 1

    def _shared(self, begin: Integers, stop: Integers, exact: bool) -> Iterator[tuple[Floats, Integers]]:
        """Gaps of requests that already ran in the tick before, cut where their number or the row changes."""
        ticks = self.ticks
        low, high = self._rows(begin, stop)
        for row in range(low, high, ROWS):
            edge = ticks.base[row : min(row + ROWS, high) + 1]
            inside = [edges[slice(*np.searchsorted(edges, edge[[0, -1]]))] for edges in (begin, stop)]
            cuts = np.sort(np.concatenate((edge[:-1], edge[:-1] + 1, *inside)), kind="stable")
            cuts = cuts[np.diff(cuts, append=edge[-1]) > 0]  # each once; stable sorting merges quickly
            weight = np.searchsorted(begin, cuts, side="right") - np.searchsorted(stop, cuts, side="right")
            length = np.diff(cuts, append=edge[-1])
            held = weight > 0
            rows, place = ticks.place(cuts[held])
            slope = np.where(place == 0, 0.0, ticks.slope[rows])
            yield from _expanded(ticks.gap(rows, place), slope, length[held], weight[held], exact)

    def longest(self) -> Floats:
        """The longest gap of each request, in the rows of the request table; NaN where it has none."""
        longest = np.full(self.requests, -np.inf)
        for gaps in (self.before, self.entry):
            real = ~np.isnan(gaps)
            np.maximum.at(longest, self.request[real], gaps[real])
        shared = np.flatnonzero(self.length > 1)
        low, high = self.first[shared] + 1, (self.first + self.length)[shared] - 1
        np.maximum.at(longest, self.request[shared], self._longest_between(low, high))
        return np.where(np.isneginf(longest), np.nan, longest)

    def _longest_between(self, low: Integers, high: Integers) -> Floats:
        ticks = self.ticks
        (row, place), (last_row, last_place) = ticks.place(low), ticks.place(high)
        one = row == last_row
        final = ticks.count - 1
        best = self._longest_in_row(row, place, np.where(one, last_place, final[row]))
        best = np.maximum(best, self._longest_in_row(last_row, np.where(one, place, 0), last_place))
        every = np.arange(len(final))
        inner = np.flatnonzero(last_row - row > 1)
        whole = self._longest_in_row(every, np.zeros_like(every), final)
        best[inner] = np.maximum(best[inner], range_maximum(whole, row[inner] + 1, last_row[inner] - 1))
        return best

    def _longest_in_row(self, row: Integers, low: Integers, high: Integers) -> Floats:
        """Ticks of a row lie on a line, and the first gap is only longer than the line: an end is longest."""
        return np.maximum(self.ticks.gap(row, low), self.ticks.gap(row, high))

    def envelope(self, due: Floats, each: Floats) -> Floats:
        """The least T for which token j of each request came by due + j x T, j from 1; 0: it has none.

        `due` is when its first token was due, `each` how many tokens one delivery brought. The tables know
        only their mean where steps bring several: the tokens of a request are then spread evenly.
        """
        order = np.lexsort((self.opened, self.request))
        request, length, again = self.request[order], self.length[order], ~np.isnan(self.before[order])
        # deliveries after the first tokens, of this request and those before
        came = np.cumsum(length + again)
        earlier = np.concatenate(([0], came))[np.searchsorted(request, request)]
        opening = came - length - earlier  # number of the delivery that opened the stay
        pace = np.zeros(self.requests)

        def reached(owner: Integers, number: Integers, time: Floats) -> None:
            needed = (time - due[owner]) / (1 + (number - 1) * each[owner])
            np.maximum.at(pace, owner, needed)

        reached(request[again], opening[again], self.opened[order][again])
        ran = np.flatnonzero(length)
        owner, first = request[ran], self.first[order[ran]]
        zero, last = first - opening[ran] - 1, first + length[ran] - 1  # the tick of delivery 0, as it were
        points, times = self._corners()
        for tick in (first, last):
            reached(owner, tick - zero, self.ticks.end_of(*self.ticks.place(tick)))
        low, stop = np.searchsorted(points, first), np.searchsorted(points, last, side="right")
        stays = np.flatnonzero(stop > low)
        total = np.concatenate(([0], np.cumsum((stop - low)[stays])))
        begin = 0
        while begin < len(stays):
            end = max(int(np.searchsorted(total, total[begin] + BLOCK, side="right")) - 1, begin + 1)
            mine, count = stays[begin:end], np.diff(total[begin : end + 1])
            place = np.arange(total[begin], total[end]) + np.repeat(low[mine] - total[begin:end], count)
            number = points[place] - np.repeat(zero[mine], count)
            whose = owner[mine]
            tokens = 1 + (number - 1) * np.repeat(each[whose], count)
            needed = (times[place] - np.repeat(due[whose], count)) / tokens
            np.maximum.at(pace, whose, np.maximum.reduceat(needed, total[begin:end] - total[begin]))
            begin = end
        return pace

    def _corners(self) -> tuple[Integers, Floats]:
        """Ticks among which the worst token of every stay is, unless it is the stay's first or last; and
        their ends. Ends within a row lie on a parabola, so (end - due) / j is largest at an end of the row;
        where steps become shorter it may be any tick.
        """
        ticks = self.ticks
        count = ticks.count
        shorter = np.flatnonzero((count > 2) & (ticks.slope * (count - 1) < -SHORTER * ticks.first))
        inner = [np.arange(ticks.base[row] + 1, ticks.base[row + 1] - 1) for row in shorter]
        points = np.unique(np.concatenate((ticks.base[:-1], ticks.base[1:] - 1, *inner)).astype(np.int64))
        return points, ticks.end_of(*ticks.place(points))

    def tokens(self) -> Iterator[tuple[Floats, Integers]]:
        """When each tick ended and how many requests got a token, a bounded number of ticks at a time.

        An asynchronous engine has requests in one tick more than they get tokens from; those do not count.
        """
        ran = self.length > 0
        begin, stop = np.sort(self.first[ran]), np.sort((self.first + self.length)[ran])
        low = 0
        for row, place in self.ticks.blocks():
            tick = np.arange(low, low + len(row), dtype=np.int64)
            low += len(row)
            tokens = np.searchsorted(begin, tick, side="right") - np.searchsorted(stop, tick, side="right")
            yield self.ticks.end_of(row, place), tokens

    def lists(self) -> list[list[float]]:
        """The gaps of each request in the order of its tokens; memory for every token of the run."""
        blocks = [self.ticks.gap(row, place) for row, place in self.ticks.blocks()]
        shared = np.concatenate(blocks) if blocks else np.empty(0)
        lists: list[list[float]] = [[] for _ in range(self.requests)]
        order = np.lexsort((self.opened, self.request))
        columns = (self.request, self.before, self.entry, self.first, self.length)
        for request, before, entry, first, length in zip(*(c[order].tolist() for c in columns), strict=True):
            gaps = lists[request]
            gaps.extend(gap for gap in (before, entry) if gap == gap)
            gaps.extend(shared[first + 1 : first + length].tolist())
        return lists


def range_maximum(values: Floats, low: Integers, high: Integers) -> Floats:
    """The maximum of values[low] .. values[high] for many pairs at once.

    A sparse table (two overlapping windows of the largest power of two that fits), of which only one
    level is in memory at a time.
    """
    best = np.empty(len(low))
    level = np.frexp((high - low + 1).astype(np.float64))[1] - 1
    order = np.argsort(level, kind="stable")
    depth = int(level.max(initial=-1)) + 1
    bounds = np.searchsorted(level[order], np.arange(depth + 1))
    for power in range(depth):
        pairs = order[bounds[power] : bounds[power + 1]]
        width = 1 << power
        best[pairs] = np.maximum(values[low[pairs]], values[high[pairs] - width + 1])
        values = np.maximum(values[:-width], values[width:])
    return best


def _expanded(
    gap: Floats, slope: Floats, length: Integers, weight: Integers, exact: bool
) -> Iterator[tuple[Floats, Integers]]:
    """Pieces on a line (gap, gap + slope, ...) as values and weights, a bounded number at a time.

    Exactly: one value per tick unless the line is flat. Otherwise each piece is cut so finely that its
    parts span less than the width of a bin, and a part stands for its mean.
    """
    if exact:
        parts = np.where(slope == 0, 1, length)
    else:
        rise = np.abs(slope) * (length - 1)
        least = np.maximum(np.minimum(gap, gap + slope * (length - 1)), np.finfo(float).tiny)
        parts = np.clip(np.ceil(rise / (GRAIN * least)), 1, length).astype(np.int64)
    total = np.concatenate(([0], np.cumsum(parts)))
    low = 0
    while low < len(parts):
        high = max(int(np.searchsorted(total, total[low] + BLOCK, side="right")) - 1, low + 1)
        owner = np.repeat(np.arange(low, high), parts[low:high])
        number = np.arange(total[low], total[high]) - total[owner]
        begin = number * length[owner] // parts[owner]
        end = (number + 1) * length[owner] // parts[owner]
        yield gap[owner] + slope[owner] * ((begin + end - 1) / 2.0), weight[owner] * (end - begin)
        low = high


def _binned(values: Floats, weights: Integers) -> tuple[Floats, Integers]:
    """Values within 0.1 % of each other as their weighted mean; zero and less in a bin of their own."""
    safe = np.maximum(values, np.finfo(float).tiny)
    bins = np.rint(np.log(safe) / np.log1p(GRAIN)).astype(np.int64)
    bins -= bins.min(initial=0)
    weight, total = np.bincount(bins, weights), np.bincount(bins, weights * values)
    filled = weight > 0
    return total[filled] / weight[filled], np.rint(weight[filled]).astype(np.int64)


BLOCK = 1 << 20  # ticks laid out at a time, so that memory does not grow with the run


@dataclass(frozen=True)
class Ticks:
    """The steps in which decodes ran, one after the other, replica after replica.

    Row by row (prefill-only rows are left out, their time stays in the gap to the next tick): `base` is
    the number of its first tick, with one more entry at the end; `lead` the time from the tick before to
    the end of its first tick, prefill-only steps and idle time included (minus infinity for the first
    tick of a replica, which no gap ends with); later ticks of the row follow at first + slope x place.
    """

    base: Integers
    start: Floats
    first: Floats
    slope: Floats
    lead: Floats
    decodes: Integers
    replicas: Integers  # sorted
    offset: Integers  # number of the first tick of each replica

    @classmethod
    def of(cls, steps: Columns) -> Ticks:
        rows = np.flatnonzero(steps["decodes"] > 0)
        rows = rows[np.argsort(steps["replica"][rows], kind="stable")]
        count = steps["count"][rows].astype(np.int64)
        start, first, seconds = (steps[name][rows] for name in ("start", "first", "seconds"))
        slope = np.where(count > 1, 2.0 * (seconds / count - first) / np.maximum(count - 1, 1), 0.0)
        base = np.concatenate(([0], np.cumsum(count)))
        replicas, opening = np.unique(steps["replica"][rows], return_index=True)
        lead = start + first
        lead[1:] -= (start + seconds)[:-1]
        lead[opening] = -np.inf
        decodes = steps["decodes"][rows].astype(np.int64)
        return cls(base, start, first, slope, lead, decodes, replicas.astype(np.int64), base[opening])

    @property
    def count(self) -> Integers:
        return np.diff(self.base)

    def numbers(self, first_tick: Integers, replica: Integers) -> Integers:
        """Ticks counted over all replicas, from ticks counted on each replica."""
        if not len(self.replicas):
            return first_tick
        place = np.minimum(np.searchsorted(self.replicas, replica), len(self.replicas) - 1)
        return np.asarray(first_tick + self.offset[place], np.int64)

    def place(self, tick: Integers) -> tuple[Integers, Integers]:
        row = np.searchsorted(self.base, tick, side="right") - 1
        return row, tick - self.base[row]

    def end_of(self, row: Integers, place: Integers) -> Floats:
        rise = self.slope[row] * (place * (place + 1.0) / 2.0)
        return np.asarray(self.start[row] + (place + 1) * self.first[row] + rise)

    def gap(self, row: Integers, place: Integers) -> Floats:
        return np.where(place == 0, self.lead[row], self.first[row] + self.slope[row] * place)

    def blocks(self) -> Iterator[tuple[Integers, Integers]]:
        for low in range(0, int(self.base[-1]), BLOCK):
            yield self.place(np.arange(low, min(low + BLOCK, int(self.base[-1])), dtype=np.int64))
