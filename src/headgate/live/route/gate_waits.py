"""How long a queue takes: served rates by class, predicted waits, Retry-After."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headgate.estimators.traffic import WindowRate

HALF_LIFE = 30.0  # seconds, of the rate at which a class is served
SOONEST, LATEST = 1, 60  # seconds of Retry-After
UNKNOWN = 15.0  # seconds predicted for a queue of which nobody was served yet


class ClassLimits(NamedTuple):
    """What one class may have waiting."""

    queue: int = 256  # requests
    ttl: float = 30.0  # seconds in the queue


class Waits:
    """Predicted waits of all classes."""

    def __init__(self, limits: Mapping[str, ClassLimits], draw: Callable[[], float]) -> None:
        self._limits, self._draw = dict(limits), draw
        self._rates: dict[str, WindowRate] = {}
        self._default = ClassLimits()

    def limits(self, kind: str) -> ClassLimits:
        return self._limits.get(kind, self._default)

    def set_limits(self, limits: Mapping[str, ClassLimits]) -> None:
        """New ones, after a reload."""
        self._limits = dict(limits)

    def served(self, kind: str, now: float) -> None:
        """One request of the class was sent to an engine."""
        if kind not in self._rates:
            self._rates[kind] = WindowRate(HALF_LIFE)
        self._rates[kind].update(now)

    def predicted(self, kind: str, ahead: int, now: float) -> float:
        """Seconds until a request behind so many others of its class is sent."""
        rate = self._rates[kind].value(now) if kind in self._rates else 0.0
        if rate > 0:
            return ahead / rate
        return UNKNOWN if ahead else 0.0

    def retry_after(self, kind: str, ahead: int, now: float) -> int:
        """Whole seconds after which a refused client may come again, jittered by an eighth."""
        wait = self.predicted(kind, ahead, now) * (0.875 + 0.25 * self._draw())
        return int(min(max(wait, SOONEST), LATEST))
