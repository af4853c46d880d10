"""WAIT and Nested WAIT: a type moves when enough of its requests wait, all its stages at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.plan import Plan
from headgate.core.policy import End
from headgate.core.request import Request, uncached
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.methods.wait.inventory import MixPart, with_slack
from headgate.methods.wait.lockstep import WHOLE, Lockstep, Track
from headgate.methods.wait.nested import compound
from headgate.methods.wait.traffic import Census, SeenType, cuts, running_pace

NESTED_SHARE = 0.9  # of memory that full segments may take; the rest is for the queues between them


class Wait(Lockstep):
    """Moves a type of requests only when `thresholds` of them wait for their prompt; then all its stages.

    A type whose queue is shorter stands still with its KV kept. So each type runs in cohorts of n requests,
    one per stage, and never holds more than n·w KV tokens: memory is known before, and none is evicted.
    Output lengths must be known well enough to separate types; the policy itself never reads them.

    Parameters: docs/policies/published.md, and here what is not said there:
        thresholds: types without one enter freely.
        split: what makes a type: "kind", "prompt:256/1024" (by bounds of the prompt), "output:50/200" (by
            bounds of the predicted output), "none". A prompt counts without what the prefix cache had of it.
        max_pause: seconds a decode may pause before its type moves anyway. 0: no request is ever
            paused, in a segment or before one, and none waits for a cohort (`max_wait` is 0 too);
            thresholds only pace admission. With learned thresholds this is the better choice.
        literal: as printed: at each stage at most n move, no patience, no memory guard. Strands the last
            requests of a finite run.

    Source: Ao, Luo, Simchi-Levi, Wang, "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory
    Constraints" (2025), Algorithm 1. We differ: fractional thresholds, because whole ones do not fit long
    outputs; all residents of a type move, so that lowered thresholds drain; patience; the memory guard;
    thresholds learned from the fluid balance, not from the paper's rule, which starves long types.
    """

    name = "wait"

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
        literal: bool = False,
    ) -> None:
        super().__init__(self.name, slots, max_pause, max_wait, literal)
        for word, value in (("window", window), ("warm", warm), ("review", review)):
            if value < 1:
                raise InputError(f"{self.name}: {word}={value}; it must be at least 1")
        self.fixed = read_thresholds(self.name, thresholds)
        self.check_sizes()
        self.review, self.warm = review, warm
        self.pace: float | None = None  # seconds of an iteration that the learned thresholds are for
        self._cost = cost
        self._sorting = Sorting.read(self.name, split)
        self._census = Census(window)
        self._came = 0
        self._names: dict[int, str] = {}  # types by request: what a cache has of a prompt changes
        self._memory: tuple[int, int] | None = None  # KV tokens and block, once seen
        self._burst = 1.0  # tokens that an iteration brings

    def gauges(self) -> Mapping[str, float]:
        return {**super().gauges(), "pace": self.pace or 0.0}

    def plan(self, view: View) -> Plan:
        self._memory, self._burst = (view.kv_total, view.limits.block), view.limits.tokens_per_step
        return super().plan(view)

    def track_of(self, request: Request) -> Track:
        name = self._name(request)
        if name not in self.tracks:
            self.tracks[name] = self._new(name)
        return self.tracks[name]

    def arrived(self, request: Request, now: float) -> None:
        super().arrived(request, now)
        cached = request.prompt - uncached(request)
        self._census.came(self._name(request), request.prompt, request.queued, cached)
        self._came += 1
        if not self.fixed and self._came >= self.review and self._memory and self._census.ended >= self.warm:
            self._came = 0
            self._learn(now)

    def finished(self, request: Request, now: float, how: End) -> None:
        self._census.went(self._name(request), request.generated - 1, how)
        super().finished(request, now, how)
        self._names.pop(request.id, None)

    def _name(self, request: Request) -> str:
        name = self._names.get(request.id)
        if name is None:
            name = self._names[request.id] = self._sorting.name(request)
        return name

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
        literal: bool = False,
    ) -> None:
        if segments < 1 or not 0 <= slack <= 100:
            raise InputError(f"nested-wait: segments={segments}, slack={slack}; need >= 1 and 0 to 100")
        self.ends = read_ends(self.name, ends)
        self.segments, self.slack = segments, slack
        super().__init__(slots, cost, thresholds, split, max_pause, max_wait, window, warm, review, literal)

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
