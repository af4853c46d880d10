"""How often a request may be tried again: per request, and for all of them together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

SPAN = 60.0  # seconds over which the share is taken
FLOOR = 10  # retries a minute that are always allowed, so that a quiet router retries too
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds


class RetryBudget:
    """At most a share of the requests of the last minute may be retries. Counted by the second."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.denied = 0
        self._requests: deque[tuple[int, int]] = deque()
        self._retries: deque[tuple[int, int]] = deque()
        self._sums = [0, 0]

    def arrived(self, now: float) -> None:
        self._add(0, self._requests, now)

    def take(self, now: float) -> bool:
        """Whether one more retry is within the budget; it is counted if so."""
        self._forget(0, self._requests, now)
        self._forget(1, self._retries, now)
        if self._sums[1] >= max(FLOOR, self.share * self._sums[0]) or self.share == 0:
            self.denied += 1
            return False
        self._add(1, self._retries, now)
        return True

    def _add(self, which: int, seconds: deque[tuple[int, int]], now: float) -> None:
        second = int(now)
        if seconds and seconds[-1][0] == second:
            seconds[-1] = second, seconds[-1][1] + 1
        else:
            seconds.append((second, 1))
            self._forget(which, seconds, now)
        self._sums[which] += 1

    def _forget(self, which: int, seconds: deque[tuple[int, int]], now: float) -> None:
        while seconds and seconds[0][0] <= now - SPAN:
            self._sums[which] -= seconds.popleft()[1]


def backoff(attempt: int, draw: Callable[[], float]) -> float:
    """Seconds before the next try: 50 ms doubled, at most 1 s, with half of it drawn.

    Args:
        attempt: tries so far, at least 1.
        draw: a number from [0, 1).
    """
    pause: float = min(FIRST_PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE)
    return pause * (0.5 + 0.5 * draw())
