"""Long series made as long as a picture is wide, without losing their extremes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.report.charts.scales import Floats
from headgate.stats.figures import quantiles

POINTS = 100  # of a distribution's curve
LOWEST, HIGHEST = 0.01, 0.9999


class Columns(NamedTuple):
    """A series by columns of the picture: the mean over time in each, the least and the most seen in it."""

    middle: Floats
    mean: Floats
    low: Floats
    high: Floats


def over_time(start: Floats, seconds: Floats, value: Floats, edges: Floats) -> Columns:
    """A value that holds from each start for so many seconds and is zero in between, by columns."""
    ends = start + seconds
    times = np.empty(2 * len(start))
    times[0::2], times[1::2] = start, ends
    sums = np.zeros(2 * len(start))
    sums[0::2] = np.concatenate(([0.0], np.cumsum(value * seconds)[:-1])) if len(start) else 0.0
    sums[1::2] = np.cumsum(value * seconds)
    whole = np.interp(edges, times, sums, left=0.0) if len(start) else np.zeros(len(edges))
    mean = np.diff(whole) / np.diff(edges)
    low, high = extremes(start, value, edges, mean)
    return Columns((edges[:-1] + edges[1:]) / 2, mean, np.minimum(low, mean), np.maximum(high, mean))


def extremes(times: Floats, value: Floats, edges: Floats, otherwise: Floats) -> tuple[Floats, Floats]:
    """The least and the most value in each column; where none falls inside, `otherwise`."""
    low, high = otherwise.copy(), otherwise.copy()
    column = np.searchsorted(edges, times, side="right") - 1
    inside = (column >= 0) & (column < len(otherwise))
    numbers = np.unique(column[inside])
    if len(numbers):
        order = np.argsort(column[inside], kind="stable")
        held = value[inside][order]
        cuts = np.searchsorted(column[inside][order], numbers)
        low[numbers], high[numbers] = np.minimum.reduceat(held, cuts), np.maximum.reduceat(held, cuts)
    return low, high


def changes(times: Floats, value: Floats, most: int) -> tuple[Floats, Floats]:
    """A value that holds until the next moment, as about `most` points: where it changes, else extremes."""
    moved = np.flatnonzero(np.diff(value, prepend=np.nan) != 0)
    rows = np.unique(np.concatenate((moved, [len(times) - 1])))
    times, value = times[rows], value[rows]
    if len(times) <= most:
        return times, value
    parts = np.array_split(np.arange(len(times)), most // 2)
    rows = np.unique(
        [pick for part in parts for pick in (part[np.argmin(value[part])], part[np.argmax(value[part])])]
    )
    return times[rows], value[rows]


def distribution(values: Floats, weights: NDArray[np.int64] | None = None) -> tuple[Floats, Floats]:
    """The curve of a distribution as (value, share of the sample up to it), dense where the tail is.

    The same quantiles as the tables print: a percentile read off the curve is the one of the table.
    """
    counted = np.ones(len(values), np.int64) if weights is None else weights
    total = int(counted.sum())
    if not total:
        return np.empty(0), np.empty(0)
    top = max(0.5, min(HIGHEST, 1 - 1 / (total + 1)))
    odds = np.linspace(np.log(LOWEST / (1 - LOWEST)), np.log(top / (1 - top)), POINTS)
    shares = 1 / (1 + np.exp(-odds))
    shares = np.unique(np.concatenate((shares, [share for share in (0.5, 0.9, 0.95, 0.99) if share <= top])))
    return np.array(quantiles(values, counted, shares.tolist())), shares
