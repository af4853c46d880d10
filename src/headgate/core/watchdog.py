"""Notices a request that is not served, so that a bad policy stops the run instead of spoiling it."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.core.ledger import Ledger

LEAST_STEPS = 32


class Watchdog:
    """Checks every `limit` seconds; a request without progress between two checks is starving.

    It watches every half-done prompt, every decode, and the head of the queue. A head that never moves is
    starving when another request was admitted meanwhile, or when none runs; while the same requests run on,
    the engine is just full. Detection takes one to two limits.

    Where the driver says how many `steps` have run, a look needs `LEAST_STEPS` since the last one: an engine
    that stands still (a suspended machine, a step of minutes) starves everybody, and no policy is to blame.
    """

    def __init__(self, limit: float) -> None:
        if not limit > 0:
            raise InputError(f"watchdog is {limit} s; give a time above 0")
        self.limit = limit
        self.next_look = limit
        self._seen: dict[int, tuple[int, int]] = {}
        self._steps = 0  # at the last look

    def forget(self, now: float) -> None:
        """The engine was paused, or another policy decides now: start again."""
        self._seen = {}
        self.next_look = now + self.limit

    def look(self, ledger: Ledger, now: float, steps: int | None = None) -> str | None:
        """Why the run should stop, or None."""
        if steps is not None:
            if steps - self._steps < LEAST_STEPS:
                return None
            self._steps = steps
        self.next_look = now + self.limit
        watched = [*ledger.prefilling.values(), *ledger.decoding.values()]
        just_full = watched and all(request.id in self._seen for request in watched)
        if ledger.waiting and not just_full:
            watched.append(next(iter(ledger.waiting.values())))
        before, self._seen = self._seen, {r.id: (r.generated, r.todo) for r in watched}
        stuck = [id for id, progress in self._seen.items() if before.get(id) == progress]
        if not stuck:
            return None
        first = min(stuck)
        where = (
            "waiting"
            if first in ledger.waiting
            else "half-prefilled"
            if first in ledger.prefilling
            else "held"
        )
        return f"request {first} ({where}) and {len(stuck) - 1} more made no progress for {self.limit:g} s"
