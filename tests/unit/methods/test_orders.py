"""Orders of waiting prompts: what each puts first, that ageing is what it says, and what it bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.request import Slo
from headgate.core.view import Limits
from headgate.methods.mixed.sarathi import Sarathi, ShortestFirst
from headgate.methods.orders import (
    MOST_TENANTS,
    QUANTUM,
    SAVED,
    ByPriority,
    EarliestDeadline,
    LeastServed,
    PromptOrder,
    ShortestPrompt,
    TenantAccounts,
    TenantQueues,
    order_of,
)
from headgate.methods.slai import Slai
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload
from worlds import Line, Log, run


def queue(order: PromptOrder, rows: list[dict], now: float = 0.0) -> list[int]:
    """The order in which these requests would enter at `now`."""
    ledger = Ledger(Limits(10**6, 100), 10**6)
    ledger.now = now
    for id, row in enumerate(rows):
        row = dict(row)
        evictions, cached = row.pop("evictions", 0), row.pop("cached", 0)
        entry = Entry(ledger, id, **{"arrival": 0.0, "prompt": 10, "limit": 100, **row})
        entry.evictions, entry.cached = evictions, cached
        if evictions:
            ledger.waiting[id] = entry
            ledger.waiting.move_to_end(id, last=False)
        else:
            order.add(entry)
            ledger.arrive(entry)
    return [request.id for request in order.waiting(ledger)]


PROMPTS = [{"prompt": p, "arrival": a} for p, a in ((50, 0.0), (20, 1.0), (20, 2.0), (5, 3.0))]


def test_by_arrival_and_shortest():
    assert queue(PromptOrder(), PROMPTS) == [0, 1, 2, 3]
    assert queue(ShortestPrompt(), PROMPTS) == [3, 1, 2, 0]


def test_what_the_cache_has_does_not_count():
    rows = [{"prompt": 20}, {"prompt": 50, "cached": 40}, {"prompt": 30, "cached": 16}]
    assert queue(ShortestPrompt(), rows) == [1, 2, 0]
    # With 0.1 s a token and 5 s promised they must start at 3.0, 4.0 and 3.6 s.
    assert queue(EarliestDeadline(5.0, 0.1), rows) == [0, 2, 1]


def test_ties_go_to_the_older_and_then_to_the_smaller_number():
    rows = [{"prompt": 7, "arrival": 1.0}, {"prompt": 7, "arrival": 0.5}, {"prompt": 7, "arrival": 0.5}]
    assert queue(ShortestPrompt(), rows) == [1, 2, 0]


def test_priority_goes_before_length():
    rows = [{"prompt": 5, "priority": 1}, {"prompt": 90, "priority": 0}, {"prompt": 40, "priority": 0}]
    assert queue(ByPriority(), rows) == [2, 1, 0]


def test_evicted_requests_stand_before_all_others():
    rows = [*PROMPTS, {"prompt": 99, "evictions": 1}, {"prompt": 98, "evictions": 2}]
    for order in (PromptOrder(), ShortestPrompt(), ByPriority(), EarliestDeadline(1.0, 0.1)):
        assert queue(order, rows)[:2] == [5, 4]


def test_whoever_leaves_the_queue_is_forgotten():
    order = ShortestPrompt()
    ledger = Ledger(Limits(100, 10), 100)
    entries = [Entry(ledger, id, 0.0, prompt=10 - id, limit=5) for id in range(4)]
    for entry in entries:
        order.add(entry)
        ledger.arrive(entry)
    order.drop(entries[2])
    order.drop(entries[2])
    assert [r.id for r in order.waiting(ledger)] == [3, 1, 0]


@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12),
    ageing=st.sampled_from([0.0, 0.5, 1.0, 8.0]),
    now=st.integers(40, 90),
)
def test_ageing_is_length_less_waiting_time_at_any_moment(rows, ageing, now):
    """By L - a * wait. Integers and powers of two, so that ties are ties."""
    rows.sort(key=lambda row: row[1])
    found = queue(ShortestPrompt(ageing), [{"prompt": p, "arrival": float(a)} for p, a in rows], float(now))
    aged = [(p - ageing * (now - a), a, id) for id, (p, a) in enumerate(rows)]
    assert found == [id for _, _, id in sorted(aged)]


def test_deadlines_latest_start_first_and_the_late_behind():
    """Promises of 1 s and 5 s, prompts at 0.01 s a token; at 2 s the first two can no longer make it."""
    rows = [
        {"prompt": 50, "arrival": 0.0, "slo": Slo(1.0)},  # must start at 0.5
        {"prompt": 10, "arrival": 0.5, "slo": Slo(1.0)},  # 1.4
        {"prompt": 100, "arrival": 0.0, "slo": Slo(5.0)},  # 4.0
        {"prompt": 40, "arrival": 1.9, "slo": Slo(1.0)},  # 2.5
        {"prompt": 30, "arrival": 1.9},  # promised nothing: 3 s, so 4.6
    ]
    assert queue(EarliestDeadline(3.0, 0.01), rows, now=0.0) == [0, 1, 3, 2, 4]
    assert queue(EarliestDeadline(3.0, 0.01), rows, now=1.0) == [1, 3, 2, 4, 0]
    assert queue(EarliestDeadline(3.0, 0.01), rows, now=2.0) == [3, 2, 4, 1, 0]
    assert queue(EarliestDeadline(3.0, 0.01), rows, now=9.0) == [1, 4, 3, 0, 2]


def test_deadlines_age_too():
    """At 20 tokens a second the first has waited its 50 tokens away after 2.5 s, the second after 1 s."""
    rows = [
        {"prompt": 50, "arrival": 0.0, "slo": Slo(0.6)},
        {"prompt": 10, "arrival": 0.5, "slo": Slo(0.6)},
        {"prompt": 9, "arrival": 2.0, "slo": Slo(0.6)},
    ]
    assert queue(EarliestDeadline(3.0, 0.01, ageing=20.0), rows, now=2.4) == [1, 2, 0]
    assert queue(EarliestDeadline(3.0, 0.01, ageing=20.0), rows, now=2.6) == [1, 2, 0]
    assert queue(EarliestDeadline(3.0, 0.01, ageing=40.0), rows, now=2.1) == [1, 0, 2]


@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.sampled_from([None, 1.0, 9.0]))),
    ageing=st.sampled_from([0.0, 1.0]),
    now=st.integers(40, 60),
)
def test_every_order_names_everybody_once(rows, ageing, now):
    rows.sort(key=lambda row: row[1])
    asked = [{"prompt": p, "arrival": float(a), "slo": Slo(s)} for p, a, s in rows]
    for name in ("arrival", "shortest", "priority", "deadline"):
        found = queue(order_of("test", name, ageing, 5.0, 0.05), asked, float(now))
        assert sorted(found) == list(range(len(rows)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"name": "shorter"}, "unknown order of test 'shorter'; did you mean 'shortest'"),
        ({"ageing": -1.0}, "test: ageing=-1.0 tokens per second; it must be 0"),
        ({"ageing": float("nan")}, "test: ageing=nan"),
        ({"promise": 0.0}, "test: first_token=0.0 s; a promise must be above 0"),
    ],
)
def test_impossible_orders(words, message):
    with pytest.raises(InputError, match=message):
        order_of(**{"owner": "test", "name": "shortest", "ageing": 0.0, "promise": 1.0, "pace": 0.1} | words)


# -- starvation ---------------------------------------------------------------------------------------

STREAM = 400  # short prompts, twice as many as the engine can serve
COST = Line(fixed=0.0, prefill=0.01, decode=0.0, context=0.0, behind=0.0)  # 100 prompt tokens a second
SHORT, LONG = 20, 300


def flooded() -> tuple[Engine, Workload]:
    """One long prompt among short ones that never stop coming while it waits."""
    arrival = np.arange(STREAM + 1) * 0.1
    prompt = np.full(STREAM + 1, SHORT)
    prompt[5] = LONG
    return Engine(COST, 10**6, 10**6, 40, 8, 16), Workload.of(prompt, np.ones(STREAM + 1), arrival=arrival)


def overtakers(log: Log, long: int = 5) -> list[int]:
    """Who came after the long prompt and was admitted before it."""
    admitted = [event[1] for event in log.events if event[0] == "admitted"]
    return [id for id in admitted[: admitted.index(long)] if id > long]


def test_shortest_first_starves_a_long_prompt():
    engine, workload = flooded()
    assert len(overtakers(run(engine, ShortestFirst(8, 40), workload))) == STREAM - 5


@pytest.mark.parametrize("ageing", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("policy", ["sarathi-spf", "slai", "slai by deadline"])
def test_ageing_bounds_the_wait(policy, ageing):
    """Whoever comes more than (L - l) / a later does not overtake; those before are all there are."""
    engine, workload = flooded()
    made = {
        "sarathi-spf": lambda: ShortestFirst(8, 40, ageing=ageing),
        "slai": lambda: Slai(8, 40, COST, ageing=ageing),
        "slai by deadline": lambda: Slai(8, 40, COST, order="deadline", first_token=1.0, ageing=ageing),
    }[policy]()
    last = 0.5 + (LONG if "deadline" in policy else LONG - SHORT) / ageing
    latest = max(0.1 * id for id in overtakers(run(engine, made, workload)))
    assert latest <= last + 1e-9
    if last < 0.1 * STREAM and "deadline" not in policy:
        assert latest > last - 1.0, "the bound is not idle"


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([0.0, 0.2, 1.5, 7.0])), min_size=2, max_size=25
    ),
    ageing=st.sampled_from([1.0, 4.0, 32.0]),
    slots=st.integers(1, 4),
)
def test_nobody_is_overtaken_by_whom_ageing_forbids(rows, ageing, slots):
    """For any traffic: an overtaker came at most (L - l) / a later."""
    prompt = [p for p, _ in rows]
    arrival = np.cumsum([gap for _, gap in rows])
    engine = Engine(COST, 10**6, 10**6, 16, slots, 16)
    log = run(
        engine, ShortestFirst(slots, 16, ageing), Workload.of(prompt, np.full(len(rows), 3), arrival=arrival)
    )
    when = {event[1]: event[2] for event in log.events if event[0] == "admitted"}
    for early in range(len(rows)):
        for late in range(early + 1, len(rows)):
            if when[late] < when[early]:
                assert arrival[late] - arrival[early] <= (prompt[early] - prompt[late]) / ageing + 1e-9


# -- tenants


def tenant_world():
    """An account book, and a way to let requests of (tenant, prompt) come."""
    ledger, accounts = Ledger(Limits(10**6, 100), 10**6), TenantAccounts()

    def come(id: int, tenant: str, prompt: int = 100, **more) -> Entry:
        entry = Entry(ledger, id, 0.0, prompt, limit=1000, tenant=tenant, **more)
        accounts.arrived(entry)
        return entry

    return accounts, come


def test_a_prompt_counts_once_and_an_output_token_twice():
    """First 100 + 2 x 0 expected; at the end 2 x 30 more. The next is expected to give 30."""
    accounts, come = tenant_world()
    first, second = come(0, "a"), come(1, "a")
    accounts.admitted(first)
    assert accounts.served("a") == 100
    accounts.admitted(first)  # again, after an eviction
    assert accounts.served("a") == 100
    first._tokens = 30
    accounts.left(first)
    assert accounts.served("a") == 160
    assert accounts.price(second) == 100 + 2 * 30
    assert accounts.price(come(2, "a", guess=7)) == 100 + 2 * 7
    second.cached = 40
    accounts.admitted(second)
    assert accounts.served("a") == 160 + 60 + 60


def test_a_tenant_that_comes_back_has_saved_nothing():
    """As in VTC: b starts where a is, not at 0; and so it is after all have left."""
    accounts, come = tenant_world()
    here = come(0, "a", int(QUANTUM) + 1)
    accounts.admitted(here)
    there = come(1, "b")
    assert accounts.served("b") == accounts.served("a") == QUANTUM + 1
    assert accounts.ahead() == frozenset()
    more = come(2, "a", int(QUANTUM) + 1)
    come(3, "a")
    accounts.admitted(more)
    assert accounts.ahead() == {"a"}  # 20,001 ahead of b, which waits
    accounts.left(there)
    assert accounts.ahead() == frozenset()
    come(4, "c")
    assert accounts.served("c") == 2 * (QUANTUM + 1)


def test_debts_outlive_a_pause():
    """a leaves 5,000 tokens ahead of b, comes back, and is still ahead."""
    accounts, come = tenant_world()
    behind, ahead = come(0, "b"), come(1, "a", 5000)
    accounts.admitted(ahead)
    accounts.admitted(behind)
    accounts.left(ahead)
    come(2, "a")
    assert accounts.served("a") - accounts.served("b") == 4900


def test_a_tenant_that_asks_for_little_saves_no_more_than_two_quanta():
    """b has one small request here while a is served 100,000; then b may catch up by 40,000."""
    accounts, come = tenant_world()
    accounts.admitted(come(0, "b", 10))
    accounts.admitted(come(1, "a", 100_000))
    assert accounts.served("b") == accounts.served("a") - SAVED
    come(2, "a")
    accounts.admitted(come(3, "b", 500))
    assert accounts.served("b") == accounts.served("a") - SAVED + 500


def test_accounts_are_bounded_and_those_who_changed_nothing_are_forgotten():
    accounts, come = tenant_world()
    for id in range(3 * MOST_TENANTS):
        entry = come(id, f"passing {id}")
        accounts.admitted(entry)
        accounts.left(entry)
    assert len(accounts._accounts) <= 1
    for id in range(MOST_TENANTS + 10):
        come(10_000 + id, f"here {id}")
    assert len(accounts._accounts) <= MOST_TENANTS + 1
    late = come(20_000, "one more")
    assert accounts.name(late) == ""
    accounts.admitted(late)
    assert accounts.served("") == accounts.served("here 0") + 100


def test_fair_serves_the_tenant_that_had_least():
    """What comes first counts: a, then b until it has had as much, then a again."""
    rows = [{"prompt": 100, "tenant": "a", "arrival": 0.1 * place} for place in range(3)]
    rows += [{"prompt": 40, "tenant": "b", "arrival": 1 + 0.1 * place} for place in range(4)]
    assert queue(order_of("x", "fair", 0.0, 1.0, 0.0), rows) == [0, 3, 4, 5, 1, 6, 2]
    assert queue(LeastServed(), PROMPTS) == [0, 1, 2, 3]


class CountedAccounts(TenantAccounts):
    looked = 0

    def least_served(self):
        for served, tenant in super().least_served():
            self.looked += 1
            yield served, tenant


def test_no_more_tenants_are_looked_at_than_needed():
    """400 tenants, the last served least; two requests wait of each but every fifth."""
    ledger, accounts = Ledger(Limits(10**6, 100), 10**6), CountedAccounts()
    queues, rows = TenantQueues(accounts), []
    for number in range(400):
        for turn, prompt in enumerate((4000 - 10 * number, 500 + number % 7, 20)):
            id = 3 * number + turn
            entry = Entry(ledger, id, float(id), prompt, limit=9, guess=0, tenant=f"t{number}")
            accounts.arrived(entry)
            if turn and number % 5:
                ledger.arrive(entry)
                queues.add(entry, (entry.arrival, id))
                rows.append(entry)
    for number in range(400):
        accounts.admitted(Entry(ledger, 3 * number, 0.0, 4000 - 10 * number, limit=9, tenant=f"t{number}"))
    first = queues.ids(ledger.waiting)
    assert [next(first), next(first)] == [3 * 399 + 1, 3 * 398 + 1]
    assert 0 < accounts.looked <= 4

    left = {entry.id: entry for entry in rows}
    served = {f"t{number}": 4000 - 10 * number for number in range(400)}
    for id in queues.ids(ledger.waiting):
        entry = left[id]
        assert served[entry.tenant] == min(served[other.tenant] for other in left.values())
        served[entry.tenant] += entry.prompt
        del left[id]
    assert not left


def test_a_flood_without_a_tenant_that_came_first_counts_as_well():
    """Five of them run and one has left before the first tenant comes; the others take turns with it."""
    order, ledger = LeastServed(), Ledger(Limits(10**6, 100), 10**6)
    entries = [
        Entry(ledger, id, 0.1 * id, 100, limit=10, tenant="" if id < 46 else "acme") for id in range(50)
    ]
    for entry in entries[:46]:
        order.add(entry)
    for entry in entries[:5]:
        order.admitted(entry)
    order.finished(entries[5])
    for entry in entries[46:]:
        order.add(entry)
    for entry in entries[6:]:
        ledger.arrive(entry)
    assert [request.id for request in order.waiting(ledger)][:10] == [6, 46, 7, 47, 8, 48, 9, 49, 10, 11]
    order.admitted(entries[6])
    assert (order.tenants.served(""), order.tenants.served("acme")) == (100, 0)


@pytest.mark.parametrize("make", [lambda: Sarathi(4, 64, "fair"), lambda: Slai(4, 64, Line(), "fair")])
def test_under_fair_a_flood_does_not_delay_another_tenant(make):
    """40 of flood come at once, one of good every 20 s: that one waits for a slot, not for the flood."""
    arrivals = [0.0] * 40 + [1.0 + 20 * place for place in range(5)]
    tenants = ("flood", "good")
    workload = Workload.of([20] * 45, [5] * 45, arrival=arrivals, tenant=[0] * 40 + [1] * 5, tenants=tenants)
    engine = Engine(Line(), kv_tokens=10_000, max_model_len=100, batch_tokens=64, running=4)
    waits = first_tokens(run(engine, make(), workload))
    assert max(waits[id] - arrivals[id] for id in range(40, 45)) < 12
    assert max(waits[id] for id in range(40)) > 60


def first_tokens(log: Log) -> dict[int, float]:
    return {event[1]: event[2] for event in log.events if event[0] == "prefilled"}
