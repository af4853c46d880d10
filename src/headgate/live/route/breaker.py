"""A circuit breaker per engine: open after failures, then one probe request at a time."""

from __future__ import annotations

from collections import deque
from enum import Enum

IN_A_ROW = 5
WINDOW = 20
SHARE = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 120.0  # seconds
CLOSES_AFTER = 2  # successes of probes
SUSPECT, OFTEN = 3, 5  # answered errors in a row, or of WINDOW answers: then it is found out whose they are


class State(Enum):
    """Whether requests may go there."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Opens after 5 failures in a row or 10 of the last 20, for 10 s, doubled to 120 s while probes fail.

    Only what is the engine's own is a failure; the caller decides. An error that the engine answered may be
    the request's, so it is a doubt at first, which raises suspicion and opens nothing. Time is given, not
    read.
    """

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.opened = 0  # how often
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._row = 0
        self._doubts = 0  # in a row
        self._doubted: deque[bool] = deque(maxlen=WINDOW)  # which of the newest answers were errors
        self.on_answers = False  # it is open for errors that the engine answered
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._probes = 0  # probe requests under way
        self._good = 0

    def allows(self, now: float) -> int | None:
        """How many more requests it lets through: None for any number."""
        if self.state is State.CLOSED:
            return None
        if self.state is State.OPEN and now >= self._until:
            self.state, self._probes, self._good = State.HALF_OPEN, 0, 0
        return max(0, 1 - self._probes) if self.state is State.HALF_OPEN else 0

    @property
    def reopens_at(self) -> float | None:
        """When an open breaker lets a probe through."""
        return self._until if self.state is State.OPEN else None

    @property
    def suspected(self) -> bool:
        """Whether requests that it answers with an error should be tried elsewhere, to see whose it is."""
        often = self._doubts >= SUSPECT or self._doubted.count(True) >= OFTEN
        return often or self.state is not State.CLOSED

    def sent(self) -> None:
        """A request goes to the engine."""
        if self.state is State.HALF_OPEN:
            self._probes += 1

    def gone(self) -> None:
        """A request ended without telling anything of the engine, such as a client that hung up."""
        if self.state is State.HALF_OPEN:
            self._probes = max(0, self._probes - 1)

    def doubted(self) -> None:
        """It answered with an error; whether that is the engine's or the request's is not known."""
        self._doubts += 1
        self._doubted.append(True)
        self.gone()

    def cleared(self) -> None:
        """It serves others: a token came, or its error was the request's, which failed elsewhere too."""
        self._doubts = 0

    def succeeded(self) -> None:
        self._row = self._doubts = 0
        self._doubted.append(False)
        self._recent.append(True)
        if self.state is State.HALF_OPEN:
            self._probes = max(0, self._probes - 1)
            self._good += 1
            if self._good >= CLOSES_AFTER:
                self.state, self._pause, self.on_answers = State.CLOSED, FIRST_PAUSE, False
                self._recent.clear()

    def failed(self, now: float, may_open: bool = True, answered: bool = False) -> None:
        """The engine could not be reached, reset the connection, was late, or fails where others serve."""
        self._row += 1
        self._recent.append(False)
        if not may_open:
            self.gone()
        elif self.state is State.HALF_OPEN:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._open(now, answered)
        elif self.state is State.CLOSED and (self._row >= IN_A_ROW or self._half_failed()):
            self._open(now, answered)

    def _half_failed(self) -> bool:
        return len(self._recent) == WINDOW and self._recent.count(False) >= SHARE * WINDOW

    def _open(self, now: float, answered: bool) -> None:
        self.on_answers = answered
        self.state, self._until, self._row = State.OPEN, now + self._pause, 0
        self.opened += 1
        self._recent.clear()
