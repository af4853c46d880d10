"""The grid of an axis, reference lines across a chart, and where their names fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.report.charts.scales import Scale
from headgate.report.html.markup import Markup, join, tag

NEAR = 80.0  # pixels between two upright lines whose names would meet
ROW = 13.0  # pixels from one name to the next below it


@dataclass(frozen=True)
class Mark:
    """A reference line across the chart: a promise, a bound, an optimum."""

    name: str
    value: float
    along: str = "x"  # the axis the value belongs to


def ruler(x: Scale, ticks: Sequence[tuple[float, str]], top: float, bottom: float, name: str) -> list[Markup]:
    """Upright grid lines with their values below them, and the name of the axis."""
    parts: list[Markup] = []
    for value, label in ticks:
        at = float(x(value))
        parts.append(tag("line", class_="grid", x1=at, x2=at, y1=top, y2=bottom))
        parts.append(tag("text", label, class_="tick", x=at, y=bottom + 15, text_anchor="middle"))
    middle = (x.start + x.end) / 2
    return [*parts, tag("text", name, class_="axis", x=middle, y=bottom + 34, text_anchor="middle")]


def draw_marks(marks: Sequence[Mark], x: Scale, y: Scale) -> list[Markup]:
    """Every line with its name: beside upright ones, at the right end of level ones."""
    upright = [mark for mark in marks if mark.along == "x"]
    level = [mark for mark in marks if mark.along != "x"]
    found = [_upright(mark, upright, level, x, y) for mark in upright]
    return found + [_level(mark, x, y) for mark in level]


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
    """Away from a line that is near on one side; else where there is more room."""
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
