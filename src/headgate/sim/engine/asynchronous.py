"""A virtual engine that composes a step while the one before it runs, as vLLM does by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop
from itertools import accumulate
from math import inf, nan
from typing import Any, Final

from headgate.core.build import mypyc_attr
from headgate.core.ledger import NOT_ROLLING, Entry
from headgate.core.listeners import Listeners
from headgate.core.plan import Decodes, Plan
from headgate.core.policy import End, Observer
from headgate.core.request import Request
from headgate.cost.model import Shape, StepCost
from headgate.sim.engine.replica import ADMISSION, LIMIT, STOPPED, VirtualEngine
from headgate.sim.engine.steps import LONG, Price, StepClock, needed

Work = tuple[int, int, int, int]  # of a step: decodes, their context, prompt tokens, tokens behind them
Moments = tuple[int, float, float, float, float, float]
NO_ENDS: Final[list[float]] = []


class Composed:
    __slots__ = ("before", "composed", "date", "dated", "done", "joined", "leaving", "work")

    def __init__(self, composed: float, done: float, date: float, work: Work) -> None:
        self.composed, self.done = composed, done
        self.date = date  # of its tokens, until they are seen: when the next step is composed, as when live
        self.work = work
        self.joined: list[tuple[Entry, bool]] = []  # done with it, and whether they decode on
        self.before: dict[int, float] = {}  # when those of them that had tokens got their newest
        self.leaving: dict[int, tuple[Entry, End]] = {}  # they go when its tokens are seen
        # Requests whose newest token is its own, beside those that roll on, and how many tokens that makes.
        self.dated: list[tuple[Entry, int]] = []


@mypyc_attr(allow_interpreted_subclasses=True)
class Ahead(VirtualEngine):
    """Its clock is the host's. A step is composed at the moment the tokens of the step before the last are
    seen, for what is known then; its tokens are seen when the GPU has done it and the host, busy with the
    step after it, looks.

    With E(n) the moment at which the tokens of step n are seen, G(n) when the GPU has done it, c(n) its time
    on the GPU and H(n) the host's: step n + 1 is composed from E(n - 1) on, and

        G(n + 1) = max(max(G(n), E(n - 1)) + c(n + 1), E(n - 1) + H(n + 1))
        E(n)     = max(G(n), E(n - 1) + H(n + 1))

    Where nothing more can be composed, E(n) = G(n). So a request that comes during step n enters in step
    n + 2; one that has all its tokens with step n keeps slot and KV while step n + 1 is composed; tokens
    before a step with prompts are late, for such a step takes the host long; and where the host takes longer
    than the GPU, it is what one waits for. Without a host (cards that do not have one) H = 0, and only the
    lag is left. The engine knows limits beforehand and ends of sequences not: a request whose output ends by
    itself with step n is in step n + 1 too, for a token that is dropped.

    A policy hears of prompts and evictions when the step is composed and of ends when they are seen, as it
    does in a live engine, and its leases count them then. Decode steps that repeat are jumped over while
    no request joins, leaves or stops: `Launches` times them all at once.

    Source: vLLM's `EngineCore.step_with_batch_queue` and `AsyncScheduler`, with a queue of two and the GPU's
    worker in the engine's own process (one GPU). We differ: a step begins on the GPU when it is composed, not
    when its first kernel has been launched; one that hangs up goes with the step on its way, not before it.
    """

    ahead = True

    def _clock(self, cost: StepCost) -> StepClock:
        self._launches = Launches(cost)
        return self._launches

    def _told(self, observers: Sequence[Observer]) -> tuple[Observer, ...]:
        self._later = DelayedEvents(observers)
        self._air: Composed | None = None  # composed last
        self._landing: Composed | None = None  # the one before it, seen when `settle` is called
        self._seen = -inf  # when the last tokens were
        return (self._later,)

    @property
    def occupied(self) -> bool:
        return self._air is not None or super().occupied

    def leave(self, entry: Entry, now: float, how: End) -> None:
        """A request that gets a token from the step on its way goes with it."""
        self.lease.ended = True
        if self._air is not None and entry.id in self.ledger.decoding:
            if entry.id not in self._air.leaving:
                self._stop(entry)
                self._goes(entry, how)
            return
        super().leave(entry, now, how)

    def evict(self, entry: Entry) -> None:
        """Requests that are about to go get no more tokens; their KV comes free by itself."""
        if self._air is not None and entry.id in self._air.leaving:
            self._stop(entry)
        elif self._shortest and self._unseen(entry):
            self._later.at_once = True
            super().evict(entry)
            self._later.at_once = False
        else:
            self._date(entry)
            super().evict(entry)

    def _drop(self, entry: Entry) -> None:
        """VLLM keeps the token that is on its way. SGLang drops it: no observer hears of it."""
        dropped = self._shortest and self._unseen(entry) > 0
        super()._drop(entry)
        if dropped:
            assert self._air is not None
            self._air.joined = [pair for pair in self._air.joined if pair[0] is not entry]
            self.ledger.take_token(entry, self._air.before.get(entry.id, self._seen))

    def _make_room(self) -> bool:
        """SGLang retracts none while the KV of requests that are about to go comes free."""
        if self._shortest and self.asked_now and self._air is not None and self._air.leaving:
            return False
        return super()._make_room()

    def advance(self, wake: float = inf) -> bool:
        """Compose a step, or wait for the one on its way. False: there is none, and nothing could run."""
        composed = self.now
        if VirtualEngine.advance(self, wake):  # quicker than super()
            return True
        if not self.asked_now:
            return False
        if self._air is None:
            self._later.catch_up()
            return False
        self._landing, self._air = self._air, None
        self.last_start, self.now = composed, max(composed, self._landing.done)
        self.asked_now = False
        return True

    def settle(self) -> None:
        self._see()
        while self._ends and self._ends[0][0] <= self.ledger.tick:
            end, _, id = heappop(self._ends)
            entry = self.ledger.decoding.get(id)
            if entry is not None and entry.end == end:
                # Of drafts it cannot tell beforehand, so all but one of a burst count as rejected
                sure = entry.generated - entry.burst + 1
                known = sure >= min(entry.limit, self.longest - entry.prompt)
                if known or not entry.rolls:
                    self._stop(entry)
                whole = entry.generated >= self._lengths[entry.id]
                self._goes(entry, STOPPED if whole else LIMIT)

    def _see(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            self._land(landing)
            self._later.catch_up(landing.dated, self.now)
        else:
            self._later.catch_up()

    def _run_decodes(self, start: float, decodes: int, context: int, most: int, stop: float) -> None:
        """The newest step is on its way; the clock goes to the end of the one before it, as it is seen."""
        ends = NO_ENDS  # of the steps before each of these, where an observer wants them
        tick = self.ledger.tick
        if self._later.hear.each_end or self.hear.stepped:
            ends = self._launches.decode_ends(decodes, context, most, start, stop)
            count, first, second, third, before, last = moments(ends)
        else:
            times = self._launches.decode_moments(decodes, context, most, start, stop)
            count, first, second, third, before, last = times
        if count > 1:
            self._compose(start, first, (decodes, context, 0, 0))
            self._see()
        if count > 2:  # all but the newest two are composed and seen
            self.blocks.grow(self.ledger.tick, count - 2, decodes)
            self.ledger.ticks(count - 2, before)
            seen = ends[1:-1] if ends else NO_ENDS
            self._tell_steps(first, seen, second, before, count - 2, (decodes, context, 0, 0))
            self._seen = before
            newest = self._air  # until now the first of them, which no request has joined or left
            assert newest is not None
            newest.composed, newest.done, newest.date = third, last, before
            newest.work = decodes, self._read(context, decodes, tick, count - 2), 0, 0
        if count > 1:
            start, context = before, self._read(context, decodes, tick, count - 1)
        self._compose(start, last, (decodes, context, 0, 0))
        self.last_start = start
        self.lease.ran(count, self.now)

    def _read(self, context: int, decodes: int, tick: int, steps: int) -> int:
        growth, begin = self.ledger.growth, tick - self.ledger.past
        return context + (steps * decodes if growth is None else sum(growth[begin : begin + steps]))

    def _ran_prompts(
        self, start: float, end: float, decodes: int, context: int, prefill: int, behind: int
    ) -> None:
        self._compose(start, end, (decodes, context, prefill, behind))
        self.last_start = start
        self.lease.ran(1, self.now)

    def _compose(self, start: float, now: float, work: Work) -> None:
        self.now = now
        self._landing, self._air = self._air, Composed(start, self._launches.done, now, work)
        if work[0]:
            blocks, ledger = self.blocks, self.ledger
            blocks.take(blocks.growers[(ledger.tick - blocks.past) % blocks.ring])
            ledger.ticks(1, now)

    def _tell_steps(
        self, start: float, ends: list[float], first: float, last: float, count: int, work: Work
    ) -> None:
        decodes, context, prefill, behind = work
        kv = self._kv_held()
        if not ends:
            for counter in self._later.hear.counting:
                counter.ran(start, first, last, count, decodes, context, prefill, behind, kv)
            return
        self._later.hear.ran(start, ends, decodes, context, prefill, behind, kv)
        if self.hear.stepped:  # the policy's
            self.hear.ran(start, ends, decodes, context, prefill, behind, kv)

    def _complete(self, entry: Entry) -> None:
        assert self._air is not None
        rolling = isinstance(self.plan.decode, Decodes)
        before = entry.last_token
        self._join(entry, self._air.date, rolling)
        self._air.joined.append((entry, rolling))
        if before is not None:
            self._air.before[entry.id] = before
        self._air.dated.append((entry, entry.generated))
        self.lease.prefill()
        self.policy.prefilled(entry, self.now)
        if not rolling:
            self.policy.held(entry, self.now)

    def _land(self, step: Composed) -> None:
        now, hear = self.now, self._later.hear
        start = step.composed if step.composed > self._seen else self._seen
        self._seen = now
        decodes = step.work[0]
        ticks_since = self._air is not None and self._air.work[0] > 0
        if step.dated or (decodes and not ticks_since):
            self.ledger.redate(now, decodes > 0 and not ticks_since, step.dated)
        ends = [now] if hear.each_end or self.hear.stepped else NO_ENDS
        self._tell_steps(start, ends, now, now, 1, step.work)
        if not (step.joined or step.leaving):
            return
        for entry, rolling in step.joined:
            for hook in hear.prefilled:
                hook(entry, now)
            if not rolling:
                for hook in hear.held:
                    hook(entry, now)
        for entry, how in step.leaving.values():
            self._free(entry)
            self.ledger.recount(entry, min(entry.generated, self._whole(entry)))
            self.ledger.leave(entry)
            self.lease.finish()
            for ended in hear.finished:
                ended(entry, now, how)
            self.policy.finished(entry, now, how)
            self._on_leave(entry.id, now)

    def _stop(self, entry: Entry) -> None:
        """It gets no token after the step on its way, and keeps its slot and its KV."""
        self._date(entry)
        if entry.rolls:
            self._unroll(entry)
            self.ledger.retire(entry)
        self.ledger.held.pop(entry.id, None)

    def _unseen(self, entry: Entry) -> int:
        air = self._air
        if air is None:
            return 0
        if entry.rolls and air.work[0] and entry.ticked:
            return entry.burst
        newest = any(one is entry and tokens == entry.generated for one, tokens in air.dated)
        return entry.burst if newest else 0

    def _goes(self, entry: Entry, how: End) -> None:
        assert self._air is not None
        entry.end = NOT_ROLLING
        self._air.leaving[entry.id] = entry, how

    def _hold(self, entry: Entry) -> None:
        self._date(entry)
        super()._hold(entry)

    def _date(self, entry: Entry) -> None:
        if self._air is not None and self._air.work[0] and entry.ticked:
            self._air.dated.append((entry, entry.generated))

    def _newest(self) -> Entry:
        leaving = self._air.leaving if self._air else {}
        running = (*self.ledger.prefilling.values(), *self.ledger.decoding.values())
        return max((entry for entry in running if entry.rolls or entry.id not in leaving), key=ADMISSION)

    def _next_end(self) -> int:
        """One step at a time where nothing is on its way or requests leave with it; else ends are known."""
        if self._air is None or self._air.leaving:
            return self.ledger.tick + 1
        return VirtualEngine._next_end(self)

    def _tell_finished(self, entry: Entry, now: float, how: End) -> None:
        if self._air is None:  # nothing is left to wait for
            self._later.catch_up()
        super()._tell_finished(entry, now, how)


def moments(ends: list[float]) -> Moments:
    """How many, the first two and the last three; of fewer than that some are the same."""
    count = len(ends)
    near = [ends[max(count - back, 0)] for back in (3, 2, 1)]
    return count, ends[0], ends[1 if count > 1 else 0], near[0], near[1], near[2]


class Launches(StepClock):
    """The times of an asynchronous engine, step after step; `Ahead` has the equations.

    Kernels run while later ones are launched: a step takes its time from the end of the step before it or
    from its composing on, and is not done before the last of it has been launched. What is returned is not
    the end of the step, which is `done`, but the moment at which the tokens of the step before it are seen
    and the next one may be composed.
    """

    __slots__ = ("_host", "_spent", "_width", "done")

    def __init__(self, cost: StepCost) -> None:
        host = cost.host
        super().__init__(cost.unhosted() if host else cost)
        self._host, self._width = host, cost.width
        self._spent: dict[int, float] = {}  # the host's seconds for a step of so many decodes
        self.done = -inf  # when the GPU has done all that was launched
        self.by_chunk = self.by_chunk or host is not None  # it counts prompts

    def prompts_end(self, start: float, shape: Shape) -> float:
        before = self.done
        end = super().prompts_end(max(start, before), shape)
        launched = start if self._host is None else start + self._host.seconds(shape, self._width)
        self.done = max(end, launched)
        return max(max(start, before), launched)

    def decode_ends(self, decodes: int, context: int, most: int, start: float, stop: float) -> list[float]:
        """Decode steps, the first composed at `start`, each other as soon as the one before it may be left.

        None but the first is composed at or after `stop`. All of them wait for the GPU, or all for the host,
        and a change of phase stands alone, so from the second on their times lie on a straight line.
        """
        price = fixed, slope, least = self._line(decodes)
        spent = self._host_seconds(decodes)
        more, self._more = self._more, 0.0
        first = max(fixed + slope * context, least)
        if more:
            most = 1
        if start + spent <= self.done and spent <= first:  # nor later: steps do not get shorter
            begun = self.done
            self._more = more
            ends = self._ends(price, decodes, context, most, begun, stop)
            self.done = ends.pop()
            ends.insert(0, begun)
            return ends
        now, done, late = start, self.done, start + spent > self.done
        ends = []
        for read in self._contexts(decodes, context, most):
            launched = now + spent
            if ends and (now >= stop or (launched > done) is not late):
                break
            end = max(now, done) + (max(fixed + slope * read, least) + more)
            now, done = max(max(now, done), launched), max(end, launched)
            ends.append(now)
        self.done = done
        return ends

    def _contexts(self, decodes: int, context: int, most: int) -> Sequence[int]:
        ledger = self.ledger
        if ledger is None:
            return range(context, context + most * decodes, decodes)
        assert ledger.growth is not None
        begin = ledger.tick - ledger.past
        return list(accumulate(ledger.growth[begin : begin + most - 1], initial=context))

    def decode_moments(self, decodes: int, context: int, most: int, start: float, stop: float) -> Moments:
        """The `moments` of the same; they are not listed where all steps wait for the GPU."""
        price = fixed, slope, least = self._line(decodes)
        spent, seconds = self._host_seconds(decodes), max(fixed + slope * context, least)
        if self.ledger is None and not (self._more or start + spent > self.done or spent > seconds):
            few = needed(most, seconds, self.done, stop) if most >= LONG else most
            if few < LONG:
                return self._on_the_gpu(price, seconds, decodes, context, few, stop)
        return moments(self.decode_ends(decodes, context, most, start, stop))

    def _on_the_gpu(
        self, price: Price, seconds: float, decodes: int, context: int, most: int, stop: float
    ) -> Moments:
        """All of them wait for the GPU; the first takes so many seconds."""
        fixed, slope, least = price
        third = before = last = first = self.done
        read, end, count = context, first + seconds, 1
        second = end
        while end < stop and count < most:
            read += decodes
            third, before, last = before, last, end
            seconds = fixed + slope * read
            if seconds < least:
                seconds = least
            end += seconds
            count += 1
        self.done = end
        return count, first, second, third, before, last

    def _host_seconds(self, decodes: int) -> float:
        if self._host is None:
            return 0.0
        spent = self._spent.get(decodes)
        if spent is None:
            spent = self._spent[decodes] = self._host.seconds(Shape(decodes), self._width)
        return spent


class RequestAsOf:
    def __init__(self, request: Request) -> None:
        self._request = request
        self.generated, self.wasted = request.generated, request.wasted
        self.last_token = request.last_token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class DelayedEvents(Observer):
    """An engine that composes ahead admits and evicts for step n + 1 before the tokens of step n are seen.
    Observers that count tokens by steps must hear of step n first.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.hear = Listeners(observers)  # to be told at once
        self._news: list[tuple[list[Any], tuple[Any, ...]]] = []  # the hooks that hear it, and what
        self._stale: list[RequestAsOf] = []  # of those in `_news`
        self.at_once = False  # a request is evicted whose token on its way does not count

    def arrived(self, request: Request, now: float) -> None:
        """At once: it has no part in any step yet."""
        for hook in self.hear.arrived:
            hook(request, now)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It left the queue: at once, unless there are news that must come first."""
        if self._news:
            self._news.append((self.hear.finished, (request, now, how)))
        else:
            for hook in self.hear.finished:
                hook(request, now, how)

    def admitted(self, request: Request, now: float) -> None:
        self._news.append((self.hear.admitted, (request, now)))

    def held(self, request: Request, now: float) -> None:
        self._news.append((self.hear.held, (request, now)))

    def resumed(self, request: Request, now: float) -> None:
        self._news.append((self.hear.resumed, (self._as_of(request), now)))

    def evicted(self, request: Request, now: float) -> None:
        if self.at_once:
            for hook in self.hear.evicted:
                hook(request, now)
            return
        self._news.append((self.hear.evicted, (self._as_of(request), now)))

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self._news.append((self.hear.planned, (plan, now, gauges)))

    def _as_of(self, request: Request) -> RequestAsOf:
        self._stale.append(RequestAsOf(request))
        return self._stale[-1]

    def catch_up(self, dated: Sequence[tuple[Entry, int]] = (), seen: float = nan) -> None:
        """What has waited; newest tokens of those `dated`, and of how many, were `seen` only now."""
        if not self._news:
            return
        news, self._news = self._news, []
        if self._stale:
            late = {(entry.id, tokens) for entry, tokens in dated}
            for request in self._stale:
                if (request.id, request.generated) in late:
                    request.last_token = seen
            self._stale.clear()
        for hooks, words in news:
            for hook in hooks:
                hook(*words)
