"""Figures as SVG with their data: charts with two axes, bars, and series made as long as they are wide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headgate.report.document import Figure, number
from headgate.report.html.page import Markup, join, position, tag
from headgate.stats.figures import quantiles

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 12.0, 42.0
COLOURS, DASHES = 8, 4  # as many as the style sheet has
LINEAR, LOG, TAIL = "linear", "log", "tail"
SAME, HIDDEN = 1.0, 0.5  # pixels within which, and share of points from which on, a line hides another
BESIDE, SPREAD = 2.0, 6.0  # pixels between two such lines, and between the first and the last of many


@dataclass(frozen=True)
class Axis:
    """What is drawn along it, in which unit; limits are those of the data where they are not given."""

    name: str
    unit: str = ""
    kind: str = LINEAR
    low: float | None = None
    high: float | None = None
    whole: bool = False  # counts things that cannot be cut

    @property
    def label(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.name}{unit}{', log scale' if self.kind == LOG else ''}"

    def scale(self, values: Floats, start: float, end: float) -> Scale:
        known = values[np.isfinite(values)]
        if self.kind == LOG:
            known = known[known > 0]
        low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 10.0)
        if self.kind == LINEAR:
            low, high = padded(low, high)
        elif self.kind == LOG and not high > low * 1.05:
            low, high = low / 2, high * 2
        low = low if self.low is None else self.low
        high = high if self.high is None else self.high
        return Scale(low, high if high > low else low + 1, start, end, self.kind, self.whole)


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    name: str
    x: Floats
    y: Floats
    colour: int = 0  # counts into the palette
    shape: str = "line"  # line, step, points, linked (points on a line), band
    low: Floats | None = None  # of a band, or of intervals around points
    high: Floats | None = None
    alone: bool = False  # in its chart

    @property
    def style(self) -> str:
        """Its CSS classes: a colour, and a dash so that colour is never the only sign."""
        return style_of(self.colour, self.alone)


def style_of(place: int, alone: bool = False) -> str:
    """The CSS classes of the run at this place: colours repeat, but then with another dash; alone without."""
    return f"c{place % COLOURS} d{0 if alone else (place + place // COLOURS) % DASHES}"


@dataclass(frozen=True)
class Mark:
    name: str
    value: float
    along: str = "x"  # the axis the value belongs to


@dataclass(frozen=True)
class Chart:
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()

    def figure(self, title: str, look: str, note: str = "") -> Figure:
        if len({each.name for each in self.series}) == 1 and not all(each.alone for each in self.series):
            alone = [replace(each, alone=True) for each in self.series]
            return replace(self, series=alone).figure(title, look, note)
        names = dict.fromkeys((each.name, each.style) for each in self.series)
        if any(_side_by_side(self.series, *self.scales())):
            note = f"{note} Lines with the same values are drawn side by side.".lstrip()
        return Figure(title, look, self.draw(title), self._data(), tuple(names), note=note)

    def scales(self) -> tuple[Scale, Scale]:
        marked = {along: [mark.value for mark in self.marks if mark.along == along] for along in "xy"}
        across = np.concatenate([each.x for each in self.series] + [np.array(marked["x"], float)])
        ends = [end for each in self.series for end in (each.low, each.high) if end is not None]
        upward = np.concatenate([each.y for each in self.series] + ends + [np.array(marked["y"], float)])
        return self.x.scale(across, LEFT, WIDTH - RIGHT), self.y.scale(upward, HEIGHT - BOTTOM, TOP)

    def draw(self, title: str) -> Markup:
        x, y = self.scales()
        parts = [axes(x, y, self.x.label, self.y.label)]
        shifts = _side_by_side(self.series, x, y)
        # Bands below lines; among lines, those with wider gaps above those that would cover them.
        layers = [0 if each.shape == "band" else 1 + "0132".index(each.style[-1]) for each in self.series]
        order = sorted(range(len(shifts)), key=layers.__getitem__)
        parts += [_draw(self.series[place], x, y, shifts[place]) for place in order]
        parts += draw_marks(self.marks, x, y)
        return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)

    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, axis, scale in zip("xy", (self.x, self.y), self.scales(), strict=True):
            ends = {"low": scale.low, "high": scale.high, "start": scale.start, "end": scale.end}
            data[name] = {"label": axis.label, "kind": axis.kind, **ends}
        series: list[dict[str, Any]] = []
        for each in self.series:
            values = {"x": each.x, "y": each.y, "low": each.low, "high": each.high}
            known = {name: brief(column) for name, column in values.items() if column is not None}
            series.append({"name": each.name, "style": each.style, **known})
        return data | {"series": series}


def axes(x: Scale, y: Scale, below: str, beside: str) -> Markup:
    left = min(x.start, x.end)
    parts = ruler(x, _spaced(x), min(y.start, y.end), max(y.start, y.end), below)
    for value, label in y.ticks(6):
        at = float(y(value))
        parts.append(tag("line", class_="grid", x1=left, x2=max(x.start, x.end), y1=at, y2=at))
        parts.append(tag("text", label, class_="tick", x=left - 6, y=at + 4, text_anchor="end"))
    turned = f"rotate(-90 11 {position((y.start + y.end) / 2)})"
    where = {"x": 11.0, "y": (y.start + y.end) / 2, "transform": turned}
    parts.append(tag("text", beside, class_="axis", text_anchor="middle", **where))
    return tag("g", *parts)


def _spaced(x: Scale) -> list[tuple[float, str]]:
    shown: list[tuple[float, str]] = []
    right = -np.inf
    for value, label in x.ticks(7):
        half = 3.6 * len(label)
        if float(x(value)) - half > right + 6:
            shown.append((value, label))
            right = float(x(value)) + half
    return shown


def path(x: Floats, y: Floats, stepped: bool = False) -> str:
    """Line commands through the points; a gap where one is not known."""
    words: list[str] = []
    pen_up, before = True, ""
    for across, up in zip(x.tolist(), y.tolist(), strict=True):
        if not (np.isfinite(across) and np.isfinite(up)):
            pen_up = True
            continue
        here = f"{position(across)} {position(up)}"
        if pen_up:
            words.append(f"M{here}")
        elif stepped:
            words.append(f"H{position(across)}V{position(up)}")
        elif here != before:
            words.append(f"L{here}")
        pen_up, before = False, here
    return "".join(words)


def _side_by_side(series: Sequence[Series], x: Scale, y: Scale) -> list[float]:
    """How far to move each, right and down, so that it does not lie on one before it with the same values.

    Rising curves, level or upright, then run beside each other. Tooltips and CSV have the true values.
    """
    drawn = [np.stack((x(each.x), y(each.y))) for each in series]
    ranks: list[int] = []
    for own, points in zip(series, drawn, strict=True):
        hides = [
            rank
            for rank, other, places in zip(ranks, series, drawn, strict=False)  # those before it
            if other.name != own.name and "band" not in (other.shape, own.shape)
            and points.size and places.shape == points.shape
            and np.mean(np.abs(places - points).max(axis=0) < SAME) > HIDDEN
        ]  # fmt: skip
        ranks.append(max(hides, default=-1) + 1)
    return [rank * min(BESIDE, SPREAD / max(ranks)) if rank else 0.0 for rank in ranks]


def _draw(series: Series, x: Scale, y: Scale, shift: float = 0.0) -> Markup:
    across, up = x(series.x) + shift, y(series.y) + shift
    across, up = np.where(np.isnan(series.x), np.nan, across), np.where(np.isnan(series.y), np.nan, up)
    named = {"data_series": series.name}
    if series.shape == "band" and series.low is not None and series.high is not None:
        around = np.concatenate((y(series.high), y(series.low)[::-1]))
        outline = path(np.concatenate((across, across[::-1])), around)
        return tag("path", class_=f"band {series.style}", d=outline + "Z", **named)
    parts = []
    if series.shape != "points":
        parts.append(tag("path", class_=f"line {series.style}", d=path(across, up, series.shape == "step")))
    if series.shape in ("points", "linked"):
        parts += _points(series, across, up, y)
    return tag("g", *parts, **named)


def _points(series: Series, across: Floats, up: Floats, y: Scale) -> Iterator[Markup]:
    if series.low is not None and series.high is not None:
        for at, low, high in zip(across, y(series.low), y(series.high), strict=True):
            if np.isfinite(low) and np.isfinite(high):
                ends = {"x1": float(at), "x2": float(at), "y1": float(low), "y2": float(high)}
                yield tag("line", class_=f"whisker {series.style}", **ends)
    for at, height in zip(across, up, strict=True):
        if np.isfinite(at) and np.isfinite(height):
            yield tag("circle", class_=f"dot {series.style}", cx=float(at), cy=float(height), r=3.4)


def brief(values: Floats) -> list[float | None]:
    """Four digits that matter, None where not known: what a tooltip and a CSV file show."""
    known = np.asarray(values, float).tolist()
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in known]


# -- rulers and reference lines

NEAR = 80.0  # pixels between two upright lines whose names would meet
ROW = 13.0  # pixels from one name to the next below it


def ruler(x: Scale, ticks: Sequence[tuple[float, str]], top: float, bottom: float, name: str) -> list[Markup]:
    parts: list[Markup] = []
    for value, label in ticks:
        at = float(x(value))
        parts.append(tag("line", class_="grid", x1=at, x2=at, y1=top, y2=bottom))
        parts.append(tag("text", label, class_="tick", x=at, y=bottom + 15, text_anchor="middle"))
    middle = (x.start + x.end) / 2
    return [*parts, tag("text", name, class_="axis", x=middle, y=bottom + 34, text_anchor="middle")]


def draw_marks(marks: Sequence[Mark], x: Scale, y: Scale) -> list[Markup]:
    upright = [mark for mark in marks if mark.along == "x"]
    level = [mark for mark in marks if mark.along != "x"]
    return [_upright(mark, upright, level, x, y) for mark in upright] + [_level(mark, x, y) for mark in level]


def _upright(mark: Mark, upright: Sequence[Mark], level: Sequence[Mark], x: Scale, y: Scale) -> Markup:
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    at = float(x(mark.value))
    line = tag("line", class_="mark", x1=at, x2=at, y1=top, y2=bottom)
    leftward = _leftward(at, [float(x(other.value)) for other in upright if other is not mark], x)
    anchor, shift = ("end", -4.0) if leftward else ("start", 4.0)
    height = top + 11 + ROW * (upright.index(mark) % 3)
    crossed = [float(y(other.value)) for other in level]
    while any(height - 12 < each < height + 5 for each in crossed) and height < bottom - ROW:
        height += ROW
    return join(line, tag("text", mark.name, class_="marked", text_anchor=anchor, x=at + shift, y=height))


def _leftward(at: float, others: Sequence[float], x: Scale) -> bool:
    before = any(at - NEAR < other <= at for other in others)
    behind = any(at < other < at + NEAR for other in others)
    middle, right = (x.start + x.end) / 2, max(x.start, x.end)
    if before != behind and not (before and at > right - NEAR):
        return behind
    return at > middle


def _level(mark: Mark, x: Scale, y: Scale) -> Markup:
    left, right, top = min(x.start, x.end), max(x.start, x.end), min(y.start, y.end)
    at = float(y(mark.value))
    line = tag("line", class_="mark", x1=left, x2=right, y1=at, y2=at)
    above = at - 5 if at - top > 16 else at + 13
    return join(line, tag("text", mark.name, class_="marked", x=right - 3, y=above, text_anchor="end"))


PERCENTILES = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999)
STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end in pixels.

    "log" spaces decades evenly. "tail" is for shares: by their odds, so that 90, 99 and 99.9 % lie evenly
    apart and the slowest requests can be seen as well as the usual ones.
    """

    low: float
    high: float
    start: float
    end: float
    kind: str = LINEAR
    whole: bool = False  # only whole numbers get a tick

    def __call__(self, values: Any) -> Floats:
        inside = np.clip(np.asarray(values, np.float64), self.low, self.high)
        low, high = (float(self._straight(np.float64(end))) for end in (self.low, self.high))
        share = (self._straight(inside) - low) / ((high - low) or 1.0)
        return np.asarray(self.start + (self.end - self.start) * share)

    def _straight(self, values: Any) -> Any:
        if self.kind == LOG:
            return np.log10(values)
        return np.log10(values / (1 - values)) if self.kind == TAIL else values

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        if self.kind == TAIL:
            shown = [share for share in PERCENTILES if self.low <= share <= self.high]
            return [(share, f"{100 * share:g} %") for share in shown]
        values = _decades(self.low, self.high, most) if self.kind == LOG else []
        values = values or nice(self.low, self.high, most)
        if self.whole:
            values = [value for value in values if abs(value - round(value)) < 1e-9]
        return [(value, label) for value, label in zip(values, labels(values), strict=True)]


def nice(low: float, high: float, most: int) -> list[float]:
    if not high > low:
        return [low]
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in STEPS if each * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between where there is room; none when less than two fall inside."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for between in ((1, 2, 5), (1, 3), (1,)):
        values = [each * 10.0**power for power in range(first, last + 1) for each in between]
        values = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(values) <= most:
            return values
    return values[:: math.ceil(len(values) / most)] if len(values) > most else []


def labels(values: list[float]) -> list[str]:
    gaps = [abs(b - a) for a, b in pairwise(values) if b != a]
    decimals = max(0, -math.floor(math.log10(min(gaps)) + 1e-9)) if gaps else 3
    return [_label(value, decimals) for value in values]


def _label(value: float, decimals: int) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    if not high > low:
        room = abs(high) * 0.5 or 1.0
        return (0.0 if low >= 0 else low - room), high + room
    room = share * (high - low)
    return (0.0 if 0 <= low < 0.5 * high else low - room), high + room


# -- long series, made as long as a picture is wide

POINTS = 100  # of a distribution's curve
LOWEST, HIGHEST = 0.01, 0.9999


class Columns(NamedTuple):
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
    ends = [(part[np.argmin(value[part])], part[np.argmax(value[part])]) for part in parts]
    rows = np.unique(np.array(ends))
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


# -- bars

BAR_WIDTH = 420
BAR_LEFT, BAR_RIGHT, BAR_TOP, STEP, THICK = 8.0, 56.0, 6.0, 36.0, 13.0


@dataclass(frozen=True)
class Bar:
    name: str
    style: str  # CSS class
    length: float
    low: float | None = None  # interval
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    axis: str
    unit: str
    items: Sequence[Bar]
    mark: Mark

    @property
    def named(self) -> str:
        return f"{self.axis} ({self.unit})"

    def figure(self, title: str, look: str) -> Figure:
        rows = [[bar.name, bar.length, bar.low, bar.high] for bar in self.items]
        data = {"heads": ["bar", self.named, "low", "high"], "rows": rows}
        return Figure(title, look, self.draw(title), data)

    def draw(self, title: str) -> Markup:
        most = max([self.mark.value, 1e-12, *(max(bar.length, bar.high or 0.0) for bar in self.items)])
        x = Scale(0.0, most, BAR_LEFT, BAR_WIDTH - BAR_RIGHT)
        bottom = BAR_TOP + STEP * len(self.items)
        parts = ruler(x, x.ticks(6), BAR_TOP, bottom, self.named)
        parts += [self._bar(bar, x, BAR_TOP + STEP * place) for place, bar in enumerate(self.items)]
        at = float(x(self.mark.value))
        place = {"x": at - 4, "y": BAR_TOP + 9, "text_anchor": "end"}
        parts.append(tag("line", class_="mark", x1=at, x2=at, y1=BAR_TOP, y2=bottom))
        parts.append(tag("text", self.mark.name, class_="marked", **place))
        box = f"0 0 {BAR_WIDTH} {bottom + 40:.0f}"
        return tag("svg", *parts, viewBox=box, role="img", aria_label=title)

    def _bar(self, bar: Bar, x: Scale, top: float) -> Markup:
        name = bar.name if len(bar.name) <= 52 else bar.name[:51] + "…"
        parts = [tag("text", name, class_="name", x=x.start, y=top + 12)]
        reach, middle = float(x(bar.length)), top + 17 + THICK / 2
        said = f"{bar.name}: {number(bar.length)} {self.unit}"
        box = {"x": x.start, "y": top + 17, "width": reach - x.start, "height": THICK}
        parts.append(tag("rect", class_=f"bar {bar.style}", data_tip=said, **box))
        if bar.low is not None and bar.high is not None and np.isfinite(bar.low) and np.isfinite(bar.high):
            low, high = float(x(bar.low)), float(x(bar.high))
            parts.append(tag("line", class_="over", x1=low, x2=high, y1=middle, y2=middle))
            reach = max(reach, high)
        parts.append(tag("text", number(bar.length), class_="tick", x=reach + 5, y=middle + 4))
        return join(*parts)
