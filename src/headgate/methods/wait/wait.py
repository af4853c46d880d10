"""WAIT and Nested WAIT: a type moves when enough of its requests wait, all its stages at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.plan import ALL, NONE, Decodes, Plan, Until
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request, uncached
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.methods.wait.inventory import MixPart, compound, with_slack
from headgate.methods.wait.tracks import WHOLE, Track, TrackSegment
from headgate.methods.wait.traffic import Census, SeenType, cuts, running_pace

NESTED_SHARE = 0.9  # of memory that full segments may take; the rest is for the queues between them


class Wait(BatchPolicy):
    """Moves a type of requests only when `thresholds` of them wait for their prompt; then all its stages.

    A type whose queue is shorter stands still with its KV kept. So each type runs in cohorts of n requests,
    one per stage, and never holds more than n·w KV tokens: memory is known before, and none is evicted.
    Output lengths must be known well enough to separate types; the policy itself never reads them.

    Rules that the paper leaves open: a batch, once formed, is run to its end, in several engine steps if its
    prompts do not fit one, and its decodes go on beside them; short batches use up the quota of their step; a
    segment whose requests have stood for `max_pause`, or a type whose first request has waited for
    `max_wait`, moves with what is there; where a batch does not fit into memory no request enters and all
    segments move, the deepest first, as far as they fit, and only if none does the youngest is evicted.

    Parameters: docs/policies/published.md, and here what is not said there:
        thresholds: types without one enter freely.
        split: what makes a type: "kind", "prompt:256/1024" (by bounds of the prompt), "output:50/200" (by
            bounds of the predicted output), "none". A prompt counts without what the prefix cache had of it.
        max_pause: seconds a decode may pause before its type moves anyway. 0: no request is ever
            paused, in a segment or before one, and none waits for a cohort (`max_wait` is 0 too);
            thresholds only pace admission. With learned thresholds this is the better choice.

    Source: Ao, Luo, Simchi-Levi, Wang, "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory
    Constraints" (2025), Algorithm 1. We differ: fractional thresholds, because whole ones do not fit long
    outputs; all residents of a type move, so that lowered thresholds drain; patience; the memory guard;
    thresholds learned from the fluid balance, not from the paper's rule, which starves long types.
    """

    name = "wait"
    reserve = 0.0  # of memory, to be left free by a batch that admits a request

    def __init__(
        self,
        slots: int,
        cost: StepCost,
        thresholds: str = "",
        split: str = "kind",
        max_pause: float = 0.1,
        max_wait: float = 0.5,
        window: int = 1000,
        warm: int = 100,
        review: int = 200,
    ) -> None:
        if slots < 1:
            raise InputError(f"{self.name}: slots={slots}; at least one request must be able to run")
        for word, seconds in (("max_pause", max_pause), ("max_wait", max_wait)):
            if not seconds >= 0:
                raise InputError(f"{self.name}: {word}={seconds}; give seconds, 0 or more")
        for word, value in (("window", window), ("warm", warm), ("review", review)):
            if value < 1:
                raise InputError(f"{self.name}: {word}={value}; it must be at least 1")
        self.fixed = read_thresholds(self.name, thresholds)
        self.check_sizes()
        self.slots = slots
        self.max_pause, self.max_wait = max_pause, max_wait if max_pause else 0.0
        self.tracks: dict[str, Track] = {}
        self._on: dict[int, Track] = {}  # what a cache has of a prompt changes: it stays where it was put
        self._asked: _Batch = NOTHING
        self._ran: _Batch = NOTHING  # the newest batch that was begun
        self._cohort: dict[int, None] = {}  # its prompts that are still to be done
        self.review, self.warm = review, warm
        self.pace: float | None = None  # seconds of an iteration that the learned thresholds are for
        self._cost = cost
        self._sorting = Sorting.read(self.name, split)
        self._census = Census(window)
        self._came = 0
        self._memory: tuple[int, int] | None = None  # KV tokens and block, once seen
        self._burst = 1.0  # tokens that an iteration brings

    def arrived(self, request: Request, now: float) -> None:
        name = self._sorting.name(request)
        if name not in self.tracks:
            self.tracks[name] = self._new(name)
        self._on[request.id] = self.tracks[name]
        self.tracks[name].waiting[request.id] = request
        cached = request.prompt - uncached(request)
        self._census.came(name, request.prompt, request.queued, cached)
        self._came += 1
        if not self.fixed and self._came >= self.review and self._memory and self._census.ended >= self.warm:
            self._came = 0
            self._learn(now)

    def admitted(self, request: Request, now: float) -> None:
        self._on[request.id].waiting.pop(request.id, None)

    def prefilled(self, request: Request, now: float) -> None:
        self._on[request.id].resident[request.id] = request
        self._cohort.pop(request.id, None)

    def evicted(self, request: Request, now: float) -> None:
        track = self._on[request.id]
        track.resident.pop(request.id, None)
        self._cohort.pop(request.id, None)
        track.waiting[request.id] = request
        track.waiting.move_to_end(request.id, last=False)

    def finished(self, request: Request, now: float, how: End) -> None:
        track = self._on.pop(request.id)
        self._census.went(track.name, request.generated - 1, how)
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
        return {"segments": len(self._ran.places), "pace": self.pace or 0.0}

    def check_sizes(self) -> None:
        for name, sizes in self.fixed.items():
            if len(sizes) > 1:
                raise InputError(
                    f"wait: {len(sizes)} thresholds {name and f'of type {name} '}where one is needed; by "
                    "segment they are for nested-wait"
                )

    def _new(self, name: str) -> Track:
        return Track(name, WHOLE, self.fixed.get(name, self.fixed.get("", (inf,))))

    def _learn(self, now: float) -> None:
        seen = self._seen(now)
        if not seen or self._memory is None:
            return
        parts = [each.part().in_steps(self._burst) for each in seen.values()]
        self.pace = running_pace(self._cost, parts, self._memory[0], self.slots, pausing=self.max_pause > 0)
        for name, track in self.tracks.items():
            size = seen[name].rate * self.pace if self.pace and name in seen else inf
            track.cut(WHOLE, (size,))

    def _seen(self, now: float) -> dict[str, SeenType]:
        """Rates, prompts (half a block longer, as memory is handed out) and lengths by type."""
        running = {
            name: [request.generated - 1 for request in track.resident.values()]
            for name, track in self.tracks.items()
        }
        block = self._memory[1] if self._memory else 1
        return self._census.seen(running, now, (block - 1) / 2)

    # -- what it plans

    def plan(self, view: View) -> Plan:
        self._memory, self._burst = (view.kv_total, view.limits.block), view.limits.tokens_per_step
        tracks = [track.places(view.limits.decode_width) for track in self.tracks.values()]
        places = [place for track in tracks for place in track]
        rest = self._under_way(view, places)
        if rest is not None:
            return rest
        chosen, deadline = self._choose(tracks, view.now)
        if not chosen:
            self._asked = NOTHING
            return Plan(NONE, until=Until(arrivals=1, time=deadline))
        decodes, prompts = self._members(view, chosen)
        if not self._fits(view, decodes, prompts):
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
            decodes += place.moving
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


class _Batch(NamedTuple):
    """What a plan asks for: put on the books when the step has run."""

    places: tuple[tuple[Track, int], ...]  # segments that move
    steps: tuple[tuple[Track, int, int], ...]  # and by how many steps their quotas go on
    prompts: tuple[int, ...]


NOTHING = _Batch((), (), ())


def _held(request: Request) -> int:
    """KV tokens of a request with a slot: all it has but what is to be prefilled, or but its newest token."""
    return request.prompt + request.generated - (request.todo or 1)


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _more(request: Request, tokens: int, block: int) -> int:
    held = _held(request)
    return _blocks(held + tokens, block) - _blocks(held, block)


class NestedWait(Wait):
    """WAIT for unknown output lengths: a request's length is learned by how far it gets.

    Stages are cut into segments at `ends`. Segment i moves only when each segment up to it has its threshold
    of requests waiting to enter: new prompts for the first, requests that outlived segment i-1 for the
    others. The deeper the segment, the fewer reach it and the smaller its threshold.

    Parameters: those of `wait`, and
        thresholds: by segment, `15/14/12/8`, for all types or by type (`256=8/4+more=4/2`). Needs `ends`.
        ends: the last decode iteration of each segment, `20/40/80/160`. Empty: learned. With drafts an
            iteration brings several tokens, and ends count tokens.
        segments: how many to learn.
        slack: by how much each segment's threshold exceeds what reaches it. With none, as in the paper's
            experiments, the queues between segments have no drift and outgrow any memory.

    Source: the same paper, Algorithm 2. We differ as `wait` does, and: KV is freed wherever a request ends,
    not only in the last segment; segments are cut at output lengths, not at their running sums.
    """

    name = "nested-wait"
    reserve = 0.02  # paused requests grow when they go on

    def __init__(
        self,
        slots: int,
        cost: StepCost,
        thresholds: str = "",
        ends: str = "",
        segments: int = 4,
        slack: float = 0.05,
        split: str = "none",
        max_pause: float = 0.1,
        max_wait: float = 0.5,
        window: int = 1000,
        warm: int = 100,
        review: int = 200,
    ) -> None:
        if segments < 1 or not 0 <= slack <= 100:
            raise InputError(f"nested-wait: segments={segments}, slack={slack}; need >= 1 and 0 to 100")
        self.ends = read_ends(self.name, ends)
        self.segments, self.slack = segments, slack
        super().__init__(slots, cost, thresholds, split, max_pause, max_wait, window, warm, review)

    def check_sizes(self) -> None:
        if self.fixed and not self.ends:
            raise InputError("nested-wait: thresholds without ends; say where segments end, ends=20/40/80")
        for name, sizes in self.fixed.items():
            if len(sizes) != len(self.ends):
                raise InputError(
                    f"nested-wait: {len(sizes)} thresholds {name and f'of {name} '}for {len(self.ends)} "
                    "segments; give one for each of `ends`"
                )

    def _new(self, name: str) -> Track:
        sizes = self.fixed.get(name, self.fixed.get(""))
        if sizes is None:
            return Track(name)
        return Track(name, self.ends, sizes)

    def _learn(self, now: float) -> None:
        """Thresholds x_i = t Λ_i (1+ε)^(i-1) for every type together."""
        seen = self._seen(now)
        if not seen or self._memory is None:
            return
        ends = {name: self.ends or cuts(each, self.segments) for name, each in seen.items()}
        parts = {
            name: [part.in_steps(self._burst) for part in each.segments(ends[name])]
            for name, each in seen.items()
        }
        flat = [part for theirs in parts.values() for part in theirs]
        slack = [part for theirs in parts.values() for part in self._with_slack(theirs)]
        room = NESTED_SHARE * self._memory[0]
        self.pace = running_pace(self._cost, flat, room, self.slots, slack, self.max_pause > 0)
        for name, track in self.tracks.items():
            if self.pace is None or name not in parts:
                track.cut(WHOLE, (inf,))
            else:
                sizes = [part.rate * self.pace or inf for part in self._with_slack(parts[name])]
                track.cut(ends[name], sizes)

    def _with_slack(self, parts: list[MixPart]) -> list[MixPart]:
        return with_slack(parts, [compound(self.slack, number) - 1 for number in range(len(parts))])


# -- types and thresholds from the text a user writes

BY_VALUE = ("prompt", "output")


class Sorting(NamedTuple):
    """By kind, by bounds of the uncached prompt or of the predicted output, or not at all."""

    by: str
    bounds: tuple[int, ...] = ()

    @classmethod
    def read(cls, policy: str, text: str) -> Sorting:
        by, _, rest = text.partition(":")
        if by in ("kind", "none") and not rest:
            return cls(by)
        if by in BY_VALUE and rest:
            return cls(by, _growing(policy, f"split={text}", rest, 1))
        raise InputError(
            f"{policy}: split={text!r} is unknown; choose kind, none, prompt:256/1024 or output:50/200"
        )

    def name(self, request: Request) -> str:
        if self.by == "none":
            return ""
        if self.by == "kind":
            return request.kind
        value = uncached(request) if self.by == "prompt" else request.guess
        if value is None:
            return "unknown"
        return next((str(bound) for bound in self.bounds if value <= bound), "more")


def read_thresholds(policy: str, text: str) -> dict[str, tuple[float, ...]]:
    """`10`, `chat=2+code=0.5` or, by segment, `256=8/4+more=4/2`, as sizes by type; "" stands for all."""
    found: dict[str, tuple[float, ...]] = {}
    for part in filter(None, text.split("+")):
        name, _, sizes = part.rpartition("=")
        name = name.strip()
        if name in found:
            raise InputError(f"{policy}: thresholds={text!r}: two of type {name!r}; drop one")
        try:
            found[name] = tuple(float(size) for size in sizes.split("/"))
        except ValueError:
            raise InputError(
                f"{policy}: thresholds={text!r}: {part!r} is not a threshold; write 10, or "
                "chat=2+code=0.5, or 8/4/2 by segment"
            ) from None
        if not all(isfinite(size) and size > 0 for size in found[name]):
            raise InputError(f"{policy}: thresholds={text!r}: {part!r}: give finite numbers above 0")
    return found


def read_ends(policy: str, text: str) -> tuple[int, ...]:
    return _growing(policy, f"ends={text}", text, 0) if text else ()


def _growing(policy: str, where: str, text: str, least: int) -> tuple[int, ...]:
    try:
        bounds = tuple(int(bound) for bound in text.split("/"))
    except ValueError:
        raise InputError(f"{policy}: {where}: need whole numbers with / between, such as 20/40/80") from None
    if bounds[0] < least or any(x >= y for x, y in pairwise(bounds)):
        raise InputError(f"{policy}: {where}: need growing numbers from {least} on, such as 20/40/80")
    return bounds
