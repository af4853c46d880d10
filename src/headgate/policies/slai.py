"""SLAI: decodes wait for prompts as long as their promise allows; prompts enter shortest first."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from math import ceil, inf, log

from headgate.core.errors import InputError, unknown
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import End, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import Shape, StepCost
from headgate.estimators.averages import Ema, Mean
from headgate.policies.orders import Ordered, order_of, share

PACES = ("predicted", "average", "recent")
OFFSETS = {"predicted": 2.0, "average": 5.0, "recent": 5.0}
RECENT = log(0.5) / log(0.9)  # half-life in steps of an average that weighs the newest by 0.1 (erratum E23)
AGEING = 0.1  # of the prefill rate
SMALLEST = 64  # prompt tokens of a step whose promise cannot be kept at all
COARSE = 16  # tokens; no need to find the largest chunk any closer
NOBODY_WAITS = Until(arrivals=1)

Due = tuple[float, float, int]  # when the next token is due, arrival, number: the order of decodes


class Slai(Ordered):
    """Give tokens first to decodes that would be late otherwise, then run prompts, then other decodes.

    A decode is *critical* when its next token is due within `offset` steps. Each step takes: critical
    decodes, the earliest first; half-done prompts; new prompts by `order`; and, if tokens are left, the other
    decodes. Without prompts to run everybody decodes.

    Parameters:
        slots: requests that may hold KV at once, α.
        budget: tokens in one step, decodes included, τ.
        cost: what steps cost.
        order: "shortest" prompt first, "arrival", "priority" (then shortest), or "deadline" (of the first
            token; shortest first while somebody is late).
        decodes: most decodes in a step, β; below `budget`. None: `slots`.
        between_tokens, first_token: seconds promised to requests that have no promise of their own.
        pace: how long the coming steps are thought to be. "predicted": a full step with everybody in it, by
            `cost`; "average": the mean of all steps so far, the paper's; "recent": newer steps count more.
        offset: δ, that many steps. None: 2 predicted ones, 5 average ones.
        crowded_offset: δ while memory is crowded, so that decodes end sooner; equal to `offset`: fixed.
        crowded, relaxed: shares of the KV in use from which, and below which, memory is (not) crowded.
        shrink: cut prompts so that the step ends before a token in it is due, not only by `budget`.
        ageing: tokens by which a prompt counts as shorter with each second it waits; None: a tenth of the
            prefill rate, 0: none (the paper's), and nothing bounds the wait of a long prompt.
        watermark: share of the KV that must stay free when a prompt enters.

    Source: arXiv 2508.01002, section 5 (SLAI, equation 8). The paper's own variants are pace="average",
    shrink=False, ageing=0, relaxed=crowded, with offset=10 (fixed) or 5 (dynamic). We differ there: (a) the last
    schedulable time is worked out at each decision, not kept from the last token; (b) more critical decodes
    than `decodes` wait for the next step, the earliest due go first (erratum E25); (c) whoever must leave when KV
    runs short is the engine's word (the newest).
    """

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost,
        order: str = "shortest",
        decodes: int | None = None,
        between_tokens: float = 0.5,
        first_token: float = 2.0,
        pace: str = "predicted",
        offset: float | None = None,
        crowded_offset: float = 10.0,
        crowded: float = 0.96,
        relaxed: float = 0.94,
        shrink: bool = True,
        ageing: float | None = None,
        watermark: float = 0.01,
    ) -> None:
        if pace not in PACES:
            raise unknown("pace of slai", pace, PACES)
        if offset is None:
            offset = OFFSETS[pace]
        if decodes is None:
            decodes = max(1, min(slots, budget - 1))
        _check(slots, budget, decodes, between_tokens, offset, crowded_offset)
        if not 0 < relaxed <= crowded <= 1:
            raise InputError(f"slai: relaxed={relaxed}, crowded={crowded}; need 0 < relaxed <= crowded <= 1")
        self.slots, self.budget, self.decodes = slots, budget, decodes
        self.pace, self.offset, self.crowded_offset = pace, offset, crowded_offset
        self.crowded, self.relaxed, self.shrink = crowded, relaxed, shrink
        self.watermark = share("slai", "watermark", watermark)
        self._cost = cost
        token = cost.seconds(Shape(prefill=budget)) / budget
        rate = AGEING / token if token > 0 else 0.0
        self.order = order_of("slai", order, rate if ageing is None else ageing, first_token, token)
        self._between = between_tokens
        self._running: dict[float, dict[int, Request]] = {}  # those that decode, by their promise
        self._step: Ema | Mean = Mean() if pace == "average" else Ema(RECENT)
        self._is_crowded = False

    def gauges(self) -> Mapping[str, float]:
        """The mean step, and whether memory is crowded."""
        return {"step": self._step.value or 0.0, "crowded": self._is_crowded}

    # -- what it hears ------------------------------------------------------------------------------

    def prefilled(self, request: Request, now: float) -> None:
        """It decodes from now on."""
        self._running.setdefault(self._promise(request), {})[request.id] = request

    def evicted(self, request: Request, now: float) -> None:
        """It does not decode any more."""
        self._forget(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It has left."""
        super().finished(request, now, how)
        self._forget(request)

    def stepped(self, steps: Steps) -> None:
        """Learn how long steps are."""
        if self._mean is not None:
            before = steps.start
            for end in steps.ends:
                self._mean.update(end - before)
                before = end

    # -- what it decides ----------------------------------------------------------------------------

    def plan(self, view: View) -> Plan:
        """Everybody while no prompt can run; else as the class says, for one step."""
        if not view.prefilling:
            if not view.waiting:
                return self._everybody(view, NOBODY_WAITS)
            if not self._entering(view, self._seats(view), 1)[0]:
                return self._everybody(view, self.order.blocked)
        margin = self._margin(view)
        critical, others, allowance = self._split(view.now, margin)
        width = view.limits.decode_width
        most = min(self.decodes, (self.budget - 1) // width)
        if len(critical) > most:
            critical = self._earliest(critical, most)
        chunk = room = self.budget - len(critical) * width
        if self.shrink and len(view.decoding):
            chunk = room = self._chunk(view, len(critical), room, allowance)
        prompts: list[int] = []
        for request in view.prefilling.values():
            if room > 0:
                prompts.append(request.id)
                room -= request.todo
        entering, room = self._entering(view, self._seats(view), room)
        prompts += entering
        if room > 0:
            critical += self._earliest(others, min(room // width, most - len(critical)))
        everybody = len(critical) == len(view.decoding)
        return Plan(ALL if everybody else frozenset(critical), tuple(prompts), self.budget, chunk)

    def _everybody(self, view: View, until: Until) -> Plan:
        """Every decode, or as many as a step may have."""
        most = min(self.decodes, self.budget // view.limits.decode_width)
        if len(view.decoding) <= most:
            return Plan(ALL, until=until)
        return Plan(frozenset(self._earliest(list(view.decoding), most)), budget=self.budget)

    def _seats(self, view: View) -> int:
        return min(self.slots, view.limits.running) - len(view.decoding) - len(view.prefilling)

    def _margin(self, view: View) -> float:
        """How long before its token is due a decode becomes critical: δ steps."""
        used = (view.kv_total - view.kv_free) / view.kv_total
        if used >= self.crowded:
            self._is_crowded = True
        elif used < self.relaxed:
            self._is_crowded = False
        self._length = self._next_step(view)
        return (self.crowded_offset if self._is_crowded else self.offset) * self._length

    def _next_step(self, view: View) -> float:
        """Seconds the next step may take."""
        if self._mean is not None:
            return self._mean.value or 0.0
        decodes = len(view.decoding)
        if not decodes:
            return 0.0
        tokens = max(1, self.budget - decodes * view.limits.decode_width)
        full = self._cost.seconds(Shape(decodes, view.kv_total - view.kv_free, tokens, _behind(view)))
        return min(full, min(self._running)) if self.shrink else full

    def _split(self, now: float, margin: float) -> tuple[list[int], list[int], float]:
        """Critical decodes, the others, and how long the step may take for all of them to be in time."""
        critical: list[int] = []
        others: list[int] = []
        first, second = inf, inf
        limit = now + margin
        for promise, members in self._running.items():
            for id, request in members.items():
                due = (request.last_token or 0.0) + promise
                if due <= limit:
                    critical.append(id)
                    if due < first:
                        first = due
                else:
                    others.append(id)
                    if due < second:
                        second = due
        return critical, others, min(first, second - self._length) - now

    def _earliest(self, ids: list[int], most: int) -> list[int]:
        """Those of them whose tokens are due first, at most so many."""
        if len(ids) <= most:
            return ids
        return [due[2] for due in nsmallest(most, map(self._due, ids))] if most > 0 else []

    def _chunk(self, view: View, decodes: int, room: int, allowance: float) -> int:
        """The most prompt tokens, up to `room`, with which the step keeps to its allowance."""
        context = (view.kv_total - view.kv_free) * decodes // len(view.decoding)
        behind, seconds = _behind(view), self._cost.seconds
        if seconds(Shape(decodes, context, room, behind)) <= allowance:
            return room
        low, high = min(SMALLEST, room), room
        while high - low > COARSE:
            middle = (low + high) // 2
            if seconds(Shape(decodes, context, middle, behind)) <= allowance:
                low = middle
            else:
                high = middle
        return low
