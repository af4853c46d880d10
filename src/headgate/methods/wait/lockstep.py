"""Lockstep: tracks move together or stand still, with patience, a memory guard and whole cohorts."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import ceil, floor, inf
from typing import Final, NamedTuple

from headgate.core.errors import InputError
from headgate.core.plan import ALL, NONE, Decodes, Plan, Until
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import View

WHOLE = (inf,)  # one segment with all stages: WAIT


class Lockstep(BatchPolicy):
    """Moves the segments that are ready; all other requests pause and keep their KV.

    What WAIT and Nested WAIT have in common; they say which requests form a track. Rules that the paper
    leaves open: a batch, once formed, is run to its end, in several engine steps if its prompts do not fit
    one, and its decodes go on beside them; short batches use up the quota of their step; a segment whose
    requests have stood for `max_pause`, or a type whose first request has waited for `max_wait`, moves with
    what is there; where a batch does not fit into memory no request enters and all segments move, the
    deepest first, as far as they fit, and only if none does the youngest is evicted.

    With a `max_pause` of 0 only memory can still make a decode wait.
    """

    reserve = 0.0  # of memory, to be left free by a batch that admits a request

    def __init__(self, name: str, slots: int, max_pause: float, max_wait: float, literal: bool) -> None:
        if slots < 1:
            raise InputError(f"{name}: slots={slots}; at least one request must be able to run")
        for word, value in (("max_pause", max_pause), ("max_wait", max_wait)):
            if not value >= 0:
                raise InputError(f"{name}: {word}={value}; give seconds, 0 or more")
        self.slots = slots
        self.literal = literal
        self.max_pause, self.max_wait = max_pause, max_wait if max_pause else 0.0
        if literal:
            self.max_pause = self.max_wait = inf
        self.draining = False
        self.tracks: dict[str, Track] = {}
        self._on: dict[int, Track] = {}
        self._asked: _Batch = NOTHING
        self._ran: _Batch = NOTHING  # the newest batch that was begun
        self._cohort: dict[int, None] = {}  # its prompts that are still to be done

    @abstractmethod
    def track_of(self, request: Request) -> Track:
        """Where a request that has just come belongs."""

    def drain(self) -> None:
        """No more requests will come: from now on all move whenever no segment is ready."""
        self.draining = True

    def arrived(self, request: Request, now: float) -> None:
        track = self._on[request.id] = self.track_of(request)
        track.waiting[request.id] = request

    def admitted(self, request: Request, now: float) -> None:
        self._on[request.id].waiting.pop(request.id, None)

    def prefilled(self, request: Request, now: float) -> None:
        self._on[request.id].resident[request.id] = request
        self._cohort.pop(request.id, None)

    def evicted(self, request: Request, now: float) -> None:
        """It waits again, before all others."""
        track = self._on[request.id]
        track.resident.pop(request.id, None)
        self._cohort.pop(request.id, None)
        track.waiting[request.id] = request
        track.waiting.move_to_end(request.id, last=False)

    def finished(self, request: Request, now: float, how: End) -> None:
        track = self._on.pop(request.id)
        track.resident.pop(request.id, None)
        track.waiting.pop(request.id, None)
        self._cohort.pop(request.id, None)

    def stepped(self, steps: Steps) -> None:
        """The batch asked for has begun: its quotas are used up."""
        asked, self._asked = self._asked, NOTHING
        if asked is NOTHING:
            return
        for track, number, count in asked.steps:
            if number < len(track.quotas):
                track.quotas[number].advance(count)
        self._ran, self._cohort = asked, {}
        if steps.prefill:
            left = (id for id in asked.prompts if id in self._on and id not in self._on[id].resident)
            self._cohort = dict.fromkeys(left)
        elif asked.prompts:  # the engine refused them: let all others go on
            self._ran = NOTHING

    def gauges(self) -> Mapping[str, float]:
        return {"segments": len(self._ran.places)}

    # -- what it plans

    def plan(self, view: View) -> Plan:
        tracks = [track.places(view.limits.decode_width) for track in self.tracks.values()]
        places = [place for track in tracks for place in track]
        rest = self._under_way(view, places)
        if rest is not None:
            return rest
        chosen, deadline = self._choose(tracks, view.now)
        if not chosen and self.draining:
            chosen = [place for place in places if place.moving or place.queue]
        if not chosen:
            self._asked = NOTHING
            return Plan(NONE, until=Until(arrivals=1, time=deadline))
        decodes, prompts = self._members(view, chosen)
        if not self.literal and not self._fits(view, decodes, prompts):
            if view.decoding or view.prefilling:
                return self._rescue(view, places)
            prompts = self._that_fit(view, prompts)
        if not decodes and not prompts:
            return self._rescue(view, places)
        self._asked = _Batch(
            tuple((place.track, place.number) for place in chosen),
            tuple((place.track, place.number, 1 + place.skip) for place in chosen),
            (*view.prefilling, *(request.id for request in prompts)),
        )
        return Plan(self._named(view, decodes), self._asked.prompts)

    def _choose(self, tracks: Sequence[list[TrackSegment]], now: float) -> tuple[list[TrackSegment], float]:
        """The ready segments of every track, from the first on; and when the first patience ends."""
        chosen: list[TrackSegment] = []
        deadline = inf
        for places in tracks:
            depth = next((place.number for place in places if not place.ready), len(places))
            for place in places[depth:]:
                end = self._patience(place)
                if end <= now:
                    depth = place.number + 1
                else:
                    deadline = min(deadline, end)
            chosen += [place for place in places[:depth] if place.moving or place.queue]
        return chosen, deadline

    def _patience(self, place: TrackSegment) -> float:
        end = place.since() + self.max_pause if self.max_pause < inf else inf
        if place.number or not place.queue or self.max_wait == inf:
            return end
        return min(end, next(iter(place.entering)).queued + self.max_wait)

    def _members(self, view: View, chosen: Iterable[TrackSegment]) -> tuple[list[Request], list[Request]]:
        decodes: list[Request] = []
        prompts: list[Request] = []
        for place in chosen:
            decodes += place.each_stage() if self.literal else place.moving
            entrants = place.entrants(view.now, self.max_pause)
            (decodes if place.number else prompts).extend(entrants)
        slots = min(self.slots, view.limits.running) - len(view.decoding) - len(view.prefilling)
        return decodes, prompts[: max(0, slots)]

    def _under_way(self, view: View, places: Sequence[TrackSegment]) -> Plan | None:
        """The prompts of the newest batch that are not done, with its decodes; None when it is complete.

        Its prompts may take many steps: requests paused for `max_pause` meanwhile go on as well.
        """
        if not view.prefilling and not self._cohort:
            return None
        moving = self._ran.places or [(place.track, place.number) for place in places]  # taken over half-way
        decodes: list[Request] = []
        for place in places:
            if (place.track, place.number) in moving or place.since() + self.max_pause <= view.now:
                decodes += place.moving
            decodes += place.overdue(view.now, self.max_pause)
        left = [view.waiting[id] for id in self._cohort if id in view.waiting]
        slots = min(self.slots, view.limits.running) - len(view.decoding) - len(view.prefilling)
        left = left[: max(0, slots)]
        if not self._fits(view, decodes, left, reserve=0.0):
            if view.prefilling:
                return self._rescue(view, places)
            return None  # what is left does not fit any more: it waits for its next turn
        if not view.prefilling and not left:
            return None
        self._asked = _Batch(self._ran.places, (), (*view.prefilling, *(r.id for r in left)))
        return Plan(self._named(view, decodes), self._asked.prompts)

    def _named(self, view: View, decodes: Sequence[Request]) -> Decodes | frozenset[int]:
        if len(decodes) == len(view.decoding):
            return ALL
        return frozenset(request.id for request in decodes) if decodes else NONE

    # -- memory

    def _fits(
        self, view: View, decodes: Sequence[Request], prompts: Sequence[Request], reserve: float | None = None
    ) -> bool:
        block, width, free = view.limits.block, view.limits.decode_width, view.kv_free
        if prompts or view.prefilling:
            free -= int((self.reserve if reserve is None else reserve) * view.kv_total)
        free -= sum(_blocks(request.room, block) for request in prompts)
        free -= sum(_more(request, request.todo, block) for request in view.prefilling.values())
        if len(decodes) * _blocks(width + block - 1, block) <= free:
            return True
        return sum(_more(request, width, block) for request in decodes) <= free

    def _that_fit(self, view: View, prompts: Sequence[Request]) -> list[Request]:
        room = view.kv_free
        fitting: list[Request] = []
        for request in prompts:
            room -= _blocks(request.room, view.limits.block)
            if room < 0 and fitting:
                break
            fitting.append(request)
        return fitting

    def _rescue(self, view: View, places: Sequence[TrackSegment]) -> Plan:
        """No new request; all segments, deepest first, as far as they fit; or the youngest is evicted."""
        block, room = view.limits.block, view.kv_free
        deepest = sorted(places, key=lambda place: -place.number)
        half, standing = list(view.prefilling.values()), list(view.decoding.values())
        out: list[int] = []
        while True:
            need = sum(_more(request, request.todo, block) for request in half)
            chosen, decodes = self._growing(deepest, room - need, view, set(out))
            if decodes or not (half or standing) or (half and need <= room):
                break
            victim = (half or standing).pop()
            room += _blocks(_held(victim), block)
            out.append(victim.id)
        self._asked = _Batch(
            tuple((place.track, place.number) for place in chosen),
            tuple((place.track, place.number, 1) for place in chosen),
            tuple(request.id for request in half),
        )
        named = frozenset(request.id for request in decodes) if decodes else NONE
        return Plan(named, self._asked.prompts, evict=tuple(out))

    def _growing(
        self, deepest: Iterable[TrackSegment], room: int, view: View, out: set[int]
    ) -> tuple[list[TrackSegment], list[Request]]:
        chosen: list[TrackSegment] = []
        decodes: list[Request] = []
        for place in deepest:
            entrants = place.entrants(view.now, self.max_pause) if place.number else []
            those = [request for request in (*place.moving, *entrants) if request.id not in out]
            need = sum(_more(request, view.limits.decode_width, view.limits.block) for request in those)
            if those and need <= room:
                room -= need
                chosen.append(place)
                decodes += those
        return chosen, decodes


def _held(request: Request) -> int:
    """KV tokens of a request with a slot: all it has but what is to be prefilled, or but its newest token."""
    return request.prompt + request.generated - (request.todo or 1)


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _more(request: Request, tokens: int, block: int) -> int:
    held = _held(request)
    return _blocks(held + tokens, block) - _blocks(held, block)


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

    def each_stage(self) -> list[Request]:
        """Of the moving, at most a threshold's worth at each stage: the paper's min{n, ·} literally."""
        size, taken, moved = self.quota.each, dict[int, int](), []
        for request in self.moving:
            stage = request.generated
            taken[stage] = taken.get(stage, 0) + 1
            if taken[stage] < size + 1:
                moved.append(request)
        return moved

    def since(self) -> float:
        standing = self.moving if self.number == 0 else [*self.moving, *self.entering]
        return min((r.last_token or 0.0 for r in standing), default=inf)


class _Batch(NamedTuple):
    """What a plan asks for: put on the books when the step has run."""

    places: tuple[tuple[Track, int], ...]  # segments that move
    steps: tuple[tuple[Track, int, int], ...]  # and by how many steps their quotas go on
    prompts: tuple[int, ...]


NOTHING = _Batch((), (), ())
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
