"""Small figures as SVG, without a library: points with intervals, in panels side by side, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDE, NARROW = 470, 280  # of one of two panels, of one of more: letters stay readable in a column of text
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 56, 14, 70, 92
LETTER = 6.6  # about as wide as one is, in the legend
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # told apart by colour-blind readers, too
TICKS = 5


class Point(NamedTuple):
    """A mean of so many, with an interval or a range around it."""

    x: float
    mean: float
    low: float
    high: float
    runs: int  # or bursts: Panel.counted


def single(x: float, value: float) -> Point:
    return Point(x, value, value, value, 1)


@dataclass(frozen=True)
class Series:
    """Points that belong together."""

    label: str
    points: tuple[Point, ...]
    colour: str = ""  # else by its place in the panel
    strong: bool = False  # what the figure is about


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    x: str
    y: str
    series: tuple[Series, ...]
    counted: str = "bursts"  # what a point is the mean of


def svg(title: str, panels: Sequence[Panel]) -> str:
    """A figure that stands alone; its text follows the reader's light or dark scheme."""
    wide = WIDE if len(panels) <= 2 else NARROW
    most = max(panels, key=lambda panel: len(panel.series)).series
    colours = {each.label: each.colour or COLOURS[place % len(COLOURS)] for place, each in enumerate(most)}
    shared = all(series.label in colours for panel in panels for series in panel.series)
    rows = 0 if shared else max((len(panel.series) + 1) // 2 for panel in panels)
    width, height = wide * len(panels), HEIGHT - BOTTOM + 48 + 18 * rows
    style = (
        "<style>text{font:12px system-ui,sans-serif;fill:#222}.a{stroke:#888;fill:none}.g{stroke:#8883}"
        "rect{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}rect{fill:#16181c}}</style>"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>{style}",
        f'<rect width="{width}" height="{height}"/>',
        f'<text x="{LEFT - 40}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    if shared:
        x = LEFT - 36.0
        for name, colour in colours.items():
            parts += _key(x, 40, name, colour)
            x += 34 + LETTER * len(name)
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * wide},0)">')
        if not number or panel.y != panels[0].y:
            parts.append(_text(LEFT - 40, TOP - 8, panel.y, "start"))
        for place, series in enumerate(panel.series):
            if not shared:
                x, y = LEFT + (wide - LEFT) // 2 * (place % 2), HEIGHT - BOTTOM + 56 + 18 * (place // 2)
                parts += _key(x, y, series.label, series.colour or COLOURS[place % len(COLOURS)])
        parts += [*_panel(panel, wide, colours if shared else {}), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, width: int, colours: dict[str, str]) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    xs, ys = [point.x for point in points], [end for point in points for end in (point.low, point.high)]
    x_ticks, y_ticks = _ticks(min(xs, default=0), max(xs, default=1)), _ticks(min([0, *ys]), max([0, *ys]))
    place = _Scale(x_ticks, y_ticks, width)
    drawn = []
    for tick in y_ticks:
        y = place.y(tick)
        drawn.append(f'<path class="g" d="M{LEFT},{y:.1f}H{width - RIGHT}"/>')
        drawn.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        drawn.append(_text(place.x(tick), HEIGHT - BOTTOM + 18, _short(tick)))
    drawn.append(f'<path class="a" d="M{LEFT},{place.y(0):.1f}H{width - RIGHT}"/>')
    middle = (LEFT + width - RIGHT) / 2
    drawn.append(_text(middle, HEIGHT - BOTTOM + 36, panel.x))
    for number, series in enumerate(panel.series):
        colour = colours.get(series.label) or series.colour or COLOURS[number % len(COLOURS)]
        drawn += _series(series, colour, place, panel.counted)
    return drawn


def _series(series: Series, colour: str, place: _Scale, counted: str) -> list[str]:
    path = " ".join(f"{place.x(point.x):.1f},{place.y(point.mean):.1f}" for point in series.points)
    line = 'stroke-width="3"' if series.strong else 'stroke-width="2" stroke-opacity="0.5"'
    drawn = [f'<polyline points="{path}" fill="none" stroke="{colour}" {line}/>']
    for point in series.points:
        at = place.x(point.x)
        said = (
            f"{series.label}: {point.mean:.1f} % [{point.low:.1f}, {point.high:.1f}], {point.runs} {counted}"
        )
        ends = f"M{at:.1f},{place.y(point.low):.1f}V{place.y(point.high):.1f}"
        drawn.append(f'<path d="{ends}" stroke="{colour}"/>')
        place_of = f'cx="{at:.1f}" cy="{place.y(point.mean):.1f}"'
        drawn.append(f'<circle {place_of} r="3.5" fill="{colour}"><title>{said}</title></circle>')
    return drawn


def _key(x: float, y: float, label: str, colour: str) -> list[str]:
    return [f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>', _text(x + 10, y, label, "start")]


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


class _Scale:
    """From values to places."""

    def __init__(self, xs: list[float], ys: list[float], width: int) -> None:
        self._x, self._y, self._across = (xs[0], xs[-1]), (ys[0], ys[-1]), width - LEFT - RIGHT

    def x(self, value: float) -> float:
        """Across."""
        low, high = self._x
        return LEFT + self._across * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Down."""
        low, high = self._y
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Round values that cover both ends."""
    span = (high - low) or 1.0
    rough = span / TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = floor(low / step)
    last = -floor(-high / step)
    return [round(step * number, 12) for number in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"
