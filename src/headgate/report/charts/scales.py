"""Axes: where a value lies between two pixels, and which values get a tick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LINEAR, LOG, TAIL = "linear", "log", "tail"
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
        """Positions; what lies outside is put on the edge."""
        inside = np.clip(np.asarray(values, np.float64), self.low, self.high)
        low, high = (float(self._straight(np.float64(end))) for end in (self.low, self.high))
        share = (self._straight(inside) - low) / ((high - low) or 1.0)
        return np.asarray(self.start + (self.end - self.start) * share)

    def _straight(self, values: Any) -> Any:
        if self.kind == LOG:
            return np.log10(values)
        return np.log10(values / (1 - values)) if self.kind == TAIL else values

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Values and their labels, at most so many."""
        if self.kind == TAIL:
            shown = [share for share in PERCENTILES if self.low <= share <= self.high]
            return [(share, f"{100 * share:g} %") for share in shown]
        values = _decades(self.low, self.high, most) if self.kind == LOG else []
        values = values or nice(self.low, self.high, most)
        if self.whole:
            values = [value for value in values if abs(value - round(value)) < 1e-9]
        return [(value, label) for value, label in zip(values, labels(values), strict=True)]


def nice(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two values: multiples of 1, 2 or 5 times a power of ten."""
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
        found = [each * 10.0**power for power in range(first, last + 1) for each in between]
        found = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if 2 <= len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)] if len(found) > most else []


def labels(values: list[float]) -> list[str]:
    """Short numbers, each with as many decimals as tell it from its neighbours."""
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
    """A little room above; from zero on where that is near."""
    if not high > low:
        room = abs(high) * 0.5 or 1.0
        return (0.0 if low >= 0 else low - room), high + room
    room = share * (high - low)
    return (0.0 if 0 <= low < 0.5 * high else low - room), high + room
