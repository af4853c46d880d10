"""Who enters first: known answers of Moore and Hodgson's rule, the late, credit, evicted requests."""

from __future__ import annotations

from itertools import combinations, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.ledger import Entry, Ledger
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.methods.keep.order import (
    ALMS,
    LATE,
    REST,
    SETTLED,
    Waiting,
    WaitingPrompt,
    in_time,
    on_time,
)

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


def ids(ledger, waiting, pace, step=0.0):
    """In which order they enter, where steps take no time but for their tokens."""
    waiting.settle(ledger.waiting, ledger.now, pace, step)
    return [request.id for request, _ in waiting.order(ledger)]


def test_known_order_one_long_prompt_goes_last():
    """A ends at 80 ms, B at 480, C at 530 > 520: B goes; then C ends at 130 and D at 180."""
    rows = [(0.0, 1000), (0.010, 8000), (0.020, 1000), (0.030, 1000)]
    assert ids(*queue(rows, 0.030), 50e-6) == [0, 2, 3, 1]


def test_known_order_the_earliest_deadline_first_among_those_in_time():
    """Ends at 226, 415 and 562 > 500 ms: the 9,000 goes."""
    pace = (0.002 + 20e-6 * 2048) / 2048
    assert pace == pytest.approx(20.977e-6, rel=1e-4)
    rows = [(0.0, 6000), (0.0, 9000), (0.0, 7000), (0.1, 2000)]
    assert ids(*queue(rows, 0.1), pace) == [0, 2, 3, 1]


def test_a_first_token_comes_half_a_step_after_its_prompt():
    """In 0.5 s 5,000 tokens of 100 us: three of 1,600. Steps of 0.1 s leave time for 4,500, so for two."""
    rows = [(0.0, 1600), (0.0, 1600), (0.0, 1600)]
    assert ids(*queue(rows, 0.0), 100e-6) == [0, 1, 2]
    ledger, waiting = queue(rows, 0.0)
    assert ids(ledger, waiting, 100e-6, step=0.1) == [1, 2, 0]
    assert waiting.left_out(ledger.waiting) == (0,)


def test_a_prompt_alone_has_no_step_to_share():
    """4,900 tokens take 0.49 of 0.5 s."""
    ledger, waiting = queue([(0.0, 4900)], 0.0)
    assert ids(ledger, waiting, 100e-6, step=0.1) == [0]
    assert waiting.left_out(ledger.waiting) == ()


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=7),
    st.integers(0, 20),
)
def test_no_other_set_has_more_in_time(rows, start):
    """Against every subset, run in the order of deadlines."""
    jobs = sorted(WaitingPrompt(float(due), 0.0, id, todo) for id, (todo, due) in enumerate(rows))

    def feasible(some):
        clock = float(start)
        for job in some:
            clock += job.todo
            if clock > job.deadline:
                return False
        return True

    kept, looked = on_time(jobs, float(start), 1.0)
    assert looked == jobs
    assert feasible([job for job in jobs if job.id in kept])
    best = max(size for size in range(len(jobs) + 1) for some in combinations(jobs, size) if feasible(some))
    assert len(kept) == best


def test_no_more_jobs_are_looked_at_than_needed():
    """A queue of any length costs a plan as much, also where some were left out."""
    ledger, waiting = queue([(0.0, 20_000)] + [(0.0, 1)] * 5000, 0.0)
    read = []
    waiting.settle(ledger.waiting, 0.0, 50e-6, 0.0)
    assert waiting.left_out(ledger.waiting) == (0,)

    class Counted(list):
        def __iter__(self):
            for job in super().__iter__():
                read.append(job)
                yield job

    waiting._in = Counted(waiting._in)
    waiting.settle(ledger.waiting, 0.0, 50e-6, 0.0)
    assert 0 < len(read) <= SETTLED + 2


def test_no_more_jobs_are_read_where_weights_differ_and_many_are_left_out():
    """Forty long ones are due before 5,000 short ones; then those in time go by worth."""
    slo = [Slo(first_token=0.4)] * 40 + [Slo(weight=10.0)] * 5000
    ledger, waiting = queue([(0.0, 7000)] * 40 + [(0.0, 1)] * 5000, 0.0, slo=slo)
    read = []

    class Counted(list):
        def __iter__(self):
            for job in super().__iter__():
                read.append(job)
                yield job

        def __getitem__(self, places):
            found = super().__getitem__(places)
            read.extend(found if isinstance(places, slice) else [found])
            return found

    jobs = waiting._in = Counted(waiting._in)
    waiting.settle(ledger.waiting, 0.0, 50e-6, 0.0)
    assert len(waiting.left_out(ledger.waiting)) == 39
    assert [request.id for request, _ in islice(waiting.order(ledger), 3)] == [40, 41, 42]
    assert waiting._in is jobs
    assert 0 < len(read) <= 10 * SETTLED


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


@pytest.mark.parametrize("sorted_by_priority", [False, True])
@pytest.mark.parametrize("promise", [PROMISE, None])
def test_evicted_requests_come_before_all_others(promise, sorted_by_priority):
    """The newest first. vLLM may show them behind more urgent ones."""
    ledger, waiting = queue([(0.0, 3000), (0.05, 400), (0.1, 100)], 0.2, promise)
    for entry in [ledger.waiting[0], ledger.waiting[1]]:
        ledger.admit(entry)
        waiting.drop(entry)
        ledger.evict(entry)
        waiting.add(entry)
    if sorted_by_priority:
        ledger.waiting.move_to_end(2, last=False)
    assert ids(ledger, waiting, 20e-6) == [1, 0, 2]
    assert len(waiting) == 3
    waiting.drop(ledger.waiting[0])
    ledger.leave(ledger.waiting[0])
    assert ids(ledger, waiting, 20e-6) == [1, 2]


def test_without_a_promise_of_a_first_token_it_is_the_order_of_arrival():
    ledger, waiting = queue([(0.0, 3000), (0.1, 100)], 0.2, promise=None)
    assert ids(ledger, waiting, 20e-6) == [0, 1]


def test_requests_without_a_promise_stand_behind_all_that_have_one_also_behind_the_late():
    """The shortest of all has none, and came first."""
    slo = [Slo(), Slo(first_token=0.3), Slo(first_token=0.3)]
    ledger, waiting = queue([(0.0, 100), (0.1, 5000), (0.1, 3000)], 0.2, promise=None, slo=slo)
    assert ids(ledger, waiting, 20e-6) == [1, 2, 0]  # both in time, by deadline
    ledger.now = 1.0
    assert ids(ledger, waiting, 20e-6) == [2, 1, 0]  # both late, the shortest first
    assert [fills for _, fills in waiting.order(ledger)] == [False, False, True]


def test_without_a_promise_the_most_urgent_goes_first():
    ledger, waiting = queue([(0.0, 10), (0.1, 10), (0.2, 10)], 0.3, promise=None)
    for id, priority in enumerate((10**400, -(10**400), 1)):
        entry = ledger.waiting[id]
        waiting.drop(entry)
        entry.priority = priority
        waiting.add(entry)
    assert ids(ledger, waiting, 20e-6) == [1, 2, 0]


def test_a_deadline_before_its_own_keeps_no_credit_from_a_request_that_has_waited_long():
    """The first is due at 30 s and has waited long at 90; the second at 45.5 and 47 s."""
    slo = [Slo(first_token=20.0), Slo(first_token=0.5)]
    ledger, waiting = queue([(10.0, 700), (45.0, 800)], 46.9, promise=None, slo=slo)
    waiting.admitted(Entry(ledger, 9, 46.8, 5000, limit=10, slo=Slo(first_token=0.5)), 46.9)
    assert ids(ledger, waiting, 20e-6) == [0, 1]
    ledger.now = 47.0
    assert ids(ledger, waiting, 20e-6) == [1, 0]


def test_a_fiftieth_goes_to_the_oldest_without_a_promise():
    slo = [Slo(first_token=0.5), Slo(), Slo()]
    ledger, waiting = queue([(39.9, 700), (0.2, 300), (0.1, 900)], 40.1, promise=None, slo=slo)
    ledger.waiting.move_to_end(1)
    waiting.drop(ledger.waiting[1])
    waiting.add(ledger.waiting[1])
    chat = Entry(ledger, 9, 40.0, 1000, limit=10, slo=Slo(first_token=0.5))
    assert ids(ledger, waiting, 20e-6) == [0, 2, 1]
    waiting.admitted(chat, 40.1)  # credits 20 tokens
    assert ids(ledger, waiting, 20e-6) == [2, 0, 1]
    ledger.now = 40.0
    assert ids(ledger, waiting, 20e-6) == [0, 2, 1], "it has not waited long"
    ledger.now = 41.0
    old = ledger.waiting[2]
    ledger.admit(old)
    waiting.drop(old)
    waiting.admitted(old, 41.0)  # 880 tokens are owed: 44 requests of 1,000
    for _ in range(44):
        assert ids(ledger, waiting, 20e-6) == [0, 1]
        waiting.admitted(chat, 41.0)
    waiting.admitted(chat, 41.0)
    assert ids(ledger, waiting, 20e-6) == [1, 0]


def test_after_a_time_of_plenty_no_more_is_owed_than_one_prompt():
    """For hours the others left much to them; a fiftieth of what enters must be theirs again soon."""
    ledger, waiting = queue([(0.0, 3000)], 100.0, promise=None)
    for id in range(1000):
        waiting.admitted(Entry(ledger, 100 + id, 0.0, 10_000, limit=10), 100.0)
    promised = Entry(ledger, 9, 99.9, 10_000, limit=10, slo=Slo(first_token=0.5))
    entered = 0
    while [fills for _, fills in waiting.order(ledger)] == [True]:
        waiting.admitted(promised, 100.0)
        entered += promised.todo
    assert entered == pytest.approx(10_000 / REST, rel=0.05)


def test_left_out_comes_back_when_there_is_time_for_it_and_never_after_its_deadline():
    ledger, waiting = queue([(0.0, 3000), (0.0, 4000)], 0.0)
    assert ids(ledger, waiting, 100e-6) == [0, 1]
    assert waiting.left_out(ledger.waiting) == (1,)
    assert ids(ledger, waiting, 50e-6) == [0, 1]
    assert waiting.left_out(ledger.waiting) == ()
    ledger.now = 0.45
    assert ids(ledger, waiting, 50e-6) == [0, 1]
    assert waiting.left_out(ledger.waiting) == (0, 1)
    ledger.now = PROMISE + 0.001
    ids(ledger, waiting, 50e-6)
    ids(ledger, waiting, 1e-9)
    assert waiting.left_out(ledger.waiting) == (0, 1)


def test_late_by_a_forecast_comes_back_when_the_forecast_does_not_hold():
    """A long prompt would have kept the engine busy for 5 s, and was aborted."""
    ledger, waiting = queue([(0.0, 100)] * 5, 0.0, promise=2.0)
    waiting.settle(ledger.waiting, 5.0, 20e-6, 0.0)
    assert len(waiting.left_out(ledger.waiting)) == 5
    waiting.drop(ledger.waiting[4])
    waiting.settle(ledger.waiting, 0.1, 20e-6, 0.0)
    assert waiting.left_out(ledger.waiting) == ()
    waiting.settle(ledger.waiting, 3.0, 20e-6, 0.0)
    assert waiting.left_out(ledger.waiting) == (0, 1, 2, 3)


def test_a_prompt_that_the_cache_made_shorter_is_looked_at_again():
    ledger, waiting = queue([(0.0, 4000), (0.0, 4500)], 0.0)
    ids(ledger, waiting, 100e-6)
    assert waiting.left_out(ledger.waiting) == (1,)
    ledger.waiting[1].todo = 500
    ids(ledger, waiting, 100e-6)
    assert waiting.left_out(ledger.waiting) == ()
    waiting.drop(ledger.waiting[1])
    assert len(waiting) == 1


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.sampled_from([None, 5.0, 20.0, 60.0])),
        min_size=1,
        max_size=60,
    ),
    looks=st.lists(st.tuples(st.integers(0, 80), st.sampled_from([0.2, 1.0, 3.0])), min_size=1, max_size=4),
    gone=st.sets(st.integers(0, 59)),
)
def test_looked_at_again_it_is_the_same_and_every_request_has_one_place(rows, looks, gone):
    """Also where more are left out than a plan tries, and some leave in between."""
    slo = [Slo(first_token=promise) for _, _, promise in rows]
    ledger, waiting = queue([row[:2] for row in rows], 0.0, promise=None, slo=slo)
    clock = 0
    for later, pace in looks:
        clock += later
        ledger.now = float(clock)
        waiting.settle(ledger.waiting, ledger.now + 30 * pace, pace, 2.0)  # a forecast that does not hold
        first = ids(ledger, waiting, pace, step=2.0)
        assert ids(ledger, waiting, pace, step=2.0) == first
        assert sorted(first) == sorted(ledger.waiting)
        for id in sorted(gone & set(ledger.waiting))[: len(gone) // 2]:
            waiting.drop(ledger.waiting[id])
            ledger.leave(ledger.waiting[id])
    assert len(waiting) == len(ledger.waiting)


# -- weights and tenants


def job(id, todo, due, weight=1.0, tenant=""):
    return WaitingPrompt(float(due), 0.0, id, todo, weight, tenant)


def kept(*jobs, ahead=frozenset()):
    return on_time(sorted(jobs), 0.0, 1.0, ahead)[0]


def test_equal_weights_are_moore_and_hodgson():
    """Ends at 2, 8, 10 > 9: the 6 leaves; then at 4 and 6."""
    rows = [(0, 2, 7), (1, 6, 8), (2, 2, 9), (3, 2, 10)]
    for weight in (1.0, 0.3, 1e6):
        assert kept(*(job(*row, weight) for row in rows)) == {0, 2, 3}


def test_the_least_worth_a_token_leaves():
    """Both end at 6 > 5; 1/2 a token against 10/4. Without weights the longer one would leave."""
    assert kept(job(0, 2, 4), job(1, 4, 5, 10)) == {1}
    assert kept(job(0, 2, 4), job(1, 4, 5)) == {0}


def test_one_that_left_in_vain_comes_back():
    """12 > 8: 0.5 and 0.6 a token leave, the clock is at 6; the prompt of 5 does not fit, that of 1 does."""
    assert kept(job(0, 1, 7, 0.5), job(1, 5, 7.5, 3), job(2, 6, 8, 60)) == {0, 2}


def test_a_long_gold_prompt_gives_way_to_ten_short_free_ones():
    """A gold one of 100 tokens worth 10 against ten of 9 tokens worth 1: 0.1 against 0.11 a token."""
    free = [job(id, 9, 100) for id in range(1, 11)]
    assert kept(job(0, 100, 100, 10), *free) == {*range(1, 11)}
    assert kept(job(0, 100, 100, 12), *free) == {0}


def test_one_short_free_prompt_leaves_and_not_a_long_gold_one():
    """100 + 8,000 > 8,051: the gold one is worth less a token, but in time without the free one."""
    free, gold = job(0, 100, 8050), job(1, 8000, 8051, 10)
    assert kept(free, gold) == {1}
    assert kept(free, gold._replace(deadline=7999.0)) == {0}
    # 40 tokens too many: of the free ones only that of 50 will do, and the gold one stays.
    assert kept(job(0, 50, 1000, 1), job(1, 30, 1000, 1), job(2, 960, 1000, 10)) == {1, 2}
    # Fifty short ones are worth more than the gold one, though each alone is worth less.
    many = [job(id, 2, 101) for id in range(1, 51)]
    assert kept(job(0, 100, 100, 10), *many) == {*range(1, 51)}
    assert kept(job(0, 100, 100, 10), *many[:9]) == {0}


def test_a_tenant_that_is_ahead_is_late_before_others():
    """Time for 5 tokens by 5: the shorter would stay, but its tenant is ahead."""
    two = job(0, 2, 5, tenant="a"), job(1, 5, 5, tenant="b")
    assert kept(*two) == {0}
    assert kept(*two, ahead=frozenset("a")) == {1}


def best_worth(jobs):
    """Lawler and Moore's dynamic program: the most that any set in time is worth."""
    worth_at = {0: 0.0}
    for one in jobs:
        for end, worth in [*worth_at.items()]:
            end += one.todo
            if end <= one.deadline and worth_at.get(end, -1.0) < worth + one.weight:
                worth_at[end] = worth + one.weight
    return max(worth_at.values())


@pytest.mark.parametrize(
    ("load", "mean", "worst"), [(1.1, 0.997, 0.85), (1.5, 0.99, 0.85), (3.0, 0.985, 0.8)]
)
def test_the_greedy_is_near_the_optimum(load, mean, worst):
    """200 sets of 20 prompts, weights 1 and 10; with equal weights it is the optimum."""
    rng, shares = np.random.default_rng(0), []
    for _ in range(200):
        todo = np.maximum(1, rng.lognormal(3, 1, 20).astype(int)).tolist()
        due = rng.uniform(0.2, 1, 20) * sum(todo) / load
        for weights in (rng.choice([1.0, 10.0], 20), np.ones(20)):
            jobs = sorted(job(id, todo[id], due[id], float(weights[id])) for id in range(20))
            chosen = kept(*jobs)
            assert in_time([one for one in jobs if one.id in chosen], 0.0, 1.0)
            shares.append(sum(one.weight for one in jobs if one.id in chosen) / best_worth(jobs))
    assert shares[1::2] == [1.0] * 200
    assert np.mean(shares[::2]) > mean
    assert min(shares[::2]) > worst


def test_of_those_in_time_the_worthiest_goes_first_while_others_are_late():
    """Both in time: by deadline. A third that is not, and the one worth most a token goes first."""
    slo = [Slo(first_token=1.0, weight=1.0), Slo(first_token=2.0, weight=10.0), Slo(first_token=0.01)]
    ledger, waiting = queue([(0.0, 500), (0.0, 600), (0.0, 9000)], 0.0, slo=slo)
    waiting.drop(ledger.waiting[2])
    assert ids(ledger, waiting, 20e-6) == [0, 1]
    waiting.add(ledger.waiting[2])
    assert ids(ledger, waiting, 20e-6) == [1, 0, 2]


@pytest.mark.parametrize("weight", [0.001, 10.0])
def test_one_weight_for_all_changes_nothing(weight):
    """Those in time go by deadline, though another is late; once a weight differs they do not."""
    slo = [Slo(first_token=due, weight=weight) for due in (1.0, 2.0, 0.01)] + [Slo(first_token=3.0)]
    ledger, waiting = queue([(0.0, 500), (0.0, 400), (0.0, 9000), (0.0, 10**5)], 0.0, slo=slo)
    assert ids(ledger, waiting, 20e-6)[:2] == ([1, 0] if weight > 1 else [3, 1])
    waiting.drop(ledger.waiting[3])
    ledger.leave(ledger.waiting[3])
    assert ids(ledger, waiting, 20e-6) == [0, 1, 2]


def test_the_late_go_by_worth_a_token():
    slo = [Slo(weight=1.0), Slo(weight=10.0), Slo(), Slo()]
    ledger, waiting = queue([(0.0, 100), (0.0, 900), (0.0, 80), (0.0, 200)], 1.0, slo=slo)
    for id, priority in ((2, 1), (3, -1)):  # 0.1 and 10 where no weight is given
        waiting.drop(ledger.waiting[id])
        ledger.waiting[id].priority = priority
        waiting.add(ledger.waiting[id])
    assert ids(ledger, waiting, 20e-6) == [3, 1, 0, 2]


def test_background_is_promised_nothing():
    """Whatever is promised to requests without a promise of their own; and it is never left out."""
    ledger, waiting = queue([(0.0, 100), (0.0, 90)], 9.0, slo=[Slo(background=True), Slo()])
    assert ids(ledger, waiting, 20e-6) == [1, 0]
    assert waiting.left_out(ledger.waiting) == (1,)


def test_without_a_promise_the_tenant_served_least_goes_first():
    ledger, waiting = Ledger(Limits(16_384, 64), kv_total=10**6), Waiting(None)
    for id, tenant in enumerate(["flood"] * 4 + ["good"] * 2):
        entry = Entry(ledger, id, 0.1 * id, 100, limit=10, tenant=tenant)
        ledger.arrive(entry)
        waiting.tenants.arrived(entry)
        waiting.add(entry)
    assert ids(ledger, waiting, 20e-6) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize("due", [20.0, 0.5])  # in time or left out; late
def test_when_another_tenant_gets_ahead_those_left_out_are_ranked_again(due):
    """a is served 25,000 tokens, and b is first; then b is served 50,000, and a is first."""
    ledger, waiting = Ledger(Limits(16_384, 64), kv_total=10**6), Waiting(None)
    entries = []
    for id in range(120):
        slo, tenant = Slo(first_token=due), "a" if id % 2 else "b"
        entries.append(Entry(ledger, id, 0.0, 1000, limit=10, slo=slo, guess=0, tenant=tenant))
        ledger.arrive(entries[-1])
        waiting.tenants.arrived(entries[-1])
        waiting.add(entries[-1])
    ledger.now = 1.0
    ids(ledger, waiting, 1e-3)
    for served, first in ((entries[1:51:2], "b"), (entries[0:100:2], "a")):
        for entry in served:
            ledger.admit(entry)
            waiting.drop(entry)
            waiting.tenants.admitted(entry)
        order = ids(ledger, waiting, 1e-3)
        behind = [entries[id].tenant != first for id in order]
        assert behind == sorted(behind)
        assert sorted(order) == sorted(ledger.waiting)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 90), st.sampled_from([0.5, 1.0, 10.0])), max_size=60
    ),
    pace=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_with_weights_looked_at_again_it_is_the_same(rows, pace):
    slo = [Slo(first_token=float(due), weight=weight) for _, due, weight in rows]
    ledger, waiting = queue([(0.0, todo) for todo, _, _ in rows], 0.0, promise=None, slo=slo)
    waiting.settle(ledger.waiting, 30 * pace, pace, 2.0)
    first = ids(ledger, waiting, pace)
    chosen = list(waiting._in)
    assert ids(ledger, waiting, pace) == first
    assert sorted(first) == sorted(ledger.waiting)
    assert in_time(chosen, 0.0, pace)
