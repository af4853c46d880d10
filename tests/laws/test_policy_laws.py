"""The laws every batch policy must keep, for random workloads, engines and parameters."""

from __future__ import annotations

import copy
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.plan import check
from headgate.core.policy import End
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import Simulator
from headgate_leaderboard.stingy_engine import serve_stingily
from worlds import POLICIES, TESTING, Log, Relay, engines, run, workloads

ALL_NAMES = [*POLICIES, *TESTING]
MAKE = POLICIES | TESTING


def served(log: Log, requests: int) -> bool:
    return sum(event[0] == "finished" for event in log.events) == requests


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True, promised=True))
def test_same_again(name, data, engine, workload):
    policy = MAKE[name](data.draw, engine)
    first, second = (run(engine, copy.deepcopy(policy), workload) for _ in range(2))
    assert first.plans == second.plans
    assert first.steps == second.steps
    assert first.events == second.events


class AskedTwice(Relay):
    """Asks twice for each plan."""

    def plan(self, view):
        first = self.inner.plan(view)
        assert self.inner.plan(view) == first
        assert check(first, view) == []
        return first


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(promised=True))
def test_asked_twice_and_always_sensible(name, data, engine, workload):
    policy = MAKE[name](data.draw, engine)
    log = run(engine, AskedTwice(policy), workload)
    assert served(log, len(workload))


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True, promised=True))
def test_leases_and_asking_at_every_step_agree(name, data, engine, workload):
    policy = MAKE[name](data.draw, engine)
    leased = run(engine, copy.deepcopy(policy), workload)
    asked = run(engine, copy.deepcopy(policy), workload, leases=False)
    assert leased.steps == asked.steps
    assert leased.events == asked.events
    assert len(leased.plans) <= len(asked.plans)


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True, promised=True))
def test_everybody_is_served_or_leaves(name, data, engine, workload):
    log = run(engine, MAKE[name](data.draw, engine), workload)
    assert served(log, len(workload))
    longest = min(engine.max_model_len, engine.kv_tokens // engine.block * engine.block)
    for _, id, _, how, generated, _ in (event for event in log.events if event[0] == "finished"):
        room = longest - int(workload.prompt[id])
        whole = min(int(workload.output[id]), int(workload.limit[id]), room)
        if how in (End.STOPPED, End.LIMIT):
            assert generated == whole
            assert (how is End.STOPPED) == (whole == workload.output[id])
        elif how is End.REFUSED:
            assert room < 1


@pytest.mark.parametrize("name", list(POLICIES))
@given(data=st.data(), engine=engines(), workload=workloads(promised=True))
def test_refusal_breaks_nothing(name, data, engine, workload):
    def mood() -> float:
        return data.draw(st.sampled_from([0.9, 0.4, 0.0]))

    serve_stingily(engine, MAKE[name](data.draw, engine), workload, (log := Log(),), mood)
    assert served(log, len(workload))


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(promised=True), when=st.integers(0, 40))
def test_take_over_half_way(name, data, engine, workload, when):
    fresh = MAKE[name](data.draw, engine)

    class Changing(VirtualEngine):
        left = when

        def advance(self, wake=inf):
            self.left -= 1
            if self.left == 0:
                self.take_over(fresh)
                self.ask()
            return super().advance(wake)

    first = MAKE["mixed"](data.draw, engine)
    simulator = Simulator(engine, first, workload, (log := Log(),), kind=Changing)
    simulator.run()
    assert served(log, len(workload))


@pytest.mark.parametrize("name", ALL_NAMES)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True, promised=True))
def test_books_add_up(name, data, engine, workload):
    class Audited(VirtualEngine):
        def settle(self):
            super().settle()
            ledger, blocks = self.ledger, self.blocks
            rolling = [r for r in ledger.decoding.values() if r.id not in ledger.held]
            assert ledger.rolling == len(rolling)
            assert ledger.context == sum(r.prompt + r.generated - 1 for r in rolling)
            running = [*ledger.prefilling.values(), *ledger.decoding.values()]
            assert blocks.total - blocks.free == sum(blocks.of(r.held_kv) for r in running)
            assert 0 <= blocks.free <= blocks.total
            assert sum(blocks.growers) == len(rolling)
            assert len(running) <= engine.running
            places = [*ledger.waiting, *ledger.prefilling, *ledger.decoding]
            assert len(places) == len(set(places))
            gone = sum(event[0] == "finished" for event in log.events)
            assert gone + len(places) == simulator.arrivals.sent
            audits.append(len(places))

    audits, policy = [], MAKE[name](data.draw, engine)
    simulator = Simulator(engine, policy, workload, (log := Log(),), kind=Audited)
    simulator.run()
    decoded = sum(step[1] for step in log.steps)
    by_prompt = sum(event[0] == "prefilled" for event in log.events)
    assert decoded + by_prompt == sum(event[4] for event in log.events if event[0] == "finished")
    assert simulator.replica.blocks.free == simulator.replica.blocks.total
    assert audits or not log.steps
