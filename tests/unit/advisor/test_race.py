"""The race of policies against the exhaustive search: every policy with every seed, each for itself."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from headgate.advisor.capacity.plan import choose, given_up, plan_capacity, put_together
from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.traffic import parse_levels
from headgate.advisor.capacity.trials import HOPELESS, Case, Race, RateTrial
from headgate.advisor.set_up import Asked, set_up
from headgate.advisor.settings import SearchSettings
from headgate.experiment.settings import experiment
from headgate.experiment.workers import Workers

WORLD = experiment({"slots": 32, "budget": 1024, "prompt": 200, "output": 40, "requests": 100})
NAMES = ["mixed", "eb-online", "v0", "request-level", "rad", "keep"]
PRECISION = 0.04


@contextmanager
def quiet(total):
    yield lambda done: None


class Answered:
    """Runs that are kept, so that both searches can be compared at the price of one, and counted."""

    def __init__(self, levels, names=NAMES) -> None:
        self.start = set_up(WORLD, Asked(levels, SearchSettings(seeds=2)), 100)
        self.case = Case(self.start.engine, self.start.traffic, 3600.0, self.start.asynchronous)
        self.chosen, _ = choose(names, WORLD, self.start.engine)
        self.top = self.start.bounds()[0].rate
        self.known, self.asked = {}, set()

    def get(self, task: RateTrial):
        self.asked.add(repr(task))
        if repr(task) not in self.known:
            self.known[repr(task)] = self.case.run(task)
        return self.known[repr(task)]

    def put(self, task: RateTrial, answer) -> None:
        raise AssertionError("every answer is known")

    def raced(self, droppable):
        self.asked.clear()
        where = (range(2), droppable, Workers(), quiet, self)
        return Race(self.case, self.top, PRECISION, *where).run(self.chosen, {})

    def exhaustive(self, policy: str, seed: int) -> Search:
        search = Search(self.top, PRECISION)
        while (rate := search.next()) is not None:
            search.tell(rate, self.get(RateTrial(*self.chosen[policy], seed, rate)).ratio)
        return search


@pytest.mark.parametrize("level", ["ttft=150ms@p90", "ttft=150ms@p90,tbt=40ms@p99"])
def test_a_race_finds_what_the_exhaustive_search_finds(level):
    levels = parse_levels([level])
    world = Answered(levels)
    searches, answers, dropped = world.raced(frozenset(NAMES))
    few = len(world.asked)
    world.asked.clear()
    alone = {(name, seed): world.exhaustive(name, seed) for name in NAMES for seed in range(2)}
    assert few < 0.8 * len(world.asked)
    assert dropped and "mixed" not in dropped
    best = max(alone[name, 0].answer for name in NAMES)
    for name in NAMES:
        found = put_together(name, searches, answers, world.top, levels, 100 * (name in dropped))
        if name in dropped:
            assert len(found.by_seed) == 1
            assert found.rate.low <= alone[name, 0].answer <= found.rate.high <= HOPELESS * best
        else:
            for seed, rate in enumerate(found.by_seed):
                assert rate == pytest.approx(alone[name, seed].answer, rel=PRECISION)


def test_what_the_user_names_is_searched_to_the_end():
    world = Answered(parse_levels(["ttft=150ms@p90"]))
    searches, _, dropped = world.raced(frozenset(NAMES) - {"request-level"})
    assert "request-level" not in dropped and "rad" in dropped
    assert {seed for name, seed in searches if name == "request-level"} == {0, 1}
    asks = Asked(parse_levels(["ttft=150ms@p90"]), SearchSettings(seeds=1))
    named = plan_capacity(WORLD, ["all", "request-level"], asks)
    found = {each.policy: each for each in named.found}
    assert found["rad"].dropped == 100 and not found["request-level"].dropped
    (note,) = given_up(named.found)
    assert "dropped after runs of 100 requests with one seed" in note and note in named.notes
    assert "rad" in note and "request-level" not in note


def test_nobody_is_dropped_where_nobody_sustains_anything():
    world = Answered(parse_levels(["ttft=1ms@p50"]), ["mixed", "v0"])
    searches, _, dropped = world.raced({"mixed", "v0"})
    assert not dropped and all(search.answer == 0 for search in searches.values())
    assert all(search.missed < world.top / 64 for search in searches.values())
