"""A live engine as policies see it; guards against bad policies and our own mistakes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from headgate.core.errors import one_line
from headgate.core.ledger import Entry, Ledger, Watchdog
from headgate.core.plan import ALL, NONE, Decodes, Lease, Plan, check
from headgate.core.policy import COMPLETE, BatchPolicy, End, Observer
from headgate.core.view import Limits
from headgate.live.engine.events import (
    INTERNAL,
    NONSENSE,
    RAISED,
    SHOWN_EVERY,
    STARVED,
    Events,
    LiveObserver,
    PromptPiece,
    StepInFlight,
)
from headgate.live.engine.process import LOG
from headgate.live.engine.settings import WARM_UP
from headgate.live.engine.tally import Drafts
from headgate.methods.mixed.mixed import Mixed

__all__ = ["Live", "LiveObserver"]

PATIENT_DOG = 300.0  # seconds without progress after which a policy is relieved
RESCUE_STEPS = 16  # decode steps after the engine refused every prompt of a plan
RESCUE = Plan(ALL)
NO_GAUGES: dict[str, float] = {}
SPARE = 64  # entries of requests that have left, beside as many as there are decodes
NOTICED = 0.01  # by which tokens per step must change, as a share, before policies are told


class Live:
    """Between an engine and a policy. The engine's side calls, in this order, for each step:

    `begin` (what is the plan?), `admitted` for each request that got a slot, `ran` (this is the step), and
    when its tokens are known `done`, then `left` for each that finished. The next `begin` may come before
    `done`: then the step in flight counts as run, because the engine, too, builds on it.

    A policy that raises, plans nonsense or starves a request is relieved, once: `fallen` says why, `begin`
    answers None, and the engine goes on without a plan. Books are kept all the same.
    While all inside warm the engine up, `mixed` plans: the policy may never mix, and leave mixed steps cold.
    """

    def __init__(
        self,
        policy: BatchPolicy | None,
        limits: Limits,
        kv_total: int,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        watchdog: float = PATIENT_DOG,
        evict: Callable[[Entry], None] = lambda entry: None,
        reject: Callable[[Entry], None] = lambda entry: None,
        look: Callable[[Entry], object] = lambda entry: None,
    ) -> None:
        self.ledger = Ledger(limits, kv_total)
        self.lease = Lease()
        self.plan: Plan | None = None
        self.fallen: str | None = None
        self.clock = clock
        self.origin = clock()
        self.counts = {"mixed": 0, "decode": 0, "prefill": 0, "empty": 0}
        self.drafts = Drafts()
        self.news = Events(observers, self.fall)
        self._watchdog = Watchdog(watchdog)
        self._evict, self._reject, self._look = evict, reject, look
        self.flights: deque[StepInFlight] = deque()  # composed, tokens not yet known; oldest first
        self._last_end = 0.0
        self._rescue = 0  # steps it still lasts
        self._warming = 0  # requests inside that warm the engine up
        self._last_tokens = LastTokens(self.ledger)
        self._gauged, self._gauges_due = -inf, inf  # when the policy's numbers were and will be shown
        self.take_over(policy)

    @property
    def now(self) -> float:
        return self.clock() - self.origin

    @property
    def occupied(self) -> bool:
        ledger = self.ledger
        return bool(ledger.decoding or ledger.waiting or ledger.prefilling)

    def take_over(self, policy: BatchPolicy | None) -> None:
        self.news.tell()
        self.policy, self.plan, self.fallen, self._rescue = policy, None, None, 0
        self.lease.ended = True
        self._gauged, self._gauges_due = -inf, inf
        self._watchdog.forget(self.now)
        self.news.serve(policy)
        if policy is not None and self.occupied:
            self.ledger.now = self.now
            try:
                policy.adopt(self.ledger)
            except Exception as error:
                self.fall(one_line(error))

    def fall(self, reason: str, cause: str = RAISED) -> None:
        if self.fallen is not None:
            return
        self.fallen, self.plan = reason, None
        self.news.serve(None)
        self.news.tell()
        self.news.beside("fell_back", reason, self.now, cause)

    def arrive(self, entry: Entry) -> None:
        self.ledger.arrive(entry)
        self._warming += entry.kind == WARM_UP
        self.news.of("arrived", entry, entry.arrival, entry.arrival)
        self.lease.arrival()

    def admitted(self, entry: Entry, cached: int) -> None:
        self.ledger.admit(entry)
        if entry.evictions:
            entry.wasted = max(0, entry.wasted - cached)  # found again: nothing was lost
        else:
            entry.cached = min(entry.prompt, cached)
        self._of("admitted", entry)

    def evicted(self, entry: Entry) -> None:
        """Its KV was dropped: by the plan, or because the engine had to. Ends the lease with this step."""
        self.ledger.evict(entry)
        self._look(entry)
        self.lease.steps = min(self.lease.steps, 1)
        self._rescue = 0
        self._of("evicted", entry)

    def left(self, entry: Entry, how: End) -> None:
        self.ledger.leave(entry)
        self._warming -= entry.kind == WARM_UP
        self.lease.finish()
        self._rescue = 0
        if how not in COMPLETE or not self.occupied:
            self.lease.ended = True
        self.news.finished(entry, self.now, how, self.flights)

    def away(self, entry: Entry) -> None:
        """It waits, but the engine cannot run it for now; the policy is not to count on it."""
        self.ledger.leave(entry)
        self._warming -= entry.kind == WARM_UP
        self.lease.ended = True
        self.news.away(entry, self.now)

    def back(self, entry: Entry) -> None:
        self.ledger.arrive(entry)
        self._warming += entry.kind == WARM_UP
        self.news.back(entry)
        self.lease.arrival()

    def wasted(self, tokens: int) -> None:
        self.news.tell()
        self.news.beside("wasted", tokens, self.now)

    def paused(self) -> None:
        """The engine stands still for a reason of its own: the policy is not to blame."""
        self._watchdog.forget(self.now)

    def begin(self, kv_free: int, kv_short: bool = False) -> Plan | None:
        now, ledger = self.clock() - self.origin, self.ledger
        if self.flights:
            self.news.waits_for = newest = self.flights[-1]
            if not newest.booked:
                self._book(newest, now, None)
                for entry in self._last_tokens.due():  # they get none in the next; the engine knows that
                    ledger.retire(entry)
        ledger.now, ledger.kv_free = now, kv_free
        half_done = sum([entry.held_kv for entry in ledger.prefilling.values()]) if ledger.prefilling else 0
        ledger.kv_shared = max(0, ledger.context + half_done - (ledger.kv_total - kv_free))
        if self.policy is None or self.fallen is not None:
            return None
        dog = self._watchdog
        if now >= dog.next_look and (starving := dog.look(ledger, now, sum(self.counts.values()))):
            self.fall(starving, STARVED)
            return None
        if self._rescue and (ledger.decoding or ledger.prefilling):
            self._rescue -= 1
            rescue = RESCUE if ledger.decoding else Plan(NONE, (*ledger.prefilling,))
            if self.plan != rescue:
                self._enforce(rescue)
        elif self.lease.ended or kv_short or now >= self.lease.time:
            self._rescue = 0
            self._ask(self.policy)
        if now >= self._gauges_due:
            self._show_gauges(self.policy)
        return self.plan

    def ran(
        self, chunks: tuple[PromptPiece, ...], decodes: int, ids: Iterable[int] | None, queries: int = 0
    ) -> StepInFlight | None:
        """What the engine composed, which may be less than the plan; None: the step is empty. `ids` may be
        left out where none is held and as many share the tick. `queries` as in `Steps`.
        """
        ledger, plan = self.ledger, self.plan
        if decodes and ids is not None:
            self._roll(frozenset(ids))
        self.news.waits_for = None
        if not decodes and not chunks:
            self._nothing_ran()
            return None
        context = ledger.context + decodes if decodes else 0
        rolls = not chunks or plan is None or isinstance(plan.decode, Decodes)
        flight = StepInFlight(ledger.now, decodes, context, chunks, rolls, queries)
        kind = "mixed" if decodes else "prefill"
        self.counts[kind if chunks else "decode"] += 1
        self.flights.append(flight)
        return flight

    def done(self, flight: StepInFlight, kv: int) -> None:
        end = self.clock() - self.origin
        start = flight.start if flight.start > self._last_end else self._last_end
        self._last_end = end
        self.flights.remove(flight)
        prefill = behind = 0
        for chunk in flight.chunks:
            prefill += chunk.tokens
            behind += chunk.behind
        self.news.ran(start, end, flight.decodes, flight.context, prefill, behind, kv, flight.queries)
        if not flight.booked:
            self._book(flight, end, end)
        elif flight.later:
            self.news.late(flight, end)

    def delivered(self, deliveries: Iterable[tuple[str, int, int]]) -> None:
        self.drafts.saw(deliveries)
        limits, measured = self.ledger.limits, self.drafts.tokens_per_step
        if abs(measured - limits.tokens_per_step) > NOTICED * measured:
            self.ledger.limits = limits._replace(tokens_per_step=measured)

    def recount(self, entry: Entry, tokens: int) -> None:
        self.ledger.recount(entry, tokens)
        if entry.rolls and entry.limit - tokens <= 1:
            self._last_tokens.add(entry)

    def _ask(self, policy: BatchPolicy) -> None:
        ledger, limits = self.ledger, self.ledger.limits
        self.news.tell()
        if 0 < self._warming == len(ledger.waiting) + len(ledger.prefilling) + len(ledger.decoding):
            policy = Mixed(min(limits.running, limits.batch_tokens), limits.batch_tokens)
        try:
            plan = policy.plan(ledger)
            faults = check(plan, ledger) if isinstance(plan, Plan) else [f"{plan!r} is not a Plan"]
            gauges = policy.gauges() if self.news.gauges_of_each else NO_GAUGES
        except Exception as error:
            self.fall(one_line(error))
            return
        if faults:
            self.fall(f"planned nonsense: {'; '.join(faults)}", NONSENSE)
            return
        for id in plan.reject:
            self._reject(ledger.known(id))
        self.lease.begin(plan.until)
        for id in plan.evict:
            self._evict(ledger.known(id))
        self._enforce(plan)
        self.news.planned(plan, ledger.now, gauges)
        if self.news.gauged:
            self._gauges_due = self._gauged + SHOWN_EVERY

    def _show_gauges(self, policy: BatchPolicy) -> None:
        """Not with each plan: a mapping of a dozen numbers takes longer than some plans."""
        self._gauged, self._gauges_due = self.ledger.now, inf
        if self.fallen is not None:
            return
        try:
            gauges = policy.gauges()
        except Exception as error:
            self.fall(one_line(error))
            return
        self.news.show(gauges, self.ledger.now)

    def _enforce(self, plan: Plan) -> None:
        self.plan = plan
        decode, ledger = plan.decode, self.ledger
        if decode is NONE or (decode is ALL and not ledger.held):
            return
        self._roll(ledger.decoding if isinstance(decode, Decodes) else decode)

    def _roll(self, chosen: Container[int]) -> None:
        ledger = self.ledger
        for entry in [held for held in ledger.held.values() if held.id in chosen]:
            ledger.resume(entry)
            self._last_tokens.add(entry)
            self._of("resumed", entry)
        for entry in [each for each in ledger.decoding.values() if each.rolls and each.id not in chosen]:
            ledger.hold(entry)
            self._of("held", entry)

    def _book(self, flight: StepInFlight, now: float, when: float | None) -> None:
        ledger, news = self.ledger, self.news
        flight.booked = True
        if flight.decodes:
            ledger.ticks(1, now)
        self.lease.ran(1, now)
        for chunk in flight.chunks:
            entry = chunk.entry
            if entry.id not in ledger.prefilling:  # it left meanwhile
                continue
            entry.todo = chunk.left
            if chunk.left:
                continue
            ledger.join(entry, now, flight.rolls)
            self._last_tokens.add(entry)
            self.lease.prefill()
            news.of("prefilled", entry, when, now)
            if not flight.rolls:
                news.of("held", entry, when, now)

    def _nothing_ran(self) -> None:
        """The step is empty: the plan must be made anew, and those that hold KV must not wait for nothing."""
        plan, ledger = self.plan, self.ledger
        self.counts["empty"] += 1
        self.lease.ended = True
        if plan is None or not plan.prefill:
            return
        if (plan.decode is not ALL and ledger.decoding) or not ledger.prefilling.keys() <= {*plan.prefill}:
            self._rescue = RESCUE_STEPS
            self.news.tell()
            self.news.beside("rescued", ledger.now)

    def _of(self, name: str, entry: Entry) -> None:
        now = self.ledger.now
        self.news.of(name, entry, now, now)


class Guard:
    """Keeps the engine from our own mistakes. `broken`: our part has failed, and is left out from then on."""

    def __init__(self, live: Live, title: str, restore: Callable[[], None]) -> None:
        self.broken = False
        self._live = live
        self._title = title  # of the engine
        self._restore = restore  # what we had changed of the engine for one step

    def guarded(self, part: Callable[..., Any], *args: Any) -> Any:
        if self.broken:
            return None
        try:
            return part(*args)
        except Exception as error:
            self.broken = True
            with suppress(Exception):
                LOG.exception("headgate failed; %s goes on without it", self._title)
                self._live.fall(f"internal error: {one_line(error)}", INTERNAL)
            self._restore()
            return None


class LastTokens:
    """Decodes by the tick in which they get their last token, where a step in flight can retire them."""

    __slots__ = ("_heap", "_ledger")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap: list[tuple[int, int]] = []  # tick, request

    def add(self, entry: Entry) -> None:
        heap, decoding = self._heap, self._ledger.decoding
        if len(heap) >= 2 * len(decoding) + SPARE:
            heap[:] = [self._last(decode) for decode in decoding.values() if decode.rolls]
            heapify(heap)
        else:
            heappush(heap, self._last(entry))

    def due(self) -> Sequence[Entry]:
        heap, ledger = self._heap, self._ledger
        if not heap or heap[0][0] > ledger.tick:
            return ()
        complete: dict[int, Entry] = {}
        while heap and heap[0][0] <= ledger.tick:
            entry = ledger.decoding.get(heappop(heap)[1])
            if entry is None or not entry.rolls:  # it left, or is held: it is added again when it resumes
                continue
            if entry.generated < entry.limit:  # tokens were taken back
                heappush(heap, self._last(entry))
            else:
                complete[entry.id] = entry
        return list(complete.values())

    def _last(self, entry: Entry) -> tuple[int, int]:
        return self._ledger.tick + entry.limit - entry.generated, entry.id
