"""The thresholds nearest to given ones that keep up and fit, for whoever gave some that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, inf, log10

from headgate.planners.iteration import Lines, Part, held, seconds

MARGIN = 2e-3  # above what a condition asks for, so that four digits of it still satisfy the condition
MOST_ROUNDS = 20_000  # of raising; close to saturation each round gains little
DIGITS = 4

Least = Callable[[Sequence[float], float], list[float]]  # what sizes must be at least, in such an iteration


def nearest(
    lines: Lines, parts: Sequence[Part], sizes: Sequence[float], capacity: float, least: Least
) -> list[float] | None:
    """Given sizes raised until they satisfy `least`; else the same from sizes cut to memory, or from nothing.

    Raising a size makes iterations longer and so raises the others: the map is monotone, its first fixed
    point is the smallest solution above where it began. None where memory ends first, wherever it begins.
    """
    share = min(1.0, (1 - MARGIN) * capacity / held(parts, sizes))
    cut = [rounded(share * size, up=False) for size in sizes]
    for start in (sizes, cut, [0.0] * len(sizes)):
        found = _raised(lines, parts, start, capacity, least)
        if found is not None:
            return found
    return None


def _raised(
    lines: Lines, parts: Sequence[Part], start: Sequence[float], capacity: float, least: Least
) -> list[float] | None:
    sizes = list(start)
    for _ in range(MOST_ROUNDS):
        if held(parts, sizes) > capacity:
            return None
        needed = least(sizes, seconds(lines, parts, sizes))
        if all(size >= more for size, more in zip(sizes, needed, strict=True)):
            return sizes
        sizes = [
            size if size >= more else rounded(more * (1 + MARGIN), up=True)
            for size, more in zip(sizes, needed, strict=True)
        ]
    return None


def rounded(value: float, up: bool) -> float:
    """Four digits, never on the wrong side of a bound."""
    if not 0 < value < inf:
        return value
    scale = 10.0 ** (DIGITS - 1 - floor(log10(value)))
    return (floor(value * scale) + up) / scale
