"""Averages learned one value at a time: Ema, TimedEma, Mean, WindowMean. `value` is None before the first."""

from __future__ import annotations

from collections import deque
from math import exp, fsum, sqrt

from headgate.core.build import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Ema:
    """An exponential average by updates: a value's weight halves with every `half_life` later ones.

    The first value is taken whole. A weight of the new value of 0.3 (the smoothing of theta in the EB
    paper's public code) is a half-life of log(0.5) / log(0.7) = 1.943 updates.
    """

    def __init__(self, half_life: float) -> None:
        self._weight = 1 - 0.5 ** (1 / half_life)
        self.value: float | None = None

    def update(self, x: float) -> None:
        before = self.value
        self.value = float(x) if before is None else before + self._weight * (x - before)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TimedEma:
    """An exponential average by time, quick to rise and slow to fall (or the reverse).

    `rising` and `falling` are time constants in seconds: after one of them a step in x is followed by 63 %.
    For N_obs of EB+ (arXiv 2606.00516, equation 8). The paper says "moving average"; its public code weighs
    per scheduler step (0.3 up, 0.03 down), so its memory shrinks with the steps; ours does not.
    """

    def __init__(self, rising: float, falling: float) -> None:
        self._rising, self._falling = rising, falling
        self.value: float | None = None

    def update(self, x: float, seconds: float) -> None:
        before = self.value
        if before is None:
            self.value = float(x)
            return
        constant = self._rising if x > before else self._falling
        self.value = before + (1 - exp(-seconds / constant)) * (x - before)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Mean:
    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0

    def update(self, x: float) -> None:
        self._total += x
        self._count += 1

    @property
    def value(self) -> float | None:
        return self._total / self._count if self._count else None


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class WindowMean:
    """The mean of the last `size` values. Their order does not matter: the sum is exact, rounded once."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, x: float) -> None:
        self._values.append(x)

    @property
    def value(self) -> float | None:
        return fsum(self._values) / len(self._values) if self._values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of the window (divided by its size, not by one less)."""
        mean = self.value
        if mean is None:
            return None
        return sqrt(fsum((x - mean) ** 2 for x in self._values) / len(self._values))
