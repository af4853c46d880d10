"""keep: the policy that keeps promises of a first token and of time between tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import InputError, unknown
from headgate.core.plan import ALL, EACH_STEP, NONE, Plan, plan_of
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.keep.learned import LearnedCost
from headgate.methods.keep.order import Waiting
from headgate.methods.keep.step import APART, DECODES, Chooser, DecodeLoad, Now, Prompts, Step, StepPrices
from headgate.methods.mixed.mixed import NO_PLACE_LEFT, NONE_WAITS
from headgate.methods.orders import begun

DECODES_ALONE = Plan(ALL)
UNPROMISED = 2.0  # seconds between tokens of decodes without a promise, where others have one
SAMPLE = 2048  # prompt tokens: the chunk from which the pace of prompts is taken
SAMPLED = Prompts([(0, SAMPLE)]).first(SAMPLE)
LEAST_SHARE = 0.1  # of the time that prompts have at least, for that pace
# Half-done prompts with the promise of a first token and without; new ones that come first, and the others.
Queue = tuple[list[Request], list[Request], list[Request], list[Request]]
Victims = dict[int, int]  # background requests that make room, and the prompt that each makes it for
NO_VICTIM: Victims = {}
REFUSE = ("never", "predicted")
LOOK = 4  # steps with prompts beside decodes, one after the other, before decodes run alone to time a launch
SITS_OUT = 32  # steps with prompts in a row that half-done prompts without a promise may miss
MOST_SHUT_OUT = 60.0  # seconds that prompts wait at most while every step with prompts would break the gap
MOST_PIECES = 32  # of prompts in a row while decodes wait, whatever they cost


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Keep(BatchPolicy):
    """Choose tokens, prompts and their order in each step so that both promises of each request are kept.

    Without any promise it is `eb+`, step by step. With promises each step is the largest that keeps the
    tightest gap of the running decodes, by the card: prompts alone or beside decodes, whichever is cheaper.
    Prompts enter by Moore and Hodgson's rule, so that as many as possible have their first token in time, by
    their weights. Requests without a promise get what is left; background ones make room when they must.

    Parameters are in docs/policies/keep.md. Without a `cost` steps are learned as they run. `late` is 0.001,
    a promise at p99.9: an output has hundreds of gaps, and at p99 most requests would see one late.

    Source: ours. The order is Moore's rule (Management Science 15, 1968) for the fewest late jobs; the late
    get a tenth of all prompt tokens, so that none starves.
    """

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost | None = None,
        ttft: float | None = None,
        tbt: float | None = None,
        late: float = 0.001,
        trust: float = 0.9,
        learn: bool = True,
        patience: float = 0.1,
        watermark: float = 0.01,
        refuse: str = "never",
        fill: float = 0.7,
        reserve: float = 0.1,
    ) -> None:
        for name, promise in (("ttft", ttft), ("tbt", tbt)):
            if promise is not None and not promise > 0:
                raise InputError(f"keep: {name}={promise} s; a promise must be above 0, or left out")
        if not (0 <= patience < 1 and 0 <= watermark < 1):
            raise InputError(f"keep: patience={patience}, watermark={watermark}; both are shares below 1")
        if not (0 < fill <= 1 and 0 <= reserve < 1):
            raise InputError(f"keep: fill={fill}, reserve={reserve}; both are shares, fill above 0")
        if refuse not in REFUSE:
            raise unknown("refuse of keep", refuse, REFUSE)
        self.refuse = refuse == "predicted"
        self.learned: LearnedCost | None = None
        if cost is None:
            cost = self.learned = LearnedCost()
        self.plain = ExclusivePlus(slots, budget, cost)  # decides while no request has a promise
        self.slots, self.budget = slots, budget
        self.patience, self.watermark = patience, watermark
        self.fill, self.reserve = fill, reserve
        self.trust = Trust(trust, late, learn)
        self._tbt = tbt
        self._prices = StepPrices(cost)
        self._chooser = Chooser(self._prices, trust)
        self._waiting = Waiting(ttft)
        self._promised = 0  # requests here that have a promise
        self._background: dict[int, Request] = {}  # those that hold KV, the newest last
        self._decoding: dict[int, float] = {}  # promised gap of each that decodes; inf: none
        self._gaps: dict[float, int] = {}  # the same, counted
        self._step: Step | None = None  # of the newest plan
        self._since, self._pieces = 0.0, 0  # seconds and steps composed since the last with decodes
        self._newest, self._apart = 0.0, False  # as in `Now`
        self._sits = False  # half-done prompts without a promise miss this step
        self._sat = 0  # steps they have missed in a row
        self._no_room, self._shut_out = False, 0  # no step with prompts keeps the gap; so many steps in a row
        self._together = 0  # steps with prompts beside decodes since the last of decodes alone
        self._last: float | None = None

    def gauges(self) -> Mapping[str, float]:
        gap = self._gap()
        own = {"trust": self.trust.value, "gap": 0.0 if gap == inf else gap, "queued": len(self._waiting)}
        if self._prices.host is not None:
            own["host"] = self._prices.slow.factor
        if self.learned is not None:
            own["steps_learned"] = self.learned.seen
        return {**self.plain.gauges(), **own}

    def arrived(self, request: Request, now: float) -> None:
        self.plain.arrived(request, now)
        self._waiting.tenants.arrived(request)
        self._waiting.add(request)
        self._promised += self._has_promise(request)

    def admitted(self, request: Request, now: float) -> None:
        self.plain.admitted(request, now)
        self._waiting.drop(request)
        self._waiting.admitted(request, now)
        self._waiting.tenants.admitted(request)
        if request.slo.background:
            self._background[request.id] = request

    def prefilled(self, request: Request, now: float) -> None:
        self.plain.prefilled(request, now)
        self._forget(request)
        gap = self._between(request)
        self._decoding[request.id] = gap
        self._gaps[gap] = self._gaps.get(gap, 0) + 1

    def evicted(self, request: Request, now: float) -> None:
        self.plain.evicted(request, now)
        self._forget(request)
        self._background.pop(request.id, None)
        self._waiting.add(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It has left; without promises eb+ goes on, and does not remember an old refill."""
        self.plain.finished(request, now, how)
        self._waiting.drop(request)
        self._waiting.tenants.left(request)
        self._background.pop(request.id, None)
        self._forget(request)
        if self._has_promise(request):
            self._promised -= 1
            if not self._promised:
                self.plain.exclusive.start_over()

    def stepped(self, steps: Steps) -> None:
        if self.learned is not None:
            self.learned.learn(steps)
        self.plain.stepped(steps)
        if steps.decodes and self._promised:
            for end in steps.ends:
                self.trust.tokens(end, self._gaps.items())
            if not steps.prefill and self._step is not None:
                # A step with prompts was composed while the last of these ran, which may have waited for it.
                self._prices.slow.overlaps = True
                start = steps.ends[-2] if len(steps.ends) > 1 else steps.start
                read = steps.context + (len(steps.ends) - 1) * steps.decodes
                gpu = self._prices.decodes(quick(DecodeLoad, (steps.decodes, read)))
                self._prices.slow.saw(steps.ends[-1] - start, self._step.launch, gpu)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self.plain.planned(plan, now, gauges)
        step = self._step
        if plan.decode is not NONE or step is None or not self._decoding:
            self._since, self._pieces, self._newest = 0.0, 0, 0.0
            self._last = None if step is None or step.kind is DECODES else step.seconds
            self._together = 0 if self._last is None else self._together + 1
        else:
            if self._pieces:
                self._since += max(0.0, self._prices.slow.factor * step.launch - self._newest)
            self._since += step.seconds
            self._newest = step.seconds
            self._pieces += 1
        if self._no_room:
            self._shut_out += 1
        if plan.prefill:
            self._shut_out = 0
            self._sat = self._sat + 1 if self._sits else 0
        if step is not None and step.kind is not DECODES and self._decoding:
            self._apart = step.kind is APART
            if not step.kept:
                self.trust.excuse()

    def _forget(self, request: Request) -> None:
        gap = self._decoding.pop(request.id, None)
        if gap is None:
            return
        self._gaps[gap] -= 1
        if not self._gaps[gap]:
            del self._gaps[gap]
        if not self._decoding:
            self.trust.idle()

    def _between(self, request: Request) -> float:
        promise = request.slo.between_tokens
        if promise is None and not request.slo.background:
            promise = self._tbt
        return inf if promise is None else promise

    def _has_promise(self, request: Request) -> bool:
        return self._between(request) < inf or self._waiting.promise(request) is not None

    def _gap(self) -> float:
        tightest = inf
        for gap in self._gaps:
            tightest = min(tightest, gap)
        return self.trust.value * (UNPROMISED if tightest == inf else tightest)

    # -- what it decides

    def plan(self, view: View) -> Plan:
        self._step, self._sits, self._no_room = None, False, False
        if self.learned is not None:
            self.learned.width = view.limits.decode_width
        if not self._promised:
            self._shut_out = 0
            plan = self.plain.plan(view)
            return plan._replace(until=plan.until._replace(arrivals=1))  # it may bring a promise
        decodes, width = len(view.decoding), view.limits.decode_width
        budget = min(self.budget, view.limits.batch_tokens)
        if decodes * width > budget:  # only after taking over a fuller engine
            return Plan(frozenset(islice(view.decoding, budget // width)), budget=budget)
        short = self._short(view)
        if not view.waiting and not view.prefilling:
            self._shut_out = 0
            return self._decodes_until(view, NONE_WAITS, short)
        full = decodes >= min(self.slots, view.limits.running)
        if full and not view.prefilling and not self.refuse and not self._background:
            return NO_PLACE_LEFT
        gap = self._gap()
        promised = gap / self.trust.value
        starved = self._shut_out >= min(1 / self.trust.late, MOST_SHUT_OUT / promised)
        known = (_load(view), gap, promised, self._since, self._apart, self._newest, self._last, starved)
        now = quick(Now, known)
        half, other = self._halves(view, short)
        if view.waiting:
            pace = self._pace(now)
            start = self._free(view, now, half, pace)
            self._waiting.settle(view.waiting, start, pace, min(now.gap, pace * budget))
        reject = self._waiting.left_out(view.waiting) if self.refuse else ()
        new, rest, victims = self._entering(view, (half, other), budget, frozenset(reject), short)
        if short or victims:
            other = [request for request in other if request.id not in victims]
            now = now._replace(load=_without(now.load, view, (*short, *victims)))
        plan = self._compose(view, (half, other, new, rest), now, budget)
        if short or victims:
            gone = [victim for victim, prompt in victims.items() if prompt in plan.prefill]
            plan = plan._replace(evict=(*short, *gone))
        return plan._replace(reject=reject) if reject else plan

    def _short(self, view: View) -> tuple[int, ...]:
        """Background requests whose KV others need next, before the engine takes that of the newest."""
        if not self._background:
            return ()
        missing = self._least_free(view) - view.kv_free
        if missing <= 0:
            return ()
        makers = self._evictable(view)
        if len(makers) >= len(view.decoding) + len(view.prefilling):
            return ()
        gone: list[int] = []
        for request in reversed(makers):
            if missing <= 0:
                break
            gone.append(request.id)
            missing -= _frees(request, view.limits.block)
        return tuple(gone)

    def _evictable(self, view: View) -> list[Request]:
        """Background requests that hold KV, the next victim last: the newest of those evicted least often, so
        that none is evicted again and again. A live engine's news may be a step late.
        """
        decoding, prefilling = view.decoding, view.prefilling
        makers = [r for r in self._background.values() if r.id in decoding or r.id in prefilling]
        makers.sort(key=lambda request: -request.evictions)
        return makers

    def _least_free(self, view: View) -> int:
        return max(view.limits.block * len(view.decoding), int(self.watermark * view.kv_total))

    def _decodes_until(self, view: View, plan: Plan, short: tuple[int, ...]) -> Plan:
        if not self._background:
            return plan
        spare = (view.kv_free - self._least_free(view)) // max(1, len(view.decoding)) - view.limits.block
        until = plan.until._replace(steps=max(1, spare // view.limits.decode_width))
        return plan._replace(evict=short, until=until)

    def _halves(self, view: View, gone: tuple[int, ...]) -> tuple[list[Request], list[Request]]:
        half: list[Request] = []
        other: list[Request] = []
        for request in view.prefilling.values():
            if request.id not in gone:
                (other if self._waiting.promise(request) is None else half).append(request)
        return half, other

    def _compose(self, view: View, queue: Queue, now: Now, budget: int) -> Plan:
        """The chosen step as a plan.

        Promised prompts may fill the gap; the others fill a step up to a share of it. The engine runs
        half-done prompts before new ones. So half-done ones without a promise sit a step out in which not all
        of them and all promised ones fit; when they have missed enough, they go first.
        """
        half, other, new, rest = queue
        decodes, prompts = now.load.decodes, [*half, *other, *new, *rest]
        if not prompts or (decodes and self._pieces >= MOST_PIECES):
            return DECODES_ALONE
        if not other and not rest:
            step = self._largest(view, now, budget, prompts)
        else:
            prompts, step = self._filled(view, queue, now, budget)
        self._no_room = step.kind is DECODES and not step.kept
        if step.kind is DECODES or (step.kind is APART and not self._due(view, prompts, step)):
            return DECODES_ALONE
        if self._together >= LOOK and self._prices.sticks_out(now.load, step.launch):
            return DECODES_ALONE  # beside prompts no step waits for a launch, and nothing would be learned
        self._step = step
        ids, _ = begun(prompts, step.tokens)
        held = step.kind is APART and decodes
        return plan_of(NONE if held else ALL, tuple(ids), budget, step.tokens, EACH_STEP)

    def _filled(self, view: View, queue: Queue, now: Now, budget: int) -> tuple[list[Request], Step]:
        half, other, new, rest = queue
        promised = [*half, *new]
        spent = self._prices.decodes(now.load)
        less = now
        if spent < now.gap:
            less = now._replace(gap=spent + self.fill * (now.gap - spent))
        if not promised:
            return [*other, *rest], self._largest(view, less, budget, [*other, *rest])
        if other and self._sat >= SITS_OUT:
            first = [*other, *promised, *rest]
            return first, self._largest(view, less, budget, first)
        filled = [*half, *other, *new, *rest]
        step = self._largest(view, less, budget, filled)
        wanted = sum(request.todo for request in promised)
        if step.tokens > wanted and (not other or step.tokens >= wanted + sum(r.todo for r in other)):
            return filled, step
        self._sits = bool(other)
        return promised, self._largest(view, now, budget, promised)

    def _largest(self, view: View, now: Now, budget: int, prompts: list[Request]) -> Step:
        parts = Prompts([(r.prompt + r.generated - r.todo, r.todo) for r in prompts])
        beside = budget - now.load.decodes * view.limits.decode_width
        return self._chooser.choose(now, parts, budget, beside)

    def _due(self, view: View, prompts: list[Request], step: Step) -> bool:
        """Should prompts run apart now? Not while all of them may still wait for others to share the step."""
        if not view.decoding or view.prefilling or sum(request.todo for request in prompts) > step.tokens:
            return True
        for request in prompts:
            promise = self._waiting.promise(request)
            waited = view.now - request.arrival
            if promise is None or request.evictions or waited >= self.patience * promise:
                return True
        return False

    def _entering(
        self,
        view: View,
        halves: tuple[list[Request], list[Request]],
        budget: int,
        without: frozenset[int],
        gone: tuple[int, ...],
    ) -> tuple[list[Request], list[Request], Victims]:
        """New prompts in order, as far as a step, slots and KV go; apart from them those that get what is
        left, which leave some slots and KV free; and background requests that are evicted for the first.

        The first that does not fit holds up those behind it, but one without a promise none that has one. An
        empty engine takes any prompt.
        """
        new: list[Request] = []
        rest: list[Request] = []
        half, other = [sum(request.todo for request in some) for some in halves]
        tokens = budget - half
        makers = self._evictable(view) if self._background else []
        makers = [request for request in makers if request.id not in gone]
        room = Room(self, view, half + other, gone, makers)
        if tokens <= 0 or not view.waiting or room.shut:
            return new, rest, NO_VICTIM
        passed = False
        for request, fills in self._waiting.order(view):
            if request.id in without:
                continue
            if fills and (passed or room.victims or tokens <= other):
                break
            if fills:
                room.keep_free(self.reserve)
            elif makers and not room.takes(request) and self._waiting.timely(request):
                room.clear(request)
            if not room.takes(request):
                if fills or room.slots <= 0 or self._waiting.promise(request) is not None:
                    break
                passed = True
                continue
            room.take(request)
            (rest if fills else new).append(request)
            tokens -= request.todo
            if tokens <= 0 or room.shut:
                break
        return new, rest, room.victims

    def _free(self, view: View, now: Now, half: list[Request], pace: float) -> float:
        """When a new prompt can begin: after the step in flight, if there may be one, and the half-done."""
        start = view.now
        if self._prices.slow.overlaps and (view.decoding or view.prefilling):
            start += now.newest or now.last or self._prices.decodes(now.load)
        return start + sum(request.todo for request in half) * pace

    def _pace(self, now: Now) -> float:
        """Seconds a prompt token takes while there is a backlog, decodes between included."""
        token = self._prices.alone(SAMPLED) / SAMPLE
        if not now.load.decodes:
            return token
        return token * now.gap / max(now.gap - self._prices.decodes(now.load), LEAST_SHARE * now.gap)


@mypyc_attr(serializable=True)
class Room:
    """Slots and KV for prompts that enter in this step, and background requests that can make more of it."""

    def __init__(
        self, policy: Keep, view: View, half_done: int, gone: tuple[int, ...], makers: list[Request]
    ) -> None:
        decodes, halfway = len(view.decoding), len(view.prefilling)
        self._most = min(policy.slots, view.limits.running)
        self._kv, self._block = view.kv_total, view.limits.block
        self.slots = self._most - decodes - halfway + len(gone)
        self._free = view.kv_free - decodes - half_done - int(policy.watermark * view.kv_total)
        self._busy = decodes + halfway > len(gone)
        self._makers, self._kept_free = makers, False  # the next victim last
        self.victims: Victims = {}

    @property
    def shut(self) -> bool:
        return self.slots <= 0 and not self._makers

    def takes(self, request: Request) -> bool:
        """An empty engine takes any prompt."""
        return self.slots > 0 and (not self._busy or self._blocks(request) <= self._free)

    def take(self, request: Request) -> None:
        self.slots -= 1
        self._free -= self._blocks(request)
        self._busy = True

    def keep_free(self, share: float) -> None:
        """One slot at least, unless there is one only."""
        if not self._kept_free:
            self._kept_free = True
            self.slots -= min(max(int(share * self._most), int(share > 0)), self._most - 1)
            self._free -= int(share * self._kv)

    def clear(self, request: Request) -> None:
        missing, slots, count = self._blocks(request) - self._free, self.slots, 0
        for victim in reversed(self._makers):
            if missing <= 0 and slots > 0:
                break
            missing -= _frees(victim, self._block)
            slots, count = slots + 1, count + 1
        if missing > 0 or slots <= 0:
            return
        for _ in range(count):
            victim = self._makers.pop()
            self.victims[victim.id] = request.id
            self._free += _frees(victim, self._block)
        self.slots = slots

    def _blocks(self, request: Request) -> int:
        return -(-request.room // self._block) * self._block


def _frees(request: Request, block: int) -> int:
    """KV tokens that are free when it is evicted, at least: others may share what came from the cache."""
    return (request.prompt + request.generated - request.todo - request.cached) // block * block


def _without(load: DecodeLoad, view: View, gone: tuple[int, ...]) -> DecodeLoad:
    decodes, context = load
    for id in gone:
        request = view.decoding.get(id)
        if request is not None:
            decodes, context = decodes - 1, context - request.prompt - request.generated
    return quick(DecodeLoad, (decodes, max(decodes, context)))


def _load(view: View) -> DecodeLoad:
    """Decodes and what they read: the KV held less that of half-done prompts, and half a block each."""
    decodes = len(view.decoding)
    if not decodes:
        return quick(DecodeLoad, (0, 0))
    held = view.kv_total - view.kv_free + view.kv_shared
    for request in view.prefilling.values():
        held -= request.prompt + request.generated - request.todo
    held -= decodes * (view.limits.block - 1) // 2
    return quick(DecodeLoad, (decodes, max(decodes, held + decodes)))


LOWEST = 0.4
REVIEW = 200  # decode steps between two reviews
FEWER, MORE = 0.95, 0.005  # lowered by this factor, raised by this much
PATIENT = 0.125  # of the late gaps allowed: below this share it is raised
EXCUSED = 3  # decode steps after a change, or after a promise that could not be kept, that do not count


@mypyc_attr(serializable=True)
class Trust:
    """The share of each promised gap that a step is planned for.

    A card is some percent off and a host jitters, so a step planned for the whole gap may be late. After
    each `REVIEW` decode steps the share of late gaps is compared with what is allowed (`late`, 0.001 for a
    p99.9): above half of it trust falls by 5 percent, at once; below an eighth it rises by 0.005, up to
    where it began. Gaps that could not be kept by any step (`excuse`) do not count.
    """

    def __init__(self, value: float, late: float, learn: bool = True) -> None:
        if not 0 < value <= 1:
            raise InputError(f"keep: trust={value}; it is a share of each promised gap, above 0, at most 1")
        if not 0 < late < 1:
            raise InputError(
                f"keep: late={late}; it is the share of gaps that may be late, 0.001 for a p99.9"
            )
        self.value = value
        self._most = value
        self.late, self._learn = late, learn
        self._steps = 0
        self._gaps = self._missed = 0
        self._excused = 0
        self._seen: float | None = None  # when the newest tokens of decodes came

    def excuse(self) -> None:
        self._excused = EXCUSED

    def idle(self) -> None:
        self._seen = None

    def tokens(self, end: float, promises: Iterable[tuple[float, int]]) -> None:
        """All decodes got a token at `end`; `promises` are (seconds, how many decodes have it)."""
        seen, self._seen = self._seen, end
        if seen is None or not self._learn:
            return
        if self._excused:
            self._excused -= 1
            return
        gap = end - seen
        for promise, count in promises:
            self._gaps += count
            if gap > promise:
                self._missed += count
        self._steps += 1
        # Lower trust as soon as the window cannot end well, raise it after a good one.
        allowed = self.late * self._gaps * max(1.0, REVIEW / self._steps)  # in the whole window
        if self._missed > allowed / 2:
            self.value = max(LOWEST, self.value * FEWER)
            self._excused = EXCUSED
        elif self._steps < REVIEW:
            return
        elif self._missed <= PATIENT * allowed:
            self.value = min(self._most, self.value + MORE)
        self._steps = self._gaps = self._missed = 0
