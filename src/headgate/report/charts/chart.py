"""A chart with two axes: lines, steps, bands, points, and reference lines with their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headgate.report.charts.marks import Mark, draw_marks, ruler
from headgate.report.charts.scales import LINEAR, LOG, TAIL, Floats, Scale, padded
from headgate.report.document import Figure
from headgate.report.html.markup import Markup, position, tag

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 12.0, 42.0
COLOURS, DASHES = 8, 4  # as many as the style sheet has


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
        """The scale that holds all values."""
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


@dataclass(frozen=True)
class Series:
    """One line, cloud of points or band. `colour` counts into the palette."""

    name: str
    x: Floats
    y: Floats
    colour: int = 0
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
class Chart:
    """A drawing with its data."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()

    def figure(self, title: str, look: str, note: str = "") -> Figure:
        if len({each.name for each in self.series}) == 1 and not all(each.alone for each in self.series):
            alone = [replace(each, alone=True) for each in self.series]
            return replace(self, series=alone).figure(title, look, note)
        names = dict.fromkeys((each.name, each.style) for each in self.series)
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
        parts += [_draw(each, x, y) for each in sorted(self.series, key=lambda each: each.shape != "band")]
        parts += draw_marks(self.marks, x, y)
        return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)

    def _data(self) -> dict[str, Any]:
        x, y = self.scales()
        return {
            "x": {"label": self.x.label, "kind": self.x.kind, **_ends(x)},
            "y": {"label": self.y.label, "kind": self.y.kind, **_ends(y)},
            "series": [{"name": each.name, "style": each.style, **_values(each)} for each in self.series],
        }


def axes(x: Scale, y: Scale, below: str, beside: str) -> Markup:
    """Grid lines, tick labels and axis labels."""
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
    """Ticks whose labels do not touch."""
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


def _draw(series: Series, x: Scale, y: Scale) -> Markup:
    across, up = x(series.x), y(series.y)
    across, up = np.where(np.isnan(series.x), np.nan, across), np.where(np.isnan(series.y), np.nan, up)
    named = {"data_series": series.name}
    if series.shape == "band" and series.low is not None and series.high is not None:
        outline = path(
            np.concatenate((across, across[::-1])), np.concatenate((y(series.high), y(series.low)[::-1]))
        )
        return tag("path", class_=f"band {series.style}", d=outline + "Z", **named)
    parts = []
    if series.shape != "points":
        parts.append(tag("path", class_=f"line {series.style}", d=path(across, up, series.shape == "step")))
    if series.shape in ("points", "linked"):
        parts += _points(series, across, up, y)
    return tag("g", *parts, **named)


def _points(series: Series, across: Floats, up: Floats, y: Scale) -> list[Markup]:
    parts = []
    if series.low is not None and series.high is not None:
        for at, low, high in zip(across, y(series.low), y(series.high), strict=True):
            if np.isfinite(low) and np.isfinite(high):
                ends = {"x1": float(at), "x2": float(at), "y1": float(low), "y2": float(high)}
                parts.append(tag("line", class_=f"whisker {series.style}", **ends))
    for at, height in zip(across, up, strict=True):
        if np.isfinite(at) and np.isfinite(height):
            parts.append(tag("circle", class_=f"dot {series.style}", cx=float(at), cy=float(height), r=3.4))
    return parts


def _ends(scale: Scale) -> dict[str, float]:
    return {"low": scale.low, "high": scale.high, "start": scale.start, "end": scale.end}


def _values(series: Series) -> dict[str, Any]:
    values = {"x": series.x, "y": series.y, "low": series.low, "high": series.high}
    return {name: brief(each) for name, each in values.items() if each is not None}


def brief(values: Floats) -> list[float | None]:
    """Four digits that matter, None where not known: what a tooltip and a CSV file show."""
    known = np.asarray(values, float).tolist()
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in known]


__all__ = ["LINEAR", "LOG", "TAIL", "Axis", "Chart", "Mark", "Series", "axes", "brief", "path"]
