"""When to refuse, and when a refused client may come again."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

SOONEST, LATEST = 1, 60  # seconds of Retry-After
HALF_LIFE = 30.0  # seconds, of the rate at which a class is served


class ServedRate:
    """Requests a second that leave a queue for an engine, as an exponential window. Time is given."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._decay = 0.6931471805599453 / half_life
        self._weight = 0.0
        self._seen = 0.0
        self._start: float | None = None

    def served(self, now: float) -> None:
        """One more."""
        self._advance(now)
        self._weight += 1

    def rate(self, now: float) -> float:
        """Requests a second; 0 before the first one."""
        if self._start is None:
            return 0.0
        self._advance(now)
        covered = 1 - exp(-self._decay * max(now - self._start, 1.0))
        return self._weight * self._decay / covered

    def _advance(self, now: float) -> None:
        if self._start is None:
            self._start = self._seen = now
        elapsed = max(0.0, now - self._seen)
        self._weight *= exp(-self._decay * elapsed)
        self._seen = max(now, self._seen)


def predicted_wait(ahead: int, rate: float) -> float:
    """Seconds until a request behind `ahead` others is served; 0 where nothing is known yet."""
    return ahead / rate if rate > 0 and ahead > 0 else 0.0


def retry_after(ahead: int, rate: float, draw: Callable[[], float]) -> int:
    """Whole seconds a refused client should wait: the queue over the served rate, jittered by a quarter."""
    wait = ahead / rate if rate > 0 else SOONEST if ahead == 0 else LATEST / 4
    return int(min(max(wait * (0.875 + 0.25 * draw()), SOONEST), LATEST))


class Bytes:
    """Bytes of the bodies that are in the router."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, many: int) -> bool:
        """Whether they fit; they are counted if so."""
        if self.held + many > self.most:
            return False
        self.held += many
        return True

    def give_back(self, many: int) -> None:
        """Their request is gone."""
        self.held -= many
