"""The tables of a fleet: one row per request whichever engine served it, and the steps of every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from headgate.core.request import Request
from headgate.record.recorder import Recorder, Tables


class EngineRecorder(Recorder):
    """The recorder of one engine of a fleet. Requests arrive at the fleet, not here."""

    def arrived(self, request: Request, now: float) -> None:
        """It was sent here; the fleet knows since when it waits."""
        self._here[request.id].replica = self._replica

    def parted(self, request: Request) -> None:
        self._close_stay(request.id)

    def joined(self, request: Request, now: float, runs: bool) -> None:
        self.arrived(request, now)
        if runs:
            self.resumed(request, now)

    def came_without(self, request: Request) -> None:
        self._here[request.id].replica = self._replica
        if request.last_token is not None:
            self._last_before.setdefault(request.id, request.last_token)


class FleetRecorder:
    def __init__(self, kinds: Sequence[str], engines: int) -> None:
        self.rows = Tables(kinds)
        self.engines = [EngineRecorder((), number, self.rows) for number in range(engines)]

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """All that was recorded so far; every table but the requests is sorted by engine, then by time."""
        ticks = {number: engine.tick for number, engine in enumerate(self.engines)}
        return {"requests": self.rows.table(), **self.rows.engines(ticks)}
