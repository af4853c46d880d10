"""Routers that balance: whom they choose, and that the choice costs no look at every engine."""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_worlds import carry_out
from headgate.core.errors import InputError
from headgate.core.fleet import endless
from headgate.core.ledger import Entry, Ledger
from headgate.core.policy import End
from headgate.core.roster import Roster
from headgate.core.view import Limits
from headgate.methods.balance.balance import (
    Affinity,
    AtRandom,
    LeastLoaded,
    LeastPending,
    Loads,
    PowerOfTwo,
    RoundRobin,
)
from headgate.methods.split.split import Split

LOBBY = Ledger(Limits(64, 8), 0)
KINDS = [f"kind{number}" for number in range(50)]


class Desk:
    """Engines that take whatever they are sent, and a router before them."""

    def __init__(self, router, engines):
        self.router = router
        self.roster = Roster(router.roles(engines), endless, KINDS)
        self.sent = 0

    def send(self, kind="kind0", prompt=10):
        """The next request; where it goes."""
        entry = Entry(LOBBY, self.sent, 0.0, prompt, 100, kind)
        self.sent += 1
        self.roster.arrive(entry)
        self.router.arrived(entry, 0.0)
        return entry, self.follow()

    def follow(self):
        ((move,), *_) = self.router.route(self.roster)
        return carry_out(move, self.roster, self.router).replica

    def prefilled(self, entry, engine, stays=True):
        self.roster.end_prompt(entry, self.roster.replicas[engine], stays)
        self.router.prefilled(entry, engine, 0.0)

    def finished(self, entry, engine):
        self.router.finished(entry, engine, 0.0)


def test_round_robin_takes_turns():
    desk = Desk(RoundRobin(3), 3)
    assert [desk.send()[1] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_random_takes_what_is_drawn():
    desk = Desk(AtRandom(4, iter([0.0, 0.99, 0.5]).__next__), 4)
    assert [desk.send()[1] for _ in range(3)] == [0, 3, 2]


def test_least_loaded_joins_the_shortest_queue():
    desk = Desk(LeastLoaded(3), 3)
    sent = [desk.send() for _ in range(5)]
    assert [engine for _, engine in sent] == [0, 1, 2, 0, 1]
    desk.finished(*sent[1])
    desk.router.left(sent[4][0], 0.0, End.ABORTED)
    assert [desk.send()[1] for _ in range(2)] == [1, 2]


def test_least_pending_counts_prompt_tokens_until_they_are_done():
    desk = Desk(LeastPending(2), 2)
    first, engine = desk.send(prompt=100)
    assert [desk.send(prompt=30)[1] for _ in range(3)] == [1, 1, 1]
    desk.prefilled(first, engine)
    assert desk.send(prompt=30)[1] == 0


def test_power_of_two_takes_the_less_loaded_of_two():
    desk = Desk(PowerOfTwo(4, cycle([0.0, 0.3]).__next__), 4)
    assert [desk.send()[1] for _ in range(4)] == [0, 1, 0, 1]


def test_affinity_keeps_a_kind_together_unless_its_engine_is_too_full():
    desk = Desk(Affinity(8, bound=1e9), 8)
    homes = {kind: desk.send(kind)[1] for kind in KINDS}
    assert homes == {kind: desk.send(kind)[1] for kind in KINDS}
    assert len(set(homes.values())) > 4
    alone = Desk(Affinity(8), 8)
    loads = Counter(alone.send()[1] for _ in range(80))
    assert max(loads.values()) <= 1.25 * 80 / 8 + 1
    with pytest.raises(InputError, match="give 1 or more"):
        Affinity(8, bound=0.9)


def test_when_an_engine_is_added_few_kinds_move():
    before, after = Affinity(16, bound=1e9), Affinity(17, bound=1e9)
    entries = [Entry(LOBBY, 0, 0.0, 1, 1, kind) for kind in KINDS]
    moved = sum(before.choose(entry) != after.choose(entry) for entry in entries)
    assert moved < len(KINDS) / 4


def test_a_split_sends_prompts_and_outputs_to_their_own_engines():
    desk = Desk(Split(5, 2), 5)
    assert desk.router.roles(5) == ("prefill", "prefill", "decode", "decode", "decode")
    sent = [desk.send(prompt=prompt) for prompt in (100, 30, 30)]
    assert [engine for _, engine in sent] == [0, 1, 1]
    for entry, engine in sent:
        desk.prefilled(entry, engine, stays=False)
    assert {desk.follow() for _ in sent} == {2, 3, 4}
    desk.finished(sent[1][0], 3)
    entry, engine = desk.send()
    desk.prefilled(entry, engine, stays=False)
    assert desk.follow() == 3


@given(
    st.integers(0, 2),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 9), st.integers(-4, 3)), max_size=150),
)
def test_the_least_load_is_found_as_by_looking_at_all(first, engines, changes):
    """Of equals the one that was chosen longest ago, then the first; closed engines are counted."""
    loads, load, chosen = Loads(range(first, engines + first)), [0] * 8, [0] * 8
    open = [*range(first, engines + first)]
    for number, (place, weight) in enumerate(changes, 1):
        if weight == 0:
            best = min(open, key=lambda each: (load[each], chosen[each], each))
            assert loads.least() == best
            chosen[best] = number
        elif weight == -4:
            engines = max(engines, 3)
            open = [each for each in range(first + engines) if each != place] or [0]
            loads.only(open, first + engines)
        else:
            engine = place % engines + first
            loads.add(engine, weight)
            load[engine] += weight
    assert loads.load == load[: first + engines] and loads.total == sum(load)
