"""What a batch policy answers: Plan, Until, and check()."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Final, NamedTuple

from headgate.core.view import View


class Decodes(Enum):
    """Which decodes run, said without naming them."""

    ALL = "all"  # every decode that is ready, whoever joins or leaves meanwhile
    NONE = "none"  # keep their KV, give them no token


ALL: Final = Decodes.ALL
NONE: Final = Decodes.NONE


class Until(NamedTuple):
    """The plan holds until the first of these, counted from when it was made."""

    steps: float = inf  # this many steps have run
    time: float = inf  # the clock has reached this
    arrivals: float = inf  # this many requests have joined
    prefills: float = inf  # this many prompts have been completed
    finishes: float = inf  # this many requests have left (finished, aborted, abandoned)


EACH_STEP: Final = Until(steps=1)


class Plan(NamedTuple):
    """One step's batch, repeated until `until`."""

    decode: Decodes | frozenset[int] = ALL
    prefill: tuple[int, ...] = ()  # in this order, each as far as the budget goes
    budget: float = inf  # tokens per step, decodes included
    chunk: float = inf  # prefill tokens per step
    evict: tuple[int, ...] = ()  # before the first step: drop their KV, back to waiting
    until: Until = EACH_STEP


def check(plan: Plan, view: View) -> list[str]:
    """Every way in which `plan` makes no sense for `view`; empty when it does."""
    faults = _bad_decodes(plan, view)
    if plan.prefill:
        faults += _bad_prompts(plan, view)
    if plan.evict:
        faults += _bad_evictions(plan, view)
    if min(plan.until) <= 0 and (min(plan.until[0], *plan.until[2:]) <= 0):
        faults.append(f"a lease of nothing: {plan.until}")
    if plan.until.time <= view.now:
        faults.append(f"a lease that ended before it began: until {plan.until.time}, now {view.now}")
    if plan.chunk <= 0:
        faults.append(f"chunk {plan.chunk}: must be positive")
    return faults


def _bad_decodes(plan: Plan, view: View) -> list[str]:
    faults: list[str] = []
    count = 0
    if plan.decode is ALL:
        count = len(view.decoding)
    elif plan.decode is not NONE:
        assert isinstance(plan.decode, frozenset)
        count = len(plan.decode)
        strangers = [id for id in sorted(plan.decode) if id not in view.decoding]
        if strangers:
            faults.append(f"decodes requests that are not decoding: {strangers}")
    width = count * view.limits.decode_width
    if width > plan.budget or (plan.budget <= 0 and plan.prefill):
        faults.append(f"budget {plan.budget} below the {width} tokens of its decodes and prompts")
    return faults


def _bad_prompts(plan: Plan, view: View) -> list[str]:
    faults: list[str] = []
    evicted = set(plan.evict)
    strangers: list[int] = []
    new_seen: int | None = None
    for id in plan.prefill:
        if id in view.prefilling and id not in evicted:
            if new_seen is not None:
                faults.append(f"new prompt {new_seen} before half-done prompt {id}")
        elif id in view.waiting or id in evicted:
            new_seen = id
        else:
            strangers.append(id)
    if strangers:
        faults.append(f"prefills requests that have no prompt to run: {strangers}")
    if len(plan.prefill) > 1 and len(set(plan.prefill)) != len(plan.prefill):
        faults.append("names a prompt twice")
    return faults


def _bad_evictions(plan: Plan, view: View) -> list[str]:
    faults: list[str] = []
    strangers = [id for id in plan.evict if id not in view.decoding and id not in view.prefilling]
    if strangers:
        faults.append(f"evicts requests that hold no KV: {strangers}")
    if len(set(plan.evict)) != len(plan.evict):
        faults.append("evicts a request twice")
    if isinstance(plan.decode, frozenset) and not plan.decode.isdisjoint(plan.evict):
        faults.append("decodes a request that it evicts")
    return faults
