"""A small line plot as SVG, with a logarithmic x axis; no library needed."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 60
COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#7f7f7f", "#1f77b4", "#d62728")


class Series(NamedTuple):
    """A line with its name; a single point is drawn as a diamond."""

    name: str
    points: list[tuple[float, float]]


class _Axes(NamedTuple):
    low: float  # log10
    high: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return LEFT + (log10(value) - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.bottom) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)


def draw(series: list[Series], x_label: str, y_label: str) -> str:
    """The whole picture; the second half of the series is dashed."""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    axes = _Axes(
        log10(min(xs)) - 0.1, log10(max(xs)) + 0.1, floor(min(ys) / 10) * 10.0, ceil(max(ys) / 10) * 10.0
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_grid(axes),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">{x_label}</text>',
        f'<text x="18" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 18 {(TOP + HEIGHT - BOTTOM) / 2})">{y_label}</text>',
    ]
    for number, each in enumerate(series):
        parts += _line(axes, each, COLOURS[number % len(COLOURS)], number >= len(series) / 2)
        parts += _legend(number, each, number >= len(series) / 2)
    return "\n".join([*parts, "</svg>", ""])


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for power in range(floor(axes.low), ceil(axes.high) + 1):
        for factor in (1, 2, 5):
            value = factor * 10.0**power
            if axes.low <= log10(value) <= axes.high:
                x = axes.x(value)
                parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>'
                )
                parts.append(
                    f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
                )
    for value in range(int(axes.bottom), int(axes.top) + 1, 10):
        y, colour = axes.y(value), "#888" if value == 0 else "#ddd"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:+d}</text>')
    return parts


def _line(axes: _Axes, each: Series, colour: str, dashed: bool) -> list[str]:
    places = [(axes.x(x), axes.y(y)) for x, y in each.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    radius = 6 if len(places) == 1 else 3.5
    return parts + [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in places]


def _legend(number: int, each: Series, dashed: bool) -> list[str]:
    y = HEIGHT - BOTTOM - 20 - 20 * number
    colour, dash = COLOURS[number % len(COLOURS)], ' stroke-dasharray="6 4"' if dashed else ""
    x = WIDTH - RIGHT - 230
    return [
        f'<line x1="{x}" x2="{x + 34}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<circle cx="{x + 17}" cy="{y - 4}" r="3.5" fill="{colour}"/>',
        f'<text x="{x + 42}" y="{y}">{each.name}</text>',
    ]
