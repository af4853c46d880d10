"""A track: requests of one type in lockstep, its stages cut into segments that move or stand as a whole."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from headgate.core.request import Request
from headgate.methods.wait.quota import Quota

WHOLE = (inf,)  # one segment with all stages: WAIT


class Track:
    """Waiting and running requests of a type, and how many may enter each segment per step.

    Stage k of a request brings its output token k + 1 (stage 0 is the prompt), so a request that decodes
    stands before stage `generated`. A segment has the stages beyond the end of the one before it up to its
    own end; the last has no end. A request before the first stage of a later segment waits to enter it.
    """

    def __init__(self, name: str, ends: Sequence[float] = WHOLE, sizes: Sequence[float] = (inf,)) -> None:
        self.name = name
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # for their prompt: they hold no KV
        self.resident: dict[int, Request] = {}  # those that decode, oldest first
        self.ends: tuple[float, ...] = ()
        self.quotas: list[Quota] = []
        self.cut(ends, sizes)

    def cut(self, ends: Sequence[float], sizes: Sequence[float]) -> None:
        """New segments and thresholds; counts of steps go on where a segment of that number was."""
        self.ends = (*ends[:-1], inf)
        for number, size in enumerate(sizes):
            if number < len(self.quotas):
                self.quotas[number].change(size)
            else:
                self.quotas.append(Quota(size))
        del self.quotas[len(sizes) :]

    def places(self) -> list[Place]:
        """The requests in each segment now, and how many may enter it."""
        if len(self.ends) == 1:
            return [Place(self, 0, list(self.resident.values()), self.waiting.values(), len(self.waiting))]
        moving: list[list[Request]] = [[] for _ in self.ends]
        entering: list[list[Request]] = [[] for _ in self.ends]
        for request in self.resident.values():
            stage = request.generated
            number = bisect_left(self.ends, stage)
            if number and stage == self.ends[number - 1] + 1:
                entering[number].append(request)
            else:
                moving[number].append(request)
        head = Place(self, 0, moving[0], self.waiting.values(), len(self.waiting))
        rest = zip(moving[1:], entering[1:], strict=True)
        return [head, *(Place(self, number, m, e, len(e)) for number, (m, e) in enumerate(rest, 1))]


class Place(NamedTuple):
    """One segment of a track at this moment."""

    track: Track
    number: int
    moving: list[Request]  # past its first stage; they go on whenever the segment moves
    entering: Iterable[Request]  # before its first stage, oldest first
    queue: int  # how many those are

    @property
    def quota(self) -> Quota:
        """How many may enter per step."""
        return self.track.quotas[self.number]

    @property
    def skip(self) -> int:
        """Steps to leave out because there is no request to move."""
        return 0 if self.moving else self.quota.idle_steps()

    @property
    def allowed(self) -> float:
        """How many may enter now."""
        return self.quota.next(self.skip)

    @property
    def ready(self) -> bool:
        """There are requests, and as many wait to enter as may; where all may, one is enough."""
        allowed = self.allowed
        return bool(self.moving or self.queue) and (allowed == inf or self.queue >= allowed)

    def entrants(self, now: float = 0.0, max_pause: float = inf) -> list[Request]:
        """Requests that enter if the segment moves now: as many as may, and those paused for too long."""
        if self.allowed == inf:
            return list(self.entering)
        first = list(islice(self.entering, int(self.allowed)))
        return first + self.overdue(now, max_pause, len(first))

    def overdue(self, now: float, max_pause: float, beyond: int = 0) -> list[Request]:
        """Requests before the segment, after the first so many, that hold KV and paused for too long."""
        if not self.number or max_pause == inf:
            return []
        return [r for r in islice(self.entering, beyond, None) if (r.last_token or 0.0) + max_pause <= now]

    def each_stage(self) -> list[Request]:
        """Of the moving, at most a threshold's worth at each stage: the paper's min{n, ·} literally."""
        size, taken, found = self.quota.each, dict[int, int](), []
        for request in self.moving:
            stage = request.generated
            taken[stage] = taken.get(stage, 0) + 1
            if taken[stage] < size + 1:
                found.append(request)
        return found

    def since(self) -> float:
        """When the longest paused request here got its newest token; inf where none holds KV."""
        standing = self.moving if self.number == 0 else [*self.moving, *self.entering]
        return min((r.last_token or 0.0 for r in standing), default=inf)
