"""How long a queue takes: served rates by class, predicted waits, Retry-After."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, log
from typing import NamedTuple

HALF_LIFE = 30.0  # seconds, of the rate at which a class is served
SOONEST, LATEST = 1, 60  # seconds of Retry-After
UNKNOWN = 15.0  # seconds predicted for a queue of which nobody was served yet


class ClassLimits(NamedTuple):
    """What one class may have waiting."""

    queue: int = 256  # requests
    ttl: float = 30.0  # seconds in the queue


class ServedRate:
    """Requests per second that leave a queue for an engine, by exponential window."""

    __slots__ = ("_decay", "_last", "_start", "_weight")

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._decay = log(2) / half_life
        self._weight, self._last = 0.0, 0.0
        self._start: float | None = None

    def served(self, now: float) -> None:
        """One more."""
        if self._start is None:
            self._start = self._last = now
        self._weight = self._weight * exp(-self._decay * (now - self._last)) + 1.0
        self._last = now

    def rate(self, now: float) -> float:
        """Requests per second; 0 before the first. A window that is not full yet counts as long as it is."""
        if self._start is None:
            return 0.0
        weight = self._weight * exp(-self._decay * (now - self._last))
        return weight * self._decay / (1 - exp(-self._decay * max(now - self._start, 1.0)))


class Waits:
    """Predicted waits of all classes."""

    def __init__(self, limits: Mapping[str, ClassLimits], draw: Callable[[], float]) -> None:
        self._limits, self._draw = dict(limits), draw
        self._rates: dict[str, ServedRate] = {}
        self._default = ClassLimits()

    def limits(self, kind: str) -> ClassLimits:
        """Of one class."""
        return self._limits.get(kind, self._default)

    def set_limits(self, limits: Mapping[str, ClassLimits]) -> None:
        """New ones, after a reload."""
        self._limits = dict(limits)

    def served(self, kind: str, now: float) -> None:
        """One request of the class was sent to an engine."""
        if kind not in self._rates:
            self._rates[kind] = ServedRate()
        self._rates[kind].served(now)

    def predicted(self, kind: str, ahead: int, now: float) -> float:
        """Seconds until a request behind so many others of its class is sent."""
        rate = self._rates[kind].rate(now) if kind in self._rates else 0.0
        if rate > 0:
            return ahead / rate
        return UNKNOWN if ahead else 0.0

    def retry_after(self, kind: str, ahead: int, now: float) -> int:
        """Whole seconds after which a refused client may come again, jittered by an eighth."""
        wait = self.predicted(kind, ahead, now) * (0.875 + 0.25 * self._draw())
        return int(min(max(wait, SOONEST), LATEST))
