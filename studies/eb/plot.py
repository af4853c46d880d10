"""A small line plot as SVG, with a logarithmic x axis; no library needed."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 20, 60


class Series(NamedTuple):
    """A line with its name; `mark` is "ring" or "dot", or "square" for a single point."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    mark: str


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
    """The whole picture."""
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
        parts += _line(axes, each) + _legend(number, each)
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


def _line(axes: _Axes, each: Series) -> list[str]:
    places = [(axes.x(x), axes.y(y)) for x, y in each.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{each.colour}" stroke-width="1.5"/>'
    return [line, *(_mark(x, y, each) for x, y in places)]


def _mark(x: float, y: float, each: Series) -> str:
    if each.mark == "square":
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{each.colour}"/>'
    if each.mark == "ring":
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="{each.colour}" stroke-width="2"/>'
        )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{each.colour}"/>'


def _legend(number: int, each: Series) -> list[str]:
    x, y = WIDTH - RIGHT - 220, TOP + 110 + 20 * number
    return [_mark(x, y - 4, each), f'<text x="{x + 16}" y="{y}">{each.name}</text>']
