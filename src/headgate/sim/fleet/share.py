"""What one engine of a fleet is sent, where that is known before the run."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.core.ledger import Entry, Ledger
from headgate.sim.engine.arrivals import Arrivals


class Share(Arrivals):
    """Some requests of a workload under their own numbers, and where the engine stands that serves them."""

    def __init__(self, whole: Arrivals, known: list[tuple[Any, ...]], numbers: list[int]) -> None:
        self.total, self.sent, self.outstanding = len(numbers), 0, 0
        self.times, self.cached, self.closed = whole.times, whole.cached, False
        self._known, self._numbers = known, numbers
        self.now = 0.0
        self.events: list[tuple[float, int, int, Any]] = []
        self._look_ahead()

    def take(self, ledger: Ledger) -> Entry:
        id = self._numbers[self.sent]
        self.sent += 1
        self.outstanding += 1
        self._look_ahead()
        return self._handle(ledger, id, self.times[id], self._known[id])

    def _look_ahead(self) -> None:
        self.next_time = self.times[self._numbers[self.sent]] if self.sent < self.total else inf


def shares(whole: Arrivals, engines: int, fits: NDArray[np.bool_], chosen: list[int]) -> list[Share]:
    """One for each engine. `chosen` are the engines of requests that fit; the first refuses the others."""
    of = np.zeros(len(fits), np.int64)
    of[fits] = chosen
    ends = np.cumsum(np.bincount(of, minlength=engines))
    parts = np.split(np.argsort(of, kind="stable"), ends[:-1])
    known = list(whole.known)
    return [Share(whole, known, part.tolist()) for part in parts]
