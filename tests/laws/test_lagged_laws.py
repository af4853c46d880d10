"""A policy that sees the world one step late still makes sense, serves everybody, and is late by one step."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.plan import check
from headgate.core.policy import BatchPolicy
from headgate.cost.laws.linear import DecodeTerms, LinearCost, MixedTerms, PrefillTerms
from headgate.experiment.library import simulate
from headgate.methods.mixed.mixed import Mixed
from headgate.sim.engine.engine import Engine
from headgate.sim.fleet.lagged import Lagged
from headgate.workloads.workload import Workload
from worlds import HOOKS, POLICIES, engines, run, workloads

SECOND_BY_SECOND = LinearCost(DecodeTerms(1.0, 0.0), PrefillTerms(1.0, 0.0), MixedTerms(1.0))


class Checked(Lagged):
    """Looks at each answer."""

    def plan(self, view):
        answer = super().plan(view)
        assert check(answer, view) == []
        assert answer.until.steps == 1
        return answer


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=15)
@given(data=st.data(), engine=engines(), workload=workloads(impatient=True, promised=True))
def test_everybody_is_served_or_leaves(name, data, engine, workload):
    policy = POLICIES[name](data.draw, engine)
    log = run(engine, Checked(copy.deepcopy(policy)), workload)
    assert sum(event[0] == "finished" for event in log.events) == len(workload)
    again = run(engine, Lagged(policy), workload)
    assert (again.steps, again.events) == (log.steps, log.events)


def first_tokens(slots, prompt, output, arrival):
    """Under mixed batching, as it is and late; every step takes a second."""
    engine = Engine(SECOND_BY_SECOND, 1600, 800, 512, slots, 16).checked()
    workload = Workload.of(prompt, output, arrival=arrival)
    policies = (Mixed(slots, 512), Lagged(Mixed(slots, 512)))
    return [simulate(engine, policy, workload).requests["first_token"].tolist() for policy in policies]


def test_who_comes_during_a_step_enters_in_the_one_after_the_next():
    known, late = first_tokens(4, [10, 10], [6, 2], [0.0, 1.5])
    assert known == [1.0, 3.0]
    assert late == [1.0, 4.0]  # the step from 2 to 3 was composed at 1


def test_a_slot_that_came_free_is_given_away_one_step_later():
    known, late = first_tokens(2, [10, 10, 10], [2, 9, 1], [0.0, 0.0, 0.0])
    assert known == [1.0, 1.0, 3.0]
    assert late == [1.0, 1.0, 4.0]


def test_every_hook_reaches_the_policy_inside():
    """keep counts the time since the last tokens by `planned`: without it gaps in fleets were too long."""
    kept = {name for name in HOOKS if getattr(Lagged, name) is getattr(BatchPolicy, name)}
    assert not kept
