"""Roles that follow a plan by one engine at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from headgate.core.fleet import CLOSED, MIXED, Fleet, Replica


class RoleSteps:
    """One change per step, of the engine that the change costs least, and no engine twice within `dwell`.

    A change of role drains by itself: nothing new of the wrong sort is sent, what runs there ends there.
    """

    def __init__(self, dwell: float) -> None:
        self.dwell = dwell  # seconds
        self._changed: dict[int, float] = {}

    def step(self, fleet: Fleet, wanted: Sequence[str]) -> tuple[tuple[int, str], ...]:
        """The next change towards so many engines of each role; none if all is as it should be."""
        open = [replica for replica in fleet.replicas if replica.room != CLOSED]
        missing = Counter(wanted[: len(open)])
        missing.subtract(replica.role for replica in open)
        role = max(missing, key=lambda each: missing[each], default="")
        if not role or missing[role] <= 0:
            return ()
        settled = [
            each
            for each in open
            if missing[each.role] < 0 and fleet.now - self._changed.get(each.id, -inf) >= self.dwell
        ]
        if not settled:
            return ()
        chosen = min(settled, key=lambda each: (_in_the_way(each, role), each.id))
        self._changed[chosen.id] = fleet.now
        return ((chosen.id, role),)


def _in_the_way(replica: Replica, role: str) -> int:
    """What is on it that the new role would not take: decodes before a prompt can start, or prompts."""
    inside = replica.decoding if role == MIXED else replica.prefilling
    return sum(inside.values())
