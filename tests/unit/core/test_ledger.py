"""The ledger: where a request is after each transition, and what its handle says there."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.ledger import Entry, Ledger
from headgate.core.request import Slo
from headgate.core.view import Limits


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Limits(batch_tokens=64, running=8), kv_total=1000)


def arrive(ledger: Ledger, id: int, prompt: int = 10) -> Entry:
    entry = Entry(ledger, id, arrival=0.5, prompt=prompt, limit=100)
    ledger.arrive(entry)
    return entry


def prefill(ledger: Ledger, entry: Entry, tokens: int) -> None:
    if entry.id in ledger.waiting:
        ledger.admit(entry)
    entry.todo -= tokens


def decode(ledger: Ledger, id: int, prompt: int = 10, now: float = 1.0, rolling: bool = True) -> Entry:
    entry = arrive(ledger, id, prompt)
    prefill(ledger, entry, prompt)
    ledger.join(entry, now, rolling)
    return entry


def where(ledger: Ledger, id: int) -> str:
    places = {"waiting": ledger.waiting, "prefilling": ledger.prefilling, "decoding": ledger.decoding}
    found = [name for name, place in places.items() if id in place]
    assert len(found) <= 1
    if id in ledger.held:
        assert found == ["decoding"]
        return "held"
    return found[0] if found else "gone"


def shows(entry: Entry) -> tuple[int, int, float | None, int]:
    return entry.todo, entry.generated, entry.last_token, entry.held_kv


def test_waiting(ledger):
    entry = arrive(ledger, 0)
    assert where(ledger, 0) == "waiting"
    assert shows(entry) == (10, 0, None, 0)
    assert ledger.find(0) is entry
    assert ledger.find(1) is None


def test_prefilling(ledger):
    entry = arrive(ledger, 0)
    prefill(ledger, entry, 4)
    assert where(ledger, 0) == "prefilling"
    assert shows(entry) == (6, 0, None, 4)
    assert ledger.find(0) is entry
    prefill(ledger, entry, 5)
    assert shows(entry) == (1, 0, None, 9)


def test_joining_brings_a_token_that_is_not_in_kv_yet(ledger):
    entry = decode(ledger, 0, now=3.0)
    assert where(ledger, 0) == "decoding"
    assert shows(entry) == (0, 1, 3.0, 10)
    assert (ledger.rolling, ledger.context) == (1, 10)
    assert ledger.find(0) is entry


def test_ticks_move_everybody_who_rolls(ledger):
    first = decode(ledger, 0, now=1.0)
    ledger.ticks(3, 4.0)
    second = decode(ledger, 1, prompt=20, now=5.0)
    assert shows(first) == (0, 4, 4.0, 13)
    assert shows(second) == (0, 1, 5.0, 20)
    assert (ledger.rolling, ledger.context) == (2, 33)
    ledger.ticks(2, 7.5)
    assert shows(first) == (0, 6, 7.5, 15)
    assert shows(second) == (0, 3, 7.5, 22)
    assert ledger.context == 37


def test_held_and_resumed(ledger):
    first, second = decode(ledger, 0), decode(ledger, 1)
    ledger.ticks(2, 3.0)
    ledger.hold(first)
    assert where(ledger, 0) == "held"
    assert (ledger.rolling, ledger.context) == (1, 12)
    ledger.ticks(5, 8.0)
    assert shows(first) == (0, 3, 3.0, 12)
    assert shows(second) == (0, 8, 8.0, 17)
    ledger.resume(first)
    assert where(ledger, 0) == "decoding"
    assert shows(first) == (0, 3, 3.0, 12)  # not 8.0: that tick was not its own
    assert (ledger.rolling, ledger.context) == (2, 29)
    ledger.ticks(1, 9.0)
    assert shows(first) == (0, 4, 9.0, 13)


def test_held_before_its_first_tick_keeps_the_time_of_its_first_token(ledger):
    ledger.ticks(4, 2.0)
    entry = decode(ledger, 0, now=2.5)
    ledger.hold(entry)
    ledger.resume(entry)
    assert shows(entry) == (0, 1, 2.5, 10)


def test_joining_held(ledger):
    other = decode(ledger, 0)
    entry = decode(ledger, 1, now=2.0, rolling=False)
    assert where(ledger, 1) == "held"
    assert (ledger.rolling, ledger.context) == (1, 10)
    ledger.ticks(1, 3.0)
    assert shows(entry) == (0, 1, 2.0, 10)
    ledger.resume(entry)
    ledger.ticks(1, 4.0)
    assert shows(entry) == (0, 2, 4.0, 11)
    assert shows(other) == (0, 3, 4.0, 12)


def test_evicted_while_decoding(ledger):
    entry = decode(ledger, 0)
    ledger.ticks(3, 4.0)
    arrive(ledger, 1)
    arrive(ledger, 2)
    ledger.evict(entry)
    assert where(ledger, 0) == "waiting"
    assert [*ledger.waiting] == [0, 1, 2]
    assert shows(entry) == (14, 4, 4.0, 0)
    assert (entry.evictions, entry.wasted) == (1, 13)
    assert (ledger.rolling, ledger.context) == (0, 0)
    prefill(ledger, entry, 9)
    assert shows(entry) == (5, 4, 4.0, 9)
    prefill(ledger, entry, 5)
    ledger.join(entry, 6.0, rolling=True)
    assert shows(entry) == (0, 5, 6.0, 14)
    ledger.ticks(2, 8.0)
    assert shows(entry) == (0, 7, 8.0, 16)
    ledger.evict(entry)
    assert shows(entry) == (17, 7, 8.0, 0)
    assert (entry.evictions, entry.wasted) == (2, 13 + 16)


def test_evicted_while_prefilling(ledger):
    entry = arrive(ledger, 0)
    prefill(ledger, entry, 7)
    ledger.evict(entry)
    assert where(ledger, 0) == "waiting"
    assert shows(entry) == (10, 0, None, 0)
    assert (entry.evictions, entry.wasted) == (1, 7)


def test_evicted_while_held(ledger):
    other, entry = decode(ledger, 0), decode(ledger, 1)
    ledger.ticks(1, 2.0)
    ledger.hold(entry)
    ledger.ticks(4, 6.0)
    ledger.evict(entry)
    assert where(ledger, 1) == "waiting"
    assert shows(entry) == (12, 2, 2.0, 0)
    assert entry.wasted == 11
    assert (ledger.rolling, ledger.context) == (1, other.held_kv)


def test_the_last_evicted_is_first_in_the_queue(ledger):
    entries = [decode(ledger, id) for id in range(3)]
    arrive(ledger, 3)
    for id in (2, 0, 1):
        ledger.evict(entries[id])
    assert [*ledger.waiting] == [1, 0, 2, 3]


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "ticked", "held", "evicted"])
def test_leaving_from_everywhere(ledger, state):
    stays = decode(ledger, 9)
    entry = arrive(ledger, 0)
    if state != "waiting":
        prefill(ledger, entry, 4)
    if state in ("decoding", "ticked", "held", "evicted"):
        prefill(ledger, entry, 6)
        ledger.join(entry, 2.0, rolling=True)
    if state in ("ticked", "held", "evicted"):
        ledger.ticks(3, 5.0)
    if state == "held":
        ledger.hold(entry)
    if state == "evicted":
        ledger.evict(entry)
    before = entry.generated, entry.last_token, entry.evictions, entry.wasted
    ledger.leave(entry)
    assert where(ledger, 0) == "gone"
    assert ledger.find(0) is None
    assert (entry.generated, entry.last_token, entry.evictions, entry.wasted) == before
    assert (ledger.rolling, ledger.context) == (1, stays.held_kv)
    ledger.ticks(1, 9.0)  # what happens afterwards is no longer its own
    assert (entry.generated, entry.last_token) == before[:2]


def test_order_in_each_place_is_the_order_of_coming(ledger):
    for id in range(5):
        arrive(ledger, id)
    for id in (3, 1, 2):
        ledger.admit(ledger.waiting[id])
    assert [*ledger.waiting] == [0, 4]
    assert [*ledger.prefilling] == [3, 1, 2]
    for id in (1, 3):
        entry = ledger.prefilling[id]
        entry.todo = 0
        ledger.join(entry, 1.0, rolling=True)
    assert [*ledger.decoding] == [1, 3]
    ledger.hold(ledger.decoding[1])
    ledger.resume(ledger.decoding[1])
    assert [*ledger.decoding] == [1, 3]  # a decode that was held keeps its place


def test_a_handle_says_what_is_known(ledger):
    entry = Entry(ledger, 7, 1.5, 30, 200, "chat", 12, -1, Slo(0.5, 0.1))
    assert (entry.id, entry.arrival, entry.prompt, entry.limit) == (7, 1.5, 30, 200)
    assert (entry.kind, entry.guess, entry.priority, entry.slo) == ("chat", 12, -1, Slo(0.5, 0.1))
    assert repr(entry) == "Request(7, kind='chat', prompt=30, todo=30, generated=0, evictions=0)"
    assert not hasattr(entry, "output")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["roll", "wait", "tick", "hold", "resume", "retire", "leave"]), st.integers(0, 7)
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_the_oldest_token_is_that_of_the_decode_that_waited_longest(operations):
    """Whatever requests do, it is what looking at each of them gives."""
    ledger, done = Ledger(Limits(batch_tokens=64, running=8), kv_total=1000), set()
    for now, (what, id) in enumerate(operations, 1):
        entry = ledger.find(id)
        if entry is None and what in ("roll", "wait"):
            decode(ledger, id, now=float(now), rolling=what == "roll")
        elif what == "tick":
            ledger.ticks(id % 3, float(now))
        elif entry is not None and what in ("hold", "retire") and entry.rolls:
            getattr(ledger, what)(entry)
            done |= {id} if what == "retire" else set()
        elif entry is not None and what == "resume" and id in ledger.held:
            ledger.resume(entry)
        elif entry is not None and what == "leave":
            ledger.leave(entry)
            done.discard(id)
        lasts = [each.last_token for each in ledger.decoding.values()]
        assert ledger.oldest_token == min(lasts, default=inf)
    assert {*ledger._retired} == done
