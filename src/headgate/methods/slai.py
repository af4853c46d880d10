"""SLAI: decodes wait for prompts as long as their promise allows; prompts enter shortest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nsmallest
from math import inf, isfinite, log
from operator import attrgetter
from typing import NamedTuple

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import InputError, unknown
from headgate.core.plan import ALL, EACH_STEP, Plan, plan_of
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import Shape, StepCost
from headgate.estimators.averages import Ema, Mean
from headgate.methods.mixed.mixed import NO_PLACE_LEFT, NONE_WAITS
from headgate.methods.orders import begun, entering, order_of, share

AGEING = 0.01  # of the prefill rate: overtaken only within a hundred times its own prefill time
SMALLEST = 64  # prompt tokens of a step whose promise cannot be kept at all; an eighth of a small budget
TRUSTED = 0.95  # of the time there is: a prediction errs, if only because it takes contexts for equal
COARSE = 32  # the largest chunk is found to this part of the budget


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Slai(BatchPolicy):
    """Give tokens first to decodes that would be late otherwise, then run prompts, then the other decodes.

    A decode is *critical* when its next token is due within `offset` steps. Each step takes: critical
    decodes, the earliest first; half-done prompts; new prompts by `order`; and, if tokens are left, the other
    decodes. Without prompts to run all requests decode.

    Parameters: docs/policies/published.md. `slots`, `budget`, `decodes` and `offset` are the paper's α, τ,
    β and δ; `crowded_offset` is δ while it is crowded, so that decodes end sooner.

    Source: arXiv 2508.01002, section 5. The paper's variants are pace="average", shrink=False, ageing=0,
    relaxed=crowded, with offset=10 (fixed) or 5 (dynamic). There we differ: (a) the last schedulable time is
    worked out at each decision, not kept from the last token; (b) critical decodes beyond `decodes`
    wait for the next step; (c) when KV runs short the engine evicts a request: the newest.
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
        decodes = max(1, min(slots, budget - 1)) if decodes is None else decodes
        if slots < 1:
            raise InputError(f"slai: slots={slots}; at least one request must be able to run")
        if not 1 <= decodes < budget:
            raise InputError(
                f"slai: decodes={decodes}, budget={budget}; need 1 <= decodes < budget, "
                "so that prompts make progress"
            )
        if not between_tokens > 0:
            raise InputError(f"slai: between_tokens={between_tokens} s; a promise must be above 0")
        self.slots, self.budget, self.decodes, self.shrink = slots, budget, decodes, shrink
        self.margin = Margin(pace, offset, crowded_offset, crowded, relaxed, cost)
        self.watermark = share("slai", "watermark", watermark)
        token = cost.seconds(Shape(prefill=budget)) / budget
        if ageing is None:
            ageing = AGEING / token if token > 0 else 0.0
        self.order = order_of("slai", order, ageing, first_token, token)
        self._cost = cost
        self._between = between_tokens
        self._running: dict[float, DueDates] = {}  # those that decode, by their promise
        self._known = 0  # how many those are
        self._served: float | None = None  # when all of them last got a token together

    def gauges(self) -> Mapping[str, float]:
        return {"step": self.margin.step, "crowded": self.margin.is_crowded}

    def arrived(self, request: Request, now: float) -> None:
        self.order.add(request)

    def admitted(self, request: Request, now: float) -> None:
        """It waits no longer; if it is ever evicted the view shows it first."""
        self.order.admitted(request)

    def prefilled(self, request: Request, now: float) -> None:
        promise = self._promise(request)
        dues = self._running.get(promise)
        if dues is None:
            dues = self._running[promise] = DueDates()
        self._known -= len(dues)
        dues.join(request)
        self._known += len(dues)

    def evicted(self, request: Request, now: float) -> None:
        self._forget(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.order.finished(request)
        self._forget(request)

    def stepped(self, steps: Steps) -> None:
        self.margin.ran(steps)
        self._served = steps.ends[-1] if steps.decodes == self._known else None

    def _promise(self, request: Request) -> float:
        promise = request.slo.between_tokens
        return self._between if promise is None else promise

    def _forget(self, request: Request) -> None:
        promise = self._promise(request)
        dues = self._running.get(promise)
        if dues is not None:
            self._known -= len(dues)
            dues.leave(request)
            self._known += len(dues)
            if not len(dues):
                del self._running[promise]

    # -- what it decides

    def plan(self, view: View) -> Plan:
        if not view.prefilling:
            if not view.waiting:
                return self._all_decodes(view, NONE_WAITS)
            slots = self._slots(view)
            if slots <= 0:
                return self._all_decodes(view, NO_PLACE_LEFT)
            if not entering(view, self.order, self.watermark, slots, 1)[0]:
                return self._all_decodes(view, Plan(ALL, until=self.order.blocked))
        width, budget = view.limits.decode_width, min(self.budget, view.limits.batch_tokens)
        most = min(self.decodes, (budget - 1) // width)
        critical, latest, promised = self._critical(view, budget, most)
        must = len(view.decoding) if critical is None else len(critical)
        step = _Step(self._cost, view, latest, promised) if self.shrink else _Step(self._cost, view, inf, [])
        chunk = step.most_tokens(must, budget - must * width)
        prompts, room = begun(view.prefilling.values(), chunk)
        new, room = entering(view, self.order, self.watermark, self._slots(view), room)
        prompts += new
        if critical is None:
            return plan_of(ALL, tuple(prompts), budget, chunk, EACH_STEP)
        if room > 0 and must < len(view.decoding):
            rest = len(view.decoding) - must
            more = min(rest, room // width, most - must)
            more = step.most_decodes(must, more, chunk - room)
            if more == rest:  # none need be named
                return plan_of(ALL, tuple(prompts), budget, chunk, EACH_STEP)
            first = frozenset(critical)
            others = [id for id in view.decoding if id not in first]
            critical += self._earliest(view, others, more)
        decode = ALL if len(critical) == len(view.decoding) else frozenset(critical)
        return plan_of(decode, tuple(prompts), budget, chunk, EACH_STEP)

    def _all_decodes(self, view: View, usual: Plan) -> Plan:
        most = min(self.decodes, self.budget // view.limits.decode_width)
        if len(view.decoding) <= most:
            return usual
        return Plan(frozenset(self._earliest(view, [*view.decoding], most)), budget=self.budget)

    def _slots(self, view: View) -> int:
        return min(self.slots, view.limits.running) - len(view.decoding) - len(view.prefilling)

    def _critical(self, view: View, budget: int, most: int) -> tuple[list[int] | None, float, Promised]:
        """Decodes that must run now, at most so many (None: all), and when the step must end for all but
        `Promised` to be in time.
        """
        critical: list[int] = []
        others: Promised = []
        if not self._running:
            return critical, inf, others
        longest = min(self._running) if self.shrink else inf
        slots = min(self.slots, view.limits.running)
        margin, latest = self.margin.seconds(view, budget, slots, longest), inf
        if len(self._running) == 1 and longest <= margin and self._known == len(view.decoding) <= most:
            if self._served is None:
                return None, longest + view.oldest_token, others
            self._running[longest].served(self._served)
            return None, longest + self._served, others
        for promise, dues in self._running.items():
            if self._served is not None:
                dues.served(self._served)
            if promise > margin:
                due = dues.until(view.now + margin - promise)
                critical += due.ids
                # Those that are left out need one more step after this one.
                latest = min(latest, promise + min(due.first, due.others - self.margin.step))
                continue
            critical += dues.all()
            if self._served is None:
                others.append((promise, dues))
            else:
                latest = min(latest, promise + self._served)
        if self._known != len(view.decoding):  # a live engine's news may be a step late
            critical = [id for id in critical if id in view.decoding]
        return self._earliest(view, critical, most), latest, others

    def _earliest(self, view: View, ids: list[int], most: int) -> list[int]:
        if len(ids) <= most:
            return ids
        requests = [view.decoding[id] for id in ids]
        dues = [(LAST(request) + self._promise(request), request.arrival, request.id) for request in requests]
        return [id for _, _, id in nsmallest(most, dues)]


LAST: Callable[[Request], float] = attrgetter("last_token")  # of a decode: there is one


class CriticalDecodes(NamedTuple):
    ids: list[int]
    first: float = inf
    others: float = inf


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class DueDates:
    """Decodes whose users were promised the same time between tokens.

    Their last tokens only get newer. So a request that was not critical is checked again only when the oldest
    of those could be; in between only those that were critical, and have mostly been served since. After a
    step that served all requests none need be checked.
    """

    __slots__ = ("_awake", "_members", "_quiet", "oldest")

    def __init__(self) -> None:
        self._members: dict[int, Request] = {}
        self._awake: dict[int, Request] = {}  # to be looked at; the others' last tokens are ...
        self._quiet = inf  # ... not older than this
        self.oldest = inf  # no last token is older; it may be out of date, because they only get newer

    def __len__(self) -> int:
        return len(self._members)

    def join(self, request: Request) -> None:
        self._members[request.id] = self._awake[request.id] = request
        self.oldest = min(self.oldest, LAST(request))

    def leave(self, request: Request) -> None:
        self._members.pop(request.id, None)
        self._awake.pop(request.id, None)

    def served(self, when: float) -> None:
        self._awake, self._quiet = {}, when

    def all(self) -> list[int]:
        return [*self._members]

    def first(self) -> float:
        """When the one that has waited longest got its last token; looks at all requests."""
        self.oldest = min(map(LAST, self._members.values()))
        return self.oldest

    def until(self, latest: float) -> CriticalDecodes:
        if latest >= self._quiet:
            self._awake, self._quiet = self._members.copy(), inf
        awake = self._awake
        if not awake:
            return CriticalDecodes([], inf, self._quiet)
        lasts = [*map(LAST, awake.values())]
        first = min(lasts)
        if first > latest:
            awake.clear()
            self._quiet = min(self._quiet, first)
            return CriticalDecodes([], inf, self._quiet)
        if max(lasts) > latest:
            self._quiet = min(self._quiet, min(filter(latest.__lt__, lasts)))
            self._awake = {id: awake[id] for id, at in zip(awake, lasts, strict=True) if at <= latest}
        return CriticalDecodes([*self._awake], first, self._quiet)


Promised = list[tuple[float, DueDates]]  # decodes by promise


class _Step:
    """The step that is being put together. It must end by `latest`, and in time for all of `others`.

    Of those it first takes how long they have waited at most. Only where that leaves too little time does it
    look at them one by one.
    """

    def __init__(self, cost: StepCost, view: View, latest: float, others: Promised) -> None:
        self._seconds, self._now, self._others = cost.seconds, view.now, others
        self._latest = latest
        self._allow(min([latest, *[promise + dues.oldest for promise, dues in others]]))
        self._behind = behind(view)
        decodes = len(view.decoding)
        held = view.kv_total - view.kv_free + view.kv_shared
        self._each = held / decodes + 1 if decodes else 0.0  # mean context

    def most_tokens(self, decodes: int, room: int) -> int:
        """Prompt tokens beside so many decodes, up to `room`; a few even if there is no time for any."""
        least = max(1, min(SMALLEST, room // 8))
        return self._most(least, room, lambda tokens: self._takes(decodes, tokens))

    def most_decodes(self, decodes: int, more: int, tokens: int) -> int:
        return self._most(0, more, lambda joining: self._takes(decodes + joining, tokens))

    def _takes(self, decodes: int, tokens: int) -> float:
        return self._seconds(quick(Shape, (decodes, int(self._each * decodes), tokens, self._behind, ())))

    def _allow(self, latest: float) -> None:
        self._allowance = (latest - self._now) * TRUSTED

    def _most(self, low: int, high: int, takes: Callable[[int], float]) -> int:
        if self._allowance == inf or takes(high) <= self._allowance:
            return high
        if self._others:
            self._allow(min([self._latest, *[promise + dues.first() for promise, dues in self._others]]))
            self._others = []
            if takes(high) <= self._allowance:
                return high
        near = high // COARSE
        while high - low > near + 1:
            middle = (low + high) // 2
            if takes(middle) <= self._allowance:
                low = middle
            else:
                high = middle
        return low


PACES = ("predicted", "average", "recent")
PREDICTED_STEPS = 2.0  # one without the decode, one with it
MEAN_STEPS = 5.0  # the paper's, while memory is not crowded
RECENT = log(0.5) / log(0.9)  # half-life in steps of an average that weighs the newest by 0.1


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Margin:
    """δ times the length of a step (equation 8 of arXiv 2508.01002), with a larger δ while it is crowded.

    A decode that is left out waits for one more step and is served in the next, so it is in time if the
    margin covers both: δ = 2 is enough for steps of known length, and the mean of unequal steps needs more.

    It is crowded when a share of the KV is in use, or of the slots: decodes that wait hold both, and a
    request that cannot enter for want of them gains nothing from their waiting. (The paper looks at KV only.)

    `pace` says how long a step is thought to be: "predicted", a full step with all requests; "average",
    the mean of all steps so far, the paper's; "recent", an average that forgets.
    """

    def __init__(
        self,
        pace: str,
        offset: float | None,
        crowded_offset: float,
        crowded: float,
        relaxed: float,
        cost: StepCost,
    ) -> None:
        if pace not in PACES:
            raise unknown("pace of slai", pace, PACES)
        if offset is None:
            offset = PREDICTED_STEPS if pace == "predicted" else MEAN_STEPS
        if not (isfinite(offset + crowded_offset) and min(offset, crowded_offset) >= 0):
            raise InputError(
                f"slai: offset={offset}, crowded_offset={crowded_offset} steps; both must be 0 or more"
            )
        if not 0 < relaxed <= crowded <= 1:
            raise InputError(f"slai: relaxed={relaxed}, crowded={crowded}; need 0 < relaxed <= crowded <= 1")
        self.offset, self.crowded_offset = offset, crowded_offset
        self.crowded, self.relaxed = crowded, relaxed
        self.is_crowded = False
        self.step = 0.0  # how long the next step is thought to be
        self._cost = cost
        self._mean: Ema | Mean | None = None
        if pace != "predicted":
            self._mean = Mean() if pace == "average" else Ema(RECENT)

    def ran(self, steps: Steps) -> None:
        if self._mean is not None:
            before = steps.start
            for end in steps.ends:
                self._mean.update(end - before)
                before = end

    def seconds(self, view: View, budget: int, slots: int, longest: float) -> float:
        """The margin now, when a step has `budget` tokens and takes no longer than `longest`.

        Ask only when the answer matters: whether it is crowded depends on when it was looked at.
        """
        taken = (len(view.decoding) + len(view.prefilling)) / slots
        used = max((view.kv_total - view.kv_free) / view.kv_total, taken)
        if used >= self.crowded:
            self.is_crowded = True
        elif used < self.relaxed:
            self.is_crowded = False
        if self._mean is None:
            decodes = len(view.decoding)
            tokens = max(1, budget - decodes * view.limits.decode_width)
            held = view.kv_total - view.kv_free + view.kv_shared + decodes
            full = quick(Shape, (decodes, held, tokens, behind(view), ()))
            self.step = min(longest, self._cost.seconds(full))
        else:
            self.step = self._mean.value or 0.0
        return (self.crowded_offset if self.is_crowded else self.offset) * self.step


def behind(view: View) -> int:
    """KV that is already there for the prompt under way, or cached for the next one."""
    for request in view.prefilling.values():
        return request.prompt + request.generated - request.todo
    for request in view.waiting.values():
        return request.cached
    return 0
