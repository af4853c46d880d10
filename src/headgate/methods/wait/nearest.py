"""The thresholds nearest to given ones that keep up and fit, for error messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, inf, log10

from headgate.methods.wait.iteration import Lines, Part, held, seconds

MARGIN = 2e-3  # above what a condition asks for, so that four digits of it still satisfy the condition
MOST_ROUNDS = 20_000  # of raising; close to saturation each round gains little
FAR = 1e3  # times memory: sizes that grow beyond this grow for ever
DIGITS = 4

Least = Callable[[Sequence[float], float], list[float]]  # what sizes must be at least, in such an iteration


def nearest(
    lines: Lines, parts: Sequence[Part], sizes: Sequence[float], capacity: float, least: Least
) -> list[float] | None:
    """Given sizes, cut to memory where they do not fit, raised until they satisfy `least`; else the smallest.

    Raising a size makes iterations longer and so raises the others: the map is monotone, its first fixed
    point is the smallest solution above where it began. Where memory ends on the way the solution is cut and
    raised once more. None where not even the smallest solution fits.
    """
    for start in (_cut(parts, sizes, capacity), [0.0] * len(sizes)):
        above = _raised(lines, parts, start, FAR * capacity, least)
        found = above and _raised(lines, parts, _cut(parts, above, capacity), capacity, least)
        if found:
            return found
    return None


def _cut(parts: Sequence[Part], sizes: Sequence[float], capacity: float) -> list[float]:
    """The same in proportion, a little less than memory holds."""
    share = (1 - MARGIN) * capacity / held(parts, sizes)
    return [rounded(share * size, up=False) for size in sizes] if share < 1 - MARGIN else list(sizes)


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
