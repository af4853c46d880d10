"""Horizontal bars, whole or in parts, with intervals and a reference line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headgate.report.charts.marks import Mark, ruler
from headgate.report.charts.scales import Scale
from headgate.report.document import Figure
from headgate.report.html.markup import Markup, join, tag
from headgate.report.numbers import number

WIDTH = 420
LEFT, RIGHT, TOP, STEP, THICK = 8.0, 56.0, 6.0, 36.0, 13.0


@dataclass(frozen=True)
class Bar:
    """One bar: its parts as (name, CSS class, length), and the interval of its whole length."""

    name: str
    parts: tuple[tuple[str, str, float], ...]
    low: float | None = None
    high: float | None = None

    @property
    def length(self) -> float:
        return sum(length for _, _, length in self.parts)


@dataclass(frozen=True)
class Bars:
    """A bar chart. `unit` belongs to the axis below."""

    axis: str
    unit: str
    items: Sequence[Bar]
    mark: Mark | None = None

    @property
    def named(self) -> str:
        return f"{self.axis} ({self.unit})" if self.unit else self.axis

    def figure(self, title: str, look: str, note: str = "") -> Figure:
        """With a legend where bars have parts."""
        several = any(len(bar.parts) > 1 for bar in self.items)
        each = [(bar, *part) for bar in self.items for part in bar.parts]
        entries = dict.fromkeys((name, f"block {style}") for _, name, style, _ in each)
        rows = [[bar.name, name, length, bar.low, bar.high] for bar, name, _, length in each]
        heads = ["bar", "part", self.named, "low", "high"]
        legend = tuple(entries) if several else ()
        return Figure(title, look, self.draw(title), {"heads": heads, "rows": rows}, legend, note=note)

    def draw(self, title: str) -> Markup:
        ends = [max(bar.length, bar.high or 0.0) for bar in self.items]
        most = max([*ends, self.mark.value if self.mark else 0.0, 1e-12])
        x = Scale(0.0, most, LEFT, WIDTH - RIGHT)
        bottom = TOP + STEP * len(self.items)
        height = bottom + 40
        parts = ruler(x, x.ticks(6), TOP, bottom, self.named)
        parts += [self._bar(bar, x, TOP + STEP * place) for place, bar in enumerate(self.items)]
        if self.mark:
            at = float(x(self.mark.value))
            parts.append(tag("line", class_="mark", x1=at, x2=at, y1=TOP, y2=bottom))
            parts.append(tag("text", self.mark.name, class_="marked", x=at - 4, y=TOP + 9, text_anchor="end"))
        return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title)

    def _bar(self, bar: Bar, x: Scale, top: float) -> Markup:
        name = bar.name if len(bar.name) <= 52 else bar.name[:51] + "…"
        parts = [tag("text", name, class_="name", x=x.start, y=top + 12)]
        done = 0.0
        for part, style, length in bar.parts:
            left, right = float(x(done)), float(x(done + max(length, 0.0)))
            done += max(length, 0.0)
            said = f"{bar.name}{f', {part}' if part else ''}: {number(length)} {self.unit}"
            box = {"x": left, "y": top + 17, "width": max(right - left, 0.0), "height": THICK}
            parts.append(tag("rect", class_=f"bar {style}", data_tip=said, **box))
        middle = top + 17 + THICK / 2
        reach = float(x(done))
        if bar.low is not None and bar.high is not None and np.isfinite(bar.low) and np.isfinite(bar.high):
            low, high = float(x(bar.low)), float(x(bar.high))
            parts.append(tag("line", class_="over", x1=low, x2=high, y1=middle, y2=middle))
            reach = max(reach, high)
        parts.append(tag("text", number(bar.length), class_="tick", x=reach + 5, y=middle + 4))
        return join(*parts)
