"""A live engine as policies see it: asks for plans, books what really ran, and guards against bad policies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from traceback import extract_tb

from headgate.core.lease import Lease
from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, NONE, Decodes, Plan, check
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.view import Limits
from headgate.drivers.flight import Chunk, Flight
from headgate.drivers.listeners import Listeners
from headgate.drivers.watchdog import Watchdog

PATIENT_DOG = 300.0  # seconds without progress after which a policy is relieved
RESCUE_STEPS = 16  # decode steps after the engine refused every prompt of a plan
RESCUE = Plan(ALL)
NOBODY = Listeners(())


class LiveObserver(Observer):
    """What can happen in a live engine besides."""

    def fell_back(self, reason: str, now: float) -> None:
        """The policy was relieved; from now on the engine decides as if we were not there."""

    def rescued(self, now: float) -> None:
        """The engine refused every prompt of a plan that holds decodes; they run instead."""

    def wasted(self, tokens: int, now: float) -> None:
        """Tokens were scheduled for a request that had gone when they came."""


class Live:
    """Between an engine and a policy. The engine's side calls, in this order, for each step:

    `begin` (what is the plan?), `admitted` for whoever got a seat, `ran` (this is the step), and when its
    tokens are known `done`, then `left` for whoever finished. The next `begin` may come before `done`:
    then the step in flight counts as run, because the engine, too, builds on it.

    A policy that raises, plans nonsense or starves somebody is relieved, once: `fallen` says why, `begin`
    answers None, and the engine goes on without a plan. Books are kept all the same.
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
    ) -> None:
        self.ledger = Ledger(limits, kv_total)
        self.lease = Lease()
        self.plan: Plan | None = None
        self.policy = policy
        self.fallen: str | None = None
        self.clock = clock
        self.origin = clock()
        self.counts = {"mixed": 0, "decode": 0, "prefill": 0, "empty": 0}
        self._observers = tuple(observers)
        self._hear = Listeners(self._observers)
        self._tell = NOBODY  # the policy's hooks
        self._watchdog = Watchdog(watchdog)
        self._evict = evict
        self._flights: deque[Flight] = deque()  # composed, tokens not yet known; oldest first
        self._composing: Flight | None = None  # the newest of them while the next step is composed
        self._last_end = 0.0
        self._rescue = 0  # steps it still lasts
        self.take_over(policy)

    @property
    def now(self) -> float:
        """Seconds since the engine began."""
        return self.clock() - self.origin

    @property
    def occupied(self) -> bool:
        """Is anybody here?"""
        ledger = self.ledger
        return bool(ledger.decoding or ledger.waiting or ledger.prefilling)

    def take_over(self, policy: BatchPolicy | None) -> None:
        """Another policy decides from now on; None: the engine itself."""
        self.policy, self.plan, self.fallen, self._rescue = policy, None, None, 0
        self.lease.ended = True
        self._tell = NOBODY if policy is None else Listeners((policy,))
        if policy is not None and self.occupied:
            self.ledger.now = self.now
            try:
                policy.adopt(self.ledger)
            except Exception as error:
                self.fall(told(error))

    def fall(self, reason: str) -> None:
        """The policy is relieved: no plan, no hooks, no second chance."""
        if self.fallen is not None:
            return
        self.fallen, self.plan, self._tell = reason, None, NOBODY
        for observer in self._observers:
            if isinstance(observer, LiveObserver):
                observer.fell_back(reason, self.now)

    # -- comings and goings ---------------------------------------------------------------------

    def arrive(self, entry: Entry) -> None:
        """It joins the queue."""
        self.ledger.arrive(entry)
        self._call("arrived", entry, entry.arrival)
        self.lease.arrival()

    def admitted(self, entry: Entry, cached: int) -> None:
        """The step being composed gives it a seat; `cached` of its prompt tokens are there already."""
        self.ledger.admit(entry)
        if not entry.evictions:
            entry.cached = cached
        self._call("admitted", entry, self.ledger.now)

    def evicted(self, entry: Entry) -> None:
        """Its KV was dropped: by the plan, or because the engine had to. Ends the lease with this step."""
        self.ledger.evict(entry)
        self.lease.steps = min(self.lease.steps, 1)
        self._rescue = 0
        self._call("evicted", entry, self.ledger.now)

    def left(self, entry: Entry, how: End) -> None:
        """It is gone."""
        self.ledger.leave(entry)
        self.lease.finish()
        self._rescue = 0
        if how is not End.STOPPED and how is not End.LIMIT or not self.occupied:
            self.lease.ended = True
        now = self.now
        if self._tell.finished:
            self._to_policy(self._tell.finished, entry, now, how)
        for hook in self._hear.finished:
            hook(entry, now, how)

    def wasted(self, tokens: int) -> None:
        """A request left while a step with these tokens of its own was in flight."""
        for observer in self._observers:
            if isinstance(observer, LiveObserver):
                observer.wasted(tokens, self.now)

    # -- one step -------------------------------------------------------------------------------

    def begin(self, kv_free: int, kv_short: bool = False) -> Plan | None:
        """The plan for the step composed now; None when no policy decides."""
        now, ledger = self.now, self.ledger
        if self._flights:
            self._composing = newest = self._flights[-1]
            if not newest.booked:
                self._book(newest, now)
        ledger.now, ledger.kv_free = now, kv_free
        if self.policy is None or self.fallen is not None:
            return None
        if now >= self._watchdog.next_look:
            starving = self._watchdog.look(ledger, now)
            if starving:
                self.fall(starving)
                return None
        if self._rescue and ledger.decoding:
            self._rescue -= 1
            if self.plan is not RESCUE:
                self._enforce(RESCUE)
        elif self.lease.ended or kv_short or now >= self.lease.time:
            self._rescue = 0
            self._ask()
        return self.plan

    def ran(self, chunks: tuple[Chunk, ...], decodes: int, who: Callable[[], Iterable[int]]) -> Flight | None:
        """The engine composed this step: these pieces of prompts and that many decodes (`who`, if asked).

        The truth may be less than the plan. None: the step is empty.
        """
        ledger, plan = self.ledger, self.plan
        if not decodes and not chunks:
            self._composing = None
            self._nothing_ran()
            return None
        if decodes and decodes != ledger.rolling:
            self._match(frozenset(who()))
        context = ledger.context + decodes if decodes else 0
        flight = Flight(
            ledger.now, decodes, context, chunks, plan is None or isinstance(plan.decode, Decodes)
        )
        self.counts[flight.kind] += 1
        self._flights.append(flight)
        self._composing = None
        return flight

    def done(self, flight: Flight, kv: int) -> None:
        """Its tokens are known, now; `kv` tokens of KV are held."""
        end, chunks = self.now, flight.chunks
        start = max(flight.start, self._last_end)
        self._last_end = end
        self._flights.remove(flight)
        prefill = behind = 0
        for chunk in chunks:
            prefill += chunk.tokens
            behind += chunk.behind
        steps = Steps(start, [end], flight.decodes, flight.context, prefill, behind, kv)
        if self._tell.stepped:
            self._to_policy(self._tell.stepped, steps)
        for hook in self._hear.stepped:
            hook(steps)
        if flight.booked:
            for name, entry, when in flight.later:
                for hook in getattr(self._hear, name):
                    hook(entry, end if when is None else when)
        else:
            self._book(flight, end)

    # -- the parts of a step ----------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the policy for a plan, check it, and put it into force."""
        policy, ledger = self.policy, self.ledger
        assert policy is not None
        try:
            plan = policy.plan(ledger)
            faults = check(plan, ledger) if isinstance(plan, Plan) else [f"{plan!r} is not a Plan"]
            gauges = policy.gauges() if self._hear.planned and not faults else {}
        except Exception as error:
            self.fall(told(error))
            return
        if faults:
            self.fall(f"planned nonsense: {'; '.join(faults)}")
            return
        self.lease.begin(plan.until)
        for id in plan.evict:
            self._evict(ledger.known(id))
        self._enforce(plan)
        for hook in self._hear.planned:
            hook(plan, ledger.now, gauges)

    def _enforce(self, plan: Plan) -> None:
        """Hold and resume decodes as the plan says; a plan for none of them only stops the tick."""
        self.plan = plan
        decode, ledger = plan.decode, self.ledger
        if decode is NONE or (decode is ALL and not ledger.held):
            return
        self._roll(ledger.decoding if isinstance(decode, Decodes) else decode)

    def _match(self, ran: frozenset[int]) -> None:
        """Other decodes ran than the ledger thinks: those that did roll, the others are held."""
        self._roll(ran)

    def _roll(self, chosen: Iterable[int]) -> None:
        """These decodes, and no others, get a token in each step."""
        ledger = self.ledger
        ids = chosen if isinstance(chosen, frozenset | dict) else frozenset(chosen)
        for entry in [held for held in ledger.held.values() if held.id in ids]:
            ledger.resume(entry)
            self._call("resumed", entry, ledger.now)
        if ledger.rolling == len(ids):
            return
        for entry in [each for each in ledger.decoding.values() if each.rolls and each.id not in ids]:
            ledger.hold(entry)
            self._call("held", entry, ledger.now)

    def _book(self, flight: Flight, now: float) -> None:
        """The ledger shows what the step did: tokens, and prompts that are complete."""
        ledger = self.ledger
        flight.booked = True
        if flight.decodes:
            ledger.ticks(1, now)
        self.lease.ran(1, now)
        when = None if self._composing is flight else now
        for chunk in flight.chunks:
            entry = chunk.entry
            if entry.id not in ledger.prefilling:  # it left meanwhile
                continue
            entry.todo = chunk.left
            if chunk.left:
                continue
            ledger.join(entry, now, flight.rolls)
            self.lease.prefill()
            self._call("prefilled", entry, when)
            if not flight.rolls:
                self._call("held", entry, when)

    def _nothing_ran(self) -> None:
        """The step is empty: whatever the plan was, it must be made anew; decodes must not wait for nothing."""
        plan = self.plan
        self.counts["empty"] += 1
        self.lease.ended = True
        if plan is not None and plan.prefill and plan.decode is not ALL and self.ledger.decoding:
            self._rescue = RESCUE_STEPS
            for observer in self._observers:
                if isinstance(observer, LiveObserver):
                    observer.rescued(self.ledger.now)

    # -- who hears of it ----------------------------------------------------------------------------

    def _call(self, name: str, entry: Entry, when: float | None) -> None:
        """Tell the policy at once; observers too, or at the end of the step in flight."""
        mine = getattr(self._tell, name)
        if mine:
            self._to_policy(mine, entry, self.ledger.now if when is None else when)
        if self._composing is not None and name != "arrived":
            self._composing.later.append((name, entry, when))
            return
        for hook in getattr(self._hear, name):
            hook(entry, when)

    def _to_policy(self, hooks: Sequence[Callable[..., None]], *news: object) -> None:
        try:
            for hook in hooks:
                hook(*news)
        except Exception as error:
            self.fall(told(error))


def told(error: Exception) -> str:
    """An exception in one line, with the place it came from."""
    frame = extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} (in {frame.name}, {frame.filename}:{frame.lineno})"
