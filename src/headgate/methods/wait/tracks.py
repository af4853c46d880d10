"""Tracks of WAIT: a type's requests in segments, and how many of them each step lets in."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil, floor, inf
from typing import Final, NamedTuple

from headgate.core.request import Request

WHOLE = (inf,)  # one segment with all stages: WAIT
ENTERED: Final = -1


class Track:
    """Waiting and running requests of a type, and how many may enter each segment per step.

    Stage k of a request brings its output token k + 1 (stage 0 is the prompt), so a request that decodes
    stands before stage `generated`. A segment has the stages beyond the end of the one before it up to its
    own end; the last has no end. A request before the first stage of a later segment waits to enter it.
    Where drafts bring several tokens at once, a request may jump over that stage: it waits at the one at
    which it is first seen in the segment.
    """

    def __init__(self, name: str, ends: Sequence[float] = WHOLE, sizes: Sequence[float] = (inf,)) -> None:
        self.name = name
        self.waiting: OrderedDict[int, Request] = OrderedDict()  # for their prompt: they hold no KV
        self.resident: dict[int, Request] = {}  # those that decode, oldest first
        self._stood: dict[int, tuple[int, int]] = {}  # with drafts: segment, and stage before it or ENTERED
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

    def places(self, width: int = 1) -> list[TrackSegment]:
        """`width`: the most tokens of a decode in a step."""
        if len(self.ends) == 1:
            return [
                TrackSegment(self, 0, list(self.resident.values()), self.waiting.values(), len(self.waiting))
            ]
        moving: list[list[Request]] = [[] for _ in self.ends]
        entering: list[list[Request]] = [[] for _ in self.ends]
        before, self._stood = self._stood, {}
        for request in self.resident.values():
            stage = request.generated
            number = bisect_left(self.ends, stage)
            enters = number > 0 and stage <= self.ends[number - 1] + width
            if width > 1:
                stood = before.get(request.id, (number, stage))
                enters = enters and (stood[0] != number or stood[1] == stage)
                self._stood[request.id] = number, stage if enters else ENTERED
            (entering if enters else moving)[number].append(request)
        head = TrackSegment(self, 0, moving[0], self.waiting.values(), len(self.waiting))
        rest = zip(moving[1:], entering[1:], strict=True)
        return [head, *(TrackSegment(self, number, m, e, len(e)) for number, (m, e) in enumerate(rest, 1))]


class TrackSegment(NamedTuple):
    track: Track
    number: int
    moving: list[Request]  # past its first stage; they go on whenever the segment moves
    entering: Iterable[Request]  # before its first stage, oldest first
    queue: int  # how many those are

    @property
    def quota(self) -> Quota:
        return self.track.quotas[self.number]

    @property
    def skip(self) -> int:
        return 0 if self.moving else self.quota.idle_steps()

    @property
    def allowed(self) -> float:
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

    def since(self) -> float:
        standing = self.moving if self.number == 0 else [*self.moving, *self.entering]
        return min((r.last_token or 0.0 for r in standing), default=inf)


ROUNDING = 1e-9  # x * s that is whole but for rounding is whole


class Quota:
    """Step s admits ⌈x s⌉ - ⌈x (s-1)⌉; a whole x always admits x.

    A new x takes effect from the next step on and the count goes on from where it is, so that changing x
    often does not let more in. An infinite x admits all requests at every step.
    """

    __slots__ = ("_from", "_steps", "each")

    def __init__(self, each: float = inf) -> None:
        self.each = each
        self._from = 0.0  # what the steps before the newest change of x have made of it
        self._steps = 0  # since then

    def change(self, each: float) -> None:
        if self.each < inf:
            self._from = self._at(0) - floor(self._at(0))  # whole ones change nothing
        self._steps = 0
        self.each = each

    def next(self, skip: int = 0) -> float:
        """How many the next step may admit, after leaving out so many steps."""
        if self.each == inf:
            return inf
        return _whole(self._at(skip + 1)) - _whole(self._at(skip))

    def idle_steps(self) -> int:
        """How many steps would admit no request before one that does."""
        if self.each == inf or self.next():
            return 0
        skip = max(0, floor((_whole(self._at(0)) - self._at(0)) / self.each) - 1)
        while not self.next(skip):
            skip += 1
        return skip

    def advance(self, steps: int = 1) -> None:
        self._steps += steps

    def _at(self, ahead: int) -> float:
        return self._from + self.each * (self._steps + ahead)


def _whole(x: float) -> int:
    return ceil(x - ROUNDING)
