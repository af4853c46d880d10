"""The plug-in's books against the scheduler's truth after every step, for every policy, without vLLM."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.core.request import Slo, weight_of
from headgate.live.engine.metrics import Metrics
from headgate.live.engine.requests import RequestTerms
from headgate.live.engine.settings import Settings
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine
from stub_engine import StubEngine
from stub_requests import RequestStatus
from worlds import POLICIES, PRICES, EveryOther

SLOTS, BUDGET, BLOCK = 6, 64, 8
TIGHT, AMPLE = 33, 401  # blocks
WORDS = {"slots": SLOTS, "budget": BUDGET, "block": BLOCK, "blocks": AMPLE}


def engine_of(blocks: int) -> Engine:
    return Engine(PRICES, (blocks - 1) * BLOCK, 10_000, BUDGET, SLOTS, BLOCK)


def audit(engine: StubEngine) -> None:
    """Raise where a policy would see something else than there is."""
    scheduler, ledger, books = engine.scheduler, engine.live.ledger, engine.books
    assert not scheduler._headgate_hooks.broken, engine.live.fallen
    names = {entry.id: name for name, entry in books.entries.items()}
    running = {request.request_id for request in scheduler.running}
    assert {names[id] for id in (*ledger.prefilling, *ledger.decoding)} == running
    waiting = {r.request_id for queue in (scheduler.waiting, scheduler.kv_holding_waiting) for r in queue}
    away = books._unready.keys() | books._aside.keys()
    assert {names[id] for id in ledger.waiting} == waiting - away
    assert {names[id] for id in ledger.held} <= running
    for name, entry in books.entries.items():
        request = scheduler.requests[name]
        assert entry.evictions == request.num_preemptions and entry.limit == request.max_tokens
        if entry.id in ledger.decoding and not scheduler.asynchronous:
            assert entry.generated == request.num_output_tokens
    rolling = [entry for entry in ledger.decoding.values() if entry.rolls]
    assert ledger.rolling == len(rolling) and ledger.context == sum(entry.held_kv for entry in rolling)
    assert scheduler.max_num_scheduled_tokens == BUDGET  # every knob is back
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def traffic(engine: StubEngine, random: Random, count: int) -> dict[str, int]:
    """Requests that come in bunches, some of which hang up; how many tokens each should get, if it stays."""
    wanted: dict[str, int] = {}
    while len(wanted) < count or engine.scheduler.requests:
        for _ in range(random.choice([0, 0, 1, 4]) if len(wanted) < count else 0):
            name, limit = f"r{len(wanted)}", random.randint(1, 30)
            wanted[name] = random.randint(1, limit)
            late = random.random() < 0.2
            status = RequestStatus.WAITING_FOR_REMOTE_KVS if late else RequestStatus.WAITING
            engine.add(
                name, random.randint(1, 90), limit, wanted[name], priority=random.randint(0, 2), status=status
            )
        engine.scheduler.ready |= {name for name in engine.scheduler.requests if random.random() < 0.3}
        here = [*engine.scheduler.requests]
        if here and random.random() < 0.05:
            gone = random.choice(here)
            engine.scheduler.finish_request(gone)
            wanted[gone] = -1
        engine.step()
        audit(engine)
        assert engine.steps < 20_000, "never ends"
    engine.drain()
    return wanted


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), blocks=st.sampled_from([TIGHT, AMPLE]))
def test_books_agree_with_the_scheduler_and_everybody_is_served(name, asynchronous, data, seed, blocks):
    policy = POLICIES[name](data.draw, engine_of(blocks))
    engine = StubEngine(
        policy, **WORDS | {"blocks": blocks}, asynchronous=asynchronous, by_priority=bool(seed % 2)
    )
    wanted = traffic(engine, Random(seed), 25)
    assert engine.live.fallen is None
    for request, tokens in wanted.items():
        assert tokens == -1 or engine.scheduler.gone[request][1] == tokens
    assert not any(engine.sizes().values())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_books_do_not_grow_with_requests_served(asynchronous):
    """Row 6 of the attack: 2,000 requests, decodes held and resumed, and nothing of them is left."""
    engine = StubEngine(EveryOther(), **WORDS, asynchronous=asynchronous)
    most = 0
    for number in range(2000):
        engine.add(f"r{number}", 5, 4)
        engine.step()
        most = max(most, len(engine.live._last_tokens._heap))
    engine.drain()
    assert not any(engine.sizes().values())
    assert most <= 2 * SLOTS + 64 + 1


@pytest.mark.parametrize("name", ["eb+", "slai", "wait"])
def test_memory_does_not_grow_with_requests_served(name):
    """Below 50 bytes a request, metrics included; windows of what is learned are full by then."""
    policy = make_policy(name, {}, engine_of(AMPLE))[0]
    metrics = Metrics(Settings(metrics=False), {"policy": name}, background=False)
    engine = StubEngine(policy, (metrics,), **WORDS)
    number = 0

    def serve(count: int) -> int:
        nonlocal number
        for _ in range(count):
            engine.add(f"r{(number := number + 1)}", 5, 2)
            engine.step()
        engine.drain()
        engine.scheduler.gone.clear()
        for kept in (metrics.step_times, metrics.phase_times, metrics.stalls):
            kept.clear()  # as showing them does
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(1500)
        grown = serve(500) - before
    finally:
        tracemalloc.stop()
    assert engine.live.fallen is None and grown < 50 * 500


def test_a_clock_that_jumps_is_no_long_wait():
    """The front end stamps arrivals with the wall clock, which may be set while requests are on their way."""
    engine = StubEngine(EveryOther())
    engine.now = 1000.0
    for name, stamp in (("future", 5000.0), ("past", -9e9), ("now", 999.0), ("nan", float("nan"))):
        engine.add(name, 5, 4, arrival_time=stamp)
    found = {name: entry.arrival for name, entry in engine.books.entries.items()}
    assert found == {"future": 1000.0, "past": 940.0, "now": 999.0, "nan": 1000.0}
    engine.drain()


def test_a_guess_is_cut_to_what_the_request_may_have():
    engine = StubEngine(EveryOther(), promises=lambda request: ("", Slo(), 10**9, ""))
    engine.add("a", 5, 4)
    assert engine.books.entries["a"].guess == 4
    engine.drain()


@pytest.mark.parametrize("name", ["eb", "eb+", "rad-smooth", "slai", "wait"])
@given(data=st.data())
def test_an_engine_that_stands_still_is_not_the_policys_fault(name, data):
    """A machine that is suspended for an hour, several times in a few steps; and steps that take no time."""
    engine = StubEngine(POLICIES[name](data.draw, engine_of(AMPLE)), watchdog=300.0, **WORDS)
    for number in range(10):
        engine.add(f"r{number}", 5, 20)
    for number in range(40):
        before = engine.now
        engine.step()
        if number % 2:
            engine.now = before + (3600.0 if number < 10 else 0.0)
    engine.drain()
    assert engine.live.fallen is None and not any(engine.sizes().values())


class Starves(BatchPolicy):
    """Serves everybody but the requests it is told to forget: new ones, half-done ones or decodes."""

    def __init__(self, what: str) -> None:
        self.what = what

    def plan(self, view):
        waiting, halves, decodes = [*view.waiting], [*view.prefilling], [*view.decoding]
        victim = 0
        if self.what == "waiting":
            waiting = [id for id in waiting if id != victim]
        if self.what == "prefilling" and victim in halves:
            halves.remove(victim)
        chosen = frozenset(id for id in decodes if not (self.what == "decoding" and id == victim))
        return Plan(chosen, (*halves, *waiting), chunk=8, until=Until(steps=1))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("what", ["waiting", "prefilling", "decoding"])
def test_the_watchdog_fires_under_load(what, asynchronous):
    """One request gets nothing while hundreds come and go: the policy is disabled and everybody is served."""
    engine = StubEngine(Starves(what), watchdog=2.0, **WORDS, asynchronous=asynchronous)
    engine.add("victim", 40, 30)
    number = 0
    while engine.live.fallen is None:
        assert engine.now < 60.0, "it never fired"
        for _ in range(2 if len(engine.scheduler.requests) < 20 else 0):
            engine.add(f"r{(number := number + 1)}", 5, 4)
        engine.step()
        audit(engine)
    state = {"waiting": "waiting", "prefilling": "half-prefilled", "decoding": "held"}[what]
    assert number > 20 and f"request 0 ({state})" in engine.live.fallen
    assert engine.now < 2 * 2.0 + 1.0
    engine.drain()
    assert engine.scheduler.gone["victim"][1] == 30
    assert not any(engine.sizes().values())


@pytest.mark.parametrize("name", ["eb+", "slai", "mixed"])
def test_urgent_requests_go_first_and_starve_nobody_for_ever(name):
    """--scheduling-policy priority: a flood of urgent requests delays the others and disables no policy."""
    policy = make_policy(name, {}, engine_of(AMPLE))[0]
    engine = StubEngine(policy, watchdog=1.0, **WORDS, by_priority=True)
    for number in range(SLOTS):
        engine.add(f"first{number}", 5, 40, priority=0)
    engine.step()
    engine.add("patient", 5, 4, priority=9)
    for number in range(300):
        if len(engine.scheduler.requests) < 3 * SLOTS:
            engine.add(f"urgent{number}", 5, 4, priority=-(2**31))
        engine.step()
        audit(engine)
    assert engine.live.fallen is None
    engine.drain()
    assert engine.live.fallen is None and engine.scheduler.gone["patient"][1] == 4


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_clients_priority_is_its_weight_only_where_vllm_follows_priorities(by_priority):
    """vLLM takes the field from any client, with or without --scheduling-policy priority."""
    terms = {"plain": RequestTerms(), "gold": RequestTerms("gold", Slo(1.0, weight=3.0), None, "acme")}
    policy = make_policy("mixed", {}, engine_of(AMPLE))[0]
    engine = StubEngine(
        policy, promises=lambda request: terms[request.request_id], **WORDS, by_priority=by_priority
    )
    engine.add("plain", 5, 4, priority=-3)
    engine.add("gold", 5, 4, priority=-3)
    plain, gold = engine.books.entries["plain"], engine.books.entries["gold"]
    assert weight_of(plain) == (1000.0 if by_priority else 1.0) and plain.priority == -3
    assert weight_of(gold) == 3.0 and (gold.tenant, plain.tenant) == ("acme", "")
    engine.drain()
