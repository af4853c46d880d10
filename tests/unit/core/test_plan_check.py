"""check(): every fault is found and named, sensible plans pass; and the counters of a lease."""

from __future__ import annotations

from math import inf

import pytest

from headgate.core.ledger import Entry, Ledger
from headgate.core.plan import ALL, EACH_STEP, NONE, Lease, Plan, Until, check
from headgate.core.view import Limits


@pytest.fixture
def view() -> Ledger:
    """At 10 s: 0 and 1 decode, 2 and 3 are half done, 4 and 5 wait."""
    return make()


def make(width: int = 1) -> Ledger:
    ledger = Ledger(Limits(batch_tokens=64, running=8, decode_width=width), kv_total=1000)
    ledger.now = 10.0
    for id in range(6):
        entry = Entry(ledger, id, arrival=float(id), prompt=10, limit=100)
        ledger.arrive(entry)
        if id < 4:
            ledger.admit(entry)
        if id < 2:
            entry.todo = 0
            ledger.join(entry, 10.0, rolling=True)
    return ledger


SENSIBLE = {
    "decode": Plan(ALL),
    "nothing": Plan(NONE),
    "nobody by name": Plan(frozenset()),
    "by name": Plan(frozenset({1})),
    "everybody by name": Plan(frozenset({0, 1})),
    "half-done, then new": Plan(ALL, (3, 2, 5, 4)),
    "only new": Plan(ALL, (5,)),
    "budget just enough": Plan(ALL, budget=2),
    "no decode needs no budget": Plan(NONE, budget=0),
    "one token for a prompt": Plan(NONE, (2,), budget=1, chunk=1),
    "decodes fill the budget, prompts wait": Plan(ALL, (2,), budget=2),
    "evict": Plan(ALL, evict=(0, 3)),
    "evict and prefill again": Plan(ALL, (2, 0), evict=(0,)),
    "evict one, decode the other": Plan(frozenset({1}), evict=(0,)),
    "long lease": Plan(ALL, until=Until(steps=1, time=10.001, arrivals=1, prefills=1, finishes=1)),
    "endless lease": Plan(ALL, until=Until()),
}

FAULTY = {
    "decodes a half-done prompt": (Plan(frozenset({0, 2})), ["decodes requests that are not decoding: 2"]),
    "decodes who waits or is unknown": (
        Plan(frozenset({9, 4})),
        ["decodes requests that are not decoding: 4, 9"],
    ),
    "budget below all decodes": (Plan(ALL, budget=1), ["budget 1, chunk inf: too small for 2 decodes"]),
    "budget below named decodes": (Plan(frozenset({0, 1}), budget=1), ["too small for 2 decodes"]),
    "no budget for prompts": (Plan(NONE, (2,), budget=0), ["budget 0, chunk inf: too small for 0 decodes"]),
    "no chunk": (Plan(ALL, (2,), chunk=0), ["budget inf, chunk 0: too small"]),
    "budget that is no number": (Plan(ALL, budget=float("nan")), ["budget nan, chunk inf: too small"]),
    "chunk that is no number": (Plan(ALL, (2,), chunk=float("nan")), ["budget inf, chunk nan: too small"]),
    "negative budget": (Plan(NONE, budget=-1), ["too small for 0 decodes"]),
    "prefills a decode": (Plan(ALL, (1,)), ["prefills requests that have no prompt to run: 1"]),
    "prefills a stranger": (Plan(ALL, (2, 77)), ["prefills requests that have no prompt to run: 77"]),
    "new before half-done": (Plan(ALL, (2, 4, 3)), ["new prompt 4 before half-done prompt 3"]),
    "evicted counts as new": (Plan(ALL, (0, 2), evict=(0,)), ["new prompt 0 before half-done prompt 2"]),
    "evicted half-done counts as new": (
        Plan(ALL, (3, 2), evict=(3,)),
        ["new prompt 3 before half-done prompt 2"],
    ),
    "twice": (Plan(ALL, (2, 4, 4)), ["names a prompt twice"]),
    "half-done twice": (Plan(ALL, (2, 2)), ["names a prompt twice"]),
    "evicts who waits": (Plan(ALL, evict=(4,)), ["evicts requests that hold no KV: 4"]),
    "evicts a stranger": (Plan(ALL, evict=(0, 50)), ["evicts requests that hold no KV: 50"]),
    "evicts twice": (Plan(ALL, evict=(0, 0)), ["evicts a request twice"]),
    "decodes and evicts": (Plan(frozenset({0}), evict=(0,)), ["decodes a request that it evicts"]),
    "no steps": (Plan(until=Until(steps=0)), ["the lease is empty"]),
    "half a step": (Plan(until=Until(steps=0.5)), ["the lease is empty"]),
    "no arrivals": (Plan(until=Until(arrivals=0)), ["the lease is empty"]),
    "no prompts": (Plan(until=Until(prefills=0)), ["the lease is empty"]),
    "no finishes": (Plan(until=Until(finishes=-1)), ["the lease is empty"]),
    "ended before it began": (
        Plan(until=Until(time=10.0)),
        ["the lease ended in the past: until 10.0"],
    ),
    "all at once": (
        Plan(frozenset({4}), (1,), budget=0, evict=(5,), until=Until(steps=0)),
        ["not decoding: 4", "too small", "no prompt to run: 1", "hold no KV: 5", "the lease is empty"],
    ),
}


@pytest.mark.parametrize("name", SENSIBLE)
def test_sensible_plans_pass(view, name):
    assert check(SENSIBLE[name], view) == []


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_is_found_and_named(view, name):
    plan, wanted = FAULTY[name]
    found = check(plan, view)
    assert len(found) == len(wanted)
    for text, fault in zip(wanted, found, strict=True):
        assert text in fault.replace("[", "").replace("]", "")


def test_speculation_makes_decodes_wider():
    assert check(Plan(ALL, budget=8), make(width=4)) == []
    assert "too small for 2 decodes" in check(Plan(ALL, budget=7), make(width=4))[0]


def test_checking_changes_nothing(view):
    for plan, _ in FAULTY.values():
        check(plan, view)
    assert ([*view.decoding], [*view.prefilling], [*view.waiting]) == ([0, 1], [2, 3], [4, 5])


# -- leases ------------------------------------------------------------------------------------------


def test_a_new_lease_has_ended_so_that_the_policy_is_asked():
    assert Lease().ended


@pytest.mark.parametrize(
    ("until", "event"),
    [
        (Until(arrivals=3), Lease.arrival),
        (Until(prefills=3), Lease.prefill),
        (Until(finishes=3), Lease.finish),
        (Until(steps=3), lambda lease: lease.ran(1, 0.0)),
    ],
)
def test_each_counter_ends_the_lease_by_itself(until, event):
    lease = Lease()
    lease.begin(until)
    event(lease)
    event(lease)
    assert not lease.ended
    event(lease)
    assert lease.ended
    lease.begin(until)
    assert not lease.ended


def test_other_events_do_not_count():
    lease = Lease()
    for until in (Until(), Until(arrivals=1), Until(prefills=1), Until(finishes=1), Until(steps=9)):
        lease.begin(until)
        if until.arrivals == inf:
            lease.arrival()
        if until.prefills == inf:
            lease.prefill()
        if until.finishes == inf:
            lease.finish()
        lease.ran(8, 1e9)
        assert not lease.ended


def test_steps_count_in_bulk_and_the_clock_is_looked_at():
    lease = Lease()
    lease.begin(Until(steps=10, time=5.0))
    lease.ran(9, 4.999)
    assert not lease.ended
    lease.ran(1, 4.9995)
    assert lease.ended
    lease.begin(Until(steps=10, time=5.0))
    lease.ran(1, 5.0)
    assert lease.ended


def test_by_default_a_plan_is_for_one_step():
    assert Plan().until is EACH_STEP
    lease = Lease()
    lease.begin(EACH_STEP)
    lease.ran(1, 0.1)
    assert lease.ended


def test_a_plan_in_a_message_names_few_ids():
    assert str(Plan(prefill=(1, 2, 3))) == repr(Plan(prefill=(1, 2, 3)))
    assert "prefill=[0, 1, 2, 3, 4] and 95 more, budget=inf" in str(Plan(prefill=tuple(range(100))))
