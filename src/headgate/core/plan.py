"""What a batch policy answers: Plan and Until; what is wrong with a plan; its lease while it is in force."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Final, NamedTuple

from headgate.core.build import quick
from headgate.core.ledger import Ledger


class Decodes(Enum):
    ALL = "all"  # every decode that is ready, also those that join meanwhile
    NONE = "none"  # keep their KV, give them no token


NONE: Final = Decodes.NONE
ALL: Final = Decodes.ALL


class Until(NamedTuple):
    """The plan holds until the first of these, counted from when it was made.

    Examples:
        >>> from headgate import ALL, Plan, Until
        >>> Plan(ALL, until=Until(arrivals=1, finishes=1)).until.steps  # decode until something changes
        inf
    """

    steps: float = inf  # this many steps have run
    time: float = inf  # the clock has reached this
    arrivals: float = inf  # this many requests have joined
    prefills: float = inf  # this many prompts have been completed
    finishes: float = inf  # this many requests have left (finished, aborted, abandoned)


EACH_STEP: Final = Until(steps=1)
SHOWN = 5  # ids named in a fault


class Plan(NamedTuple):
    """One step's batch, repeated until `until`.

    Examples:
        >>> from headgate import ALL, NONE, Plan
        >>> mixed = Plan(ALL, prefill=(7, 8), budget=2048)  # all decodes beside two prompts
        >>> refill = Plan(NONE, prefill=(7, 8))  # the same prompts while decodes wait
        >>> refill.decode is NONE
        True
    """

    decode: Decodes | frozenset[int] = ALL
    prefill: tuple[int, ...] = ()  # in this order, each as far as the budget goes
    budget: float = inf  # tokens per step, decodes included
    chunk: float = inf  # prefill tokens per step
    evict: tuple[int, ...] = ()  # before the first step: drop their KV, back to waiting
    until: Until = EACH_STEP
    reject: tuple[int, ...] = ()  # before the first step: turn these away, none of which has begun

    def __str__(self) -> str:
        parts = zip(self._fields, self, strict=True)
        return f"Plan({', '.join(f'{name}={_short(value)}' for name, value in parts)})"


def plan_of(
    decode: Decodes | frozenset[int], prefill: tuple[int, ...], budget: float, chunk: float, until: Until
) -> Plan:
    """A plan without evictions and rejections, made quicker than by its own constructor."""
    return quick(Plan, (decode, prefill, budget, chunk, (), until, ()))


def _short(value: object) -> str:
    if isinstance(value, tuple | frozenset) and len(value) > SHOWN:
        return _some(list(value))
    return repr(value)


def check(plan: Plan, view: Ledger) -> list[str]:
    """Every way in which `plan` makes no sense for `view`; empty when it does.

    The view is a ledger, so that compiled code reads its fields without looking them up.
    """
    decode, prefill, budget, chunk, evict, until, reject = plan
    faults: list[str] = []
    decodes = 0
    if decode is ALL:
        decodes = len(view.decoding)
    elif not isinstance(decode, Decodes):
        decodes = len(decode)
        strangers = sorted(id for id in decode if id not in view.decoding)
        faults += [f"decodes requests that are not decoding: {_some(strangers)}"] if strangers else []
    enough = decodes * view.limits.decode_width <= budget and chunk > 0  # neither holds for NaN
    if not enough or (prefill and budget <= 0):
        faults.append(f"budget {budget}, chunk {chunk}: too small for {decodes} decodes and its prompts")
    if prefill:
        faults += _bad_prompts(prefill, evict, view)
    if evict:
        faults += _bad_evictions(plan, view)
    if reject:
        faults += _bad_rejections(plan, view)
    if until is not EACH_STEP:
        steps, time, arrivals, prefills, finishes = until
        if steps < 1 or arrivals < 1 or prefills < 1 or finishes < 1:
            faults.append(f"the lease is empty: {until}")
        elif time <= view.now:
            faults.append(f"the lease ended in the past: until {time}, now {view.now}")
    return faults


def _bad_prompts(prefill: tuple[int, ...], evict: tuple[int, ...], view: Ledger) -> list[str]:
    faults: list[str] = []
    prefilling, waiting = view.prefilling, view.waiting
    strangers: list[int] = []
    new: int | None = None
    for id in prefill:
        if id in waiting or id in evict:
            new = id
        elif id not in prefilling:
            strangers.append(id)
        elif new is not None:
            faults.append(f"new prompt {new} before half-done prompt {id}")
    if strangers:
        faults.append(f"prefills requests that have no prompt to run: {_some(strangers)}")
    if len(prefill) > 1 and len(set(prefill)) != len(prefill):
        faults.append("names a prompt twice")
    return faults


def _bad_evictions(plan: Plan, view: Ledger) -> list[str]:
    faults: list[str] = []
    strangers = [id for id in plan.evict if id not in view.decoding and id not in view.prefilling]
    if strangers:
        faults.append(f"evicts requests that hold no KV: {_some(strangers)}")
    if len(set(plan.evict)) != len(plan.evict):
        faults.append("evicts a request twice")
    if isinstance(plan.decode, frozenset) and not plan.decode.isdisjoint(plan.evict):
        faults.append("decodes a request that it evicts")
    return faults


def _bad_rejections(plan: Plan, view: Ledger) -> list[str]:
    faults: list[str] = []
    begun = [id for id in plan.reject if id not in view.waiting or view.waiting[id].evictions]
    if begun:
        faults.append(f"rejects requests that have begun or are not here: {_some(begun)}")
    if len(set(plan.reject)) != len(plan.reject):
        faults.append("rejects a request twice")
    if not set(plan.reject).isdisjoint(plan.prefill):
        faults.append("prefills a request that it rejects")
    return faults


def _some(ids: list[int]) -> str:
    return str(ids) if len(ids) <= SHOWN else f"{ids[:SHOWN]} and {len(ids) - SHOWN} more"


class Lease:
    """Counts down what `Until` promised. `ended` is all a driver asks; drivers may also set it."""

    __slots__ = ("arrivals", "ended", "finishes", "prefills", "steps", "time")

    def __init__(self) -> None:
        self.steps = self.time = self.arrivals = self.prefills = self.finishes = inf
        self.ended = True

    def begin(self, until: Until) -> None:
        self.steps, self.time, self.arrivals, self.prefills, self.finishes = until
        self.ended = False

    def arrival(self) -> None:
        self.arrivals -= 1
        if self.arrivals <= 0:
            self.ended = True

    def prefill(self) -> None:
        self.prefills -= 1
        if self.prefills <= 0:
            self.ended = True

    def finish(self) -> None:
        self.finishes -= 1
        if self.finishes <= 0:
            self.ended = True

    def ran(self, steps: int, now: float) -> None:
        self.steps -= steps
        if self.steps <= 0 or now >= self.time:
            self.ended = True
