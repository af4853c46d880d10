"""Who enters first: known answers of Moore and Hodgson's rule, the late, credit, evicted requests."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.ledger import Entry, Ledger
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.methods.keep.order import ALMS, LATE, LOOSE, Job, Waiting, on_time

PROMISE = 0.5


def queue(rows, now, promise=PROMISE, slo=None):
    """A view in which these (arrival, tokens) wait, and the queue that heard of them."""
    ledger, waiting = Ledger(Limits(16_384, 64), kv_total=10**6), Waiting(promise)
    for id, (arrival, tokens) in enumerate(rows):
        entry = Entry(ledger, id, arrival, tokens, limit=100, slo=slo[id] if slo else Slo())
        ledger.arrive(entry)
        waiting.add(entry)
    ledger.now = now
    return ledger, waiting


def ids(ledger, waiting, pace):
    return [request.id for request in waiting.order(ledger, ledger.now, pace)]


def test_known_order_one_long_prompt_goes_last():
    """A ends at 80 ms, B at 480, C at 530 > 520: B goes; then C ends at 130 and D at 180."""
    rows = [(0.0, 1000), (0.010, 8000), (0.020, 1000), (0.030, 1000)]
    assert ids(*queue(rows, 0.030), 50e-6) == [0, 2, 3, 1]


def test_known_order_shortest_first_among_those_in_time():
    """Ends at 226, 415 and 562 > 500 ms: the 9,000 goes."""
    pace = (0.002 + 20e-6 * 2048) / 2048
    assert pace == pytest.approx(20.977e-6, rel=1e-4)
    rows = [(0.0, 6000), (0.0, 9000), (0.0, 7000), (0.1, 2000)]
    assert ids(*queue(rows, 0.1), pace) == [3, 0, 2, 1]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=7),
    st.integers(0, 20),
)
def test_no_other_set_has_more_in_time(rows, start):
    """Against every subset, run in the order of deadlines."""
    jobs = sorted(Job(float(due), 0.0, id, todo) for id, (todo, due) in enumerate(rows))

    def feasible(some):
        clock = float(start)
        for job in some:
            clock += job.todo
            if clock > job.deadline:
                return False
        return True

    kept = on_time(jobs, float(start), 1.0)
    assert feasible([job for job in jobs if job.id in kept])
    best = max(size for size in range(len(jobs) + 1) for some in combinations(jobs, size) if feasible(some))
    assert len(kept) == best


def test_the_oldest_late_one_goes_first_while_there_is_credit():
    rows = [(0.0, 3000), (2.9, 100), (2.95, 200)]
    ledger, waiting = queue(rows, 3.0)
    assert ids(ledger, waiting, 20e-6) == [1, 2, 0]
    other = Entry(ledger, 9, 2.99, int(100 / ALMS), limit=10)
    waiting.admitted(other, 3.0)  # credits 100 tokens
    assert ids(ledger, waiting, 20e-6) == [0, 1, 2]
    late = ledger.waiting[0]
    ledger.admit(late)
    waiting.drop(late)
    waiting.admitted(late, 3.0)  # 2,600 tokens of debt
    assert ids(ledger, waiting, 20e-6) == [1, 2]


def test_nobody_is_favoured_before_several_promises_have_passed():
    ledger, waiting = queue([(0.0, 3000), (1.9, 100)], LATE * PROMISE - 0.01)
    waiting.admitted(Entry(ledger, 9, 1.99, 5000, limit=10), 2.0)
    assert ids(ledger, waiting, 20e-6) == [1, 0]
    ledger.now = LATE * PROMISE
    assert ids(ledger, waiting, 20e-6) == [0, 1]


def test_evicted_requests_come_before_all_others():
    ledger, waiting = queue([(0.0, 3000), (0.1, 100)], 0.2)
    entry = ledger.waiting[0]
    ledger.admit(entry)
    waiting.drop(entry)
    ledger.evict(entry)
    assert ids(ledger, waiting, 20e-6) == [0, 1]


def test_without_a_promise_of_a_first_token_it_is_the_order_of_arrival():
    ledger, waiting = queue([(0.0, 3000), (0.1, 100)], 0.2, promise=None)
    assert ids(ledger, waiting, 20e-6) == [0, 1]


def test_requests_without_a_promise_stand_behind_those_who_have_one_and_are_not_late():
    slo = [Slo(), Slo(first_token=0.3), Slo(first_token=0.3)]
    ledger, waiting = queue([(0.0, 100_000), (0.1, 5000), (0.1, 3000)], 0.2, promise=None, slo=slo)
    assert ids(ledger, waiting, 20e-6) == [2, 1, 0]
    ledger.now = LOOSE + 1
    assert ids(ledger, waiting, 20e-6) == [2, 1, 0]
