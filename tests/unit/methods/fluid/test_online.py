"""Online gate-and-route: what it learns, when it plans again, how roles move, and that it gets there."""

from dataclasses import replace
from math import log
from types import SimpleNamespace

import pytest

from fleet_worlds import draws
from fluid_worlds import instance
from headgate.core.errors import InputError
from headgate.core.fleet import CLOSED, MIXED, SOLO, Room
from headgate.methods.fluid.online import EVERY, HALF_LIFE, Online, RoleSteps
from headgate.methods.fluid.planner import plan_fluid
from headgate_papers.network.network import Network
from headgate_papers.network.source import Poisson, Shifting
from studies.fleets.online import SHIFTS, settled


@pytest.mark.parametrize("seed", range(3))
def test_within_two_percent_of_the_plan_that_knows_two_time_constants_after_a_shift(seed):
    """Mix and load shift; a router that keeps its first plan loses two fifths. The study has all figures."""
    for name in ("mix", "load"):
        online, knows, first = settled(SHIFTS[name], "gate-and-route+", seed, seconds=400.0)
        assert online >= 0.98 * knows
        assert first < 0.7 * knows


def learned(shift, when, until, probes=True):
    router = Online(plan_fluid(shift.before), shift.engines, draws(0))
    if not probes:
        router._probes.due = lambda fleet: None
    source = Shifting(shift.before, shift.after, when, shift.engines, 0)
    Network(shift.before, shift.engines, router, source).run(until)
    return router


def test_outputs_that_shift_are_learned_within_two_time_constants():
    shift = SHIFTS["outputs"]
    until = 200.0 + 2 * HALF_LIFE / log(2)
    seen = learned(shift, 200.0, until).traffic.seen(until)
    served = plan_fluid(shift.after).served  # of the class that nobody serves little is learned
    for flow, before, rate in zip(shift.after.flows, shift.before.flows, served, strict=True):
        left = abs(seen[flow.name].output - flow.output) / abs(before.output - flow.output)
        assert rate == 0 or left < 0.25  # of the way; exp(-2) is 0.14, and requests of before still run


def test_a_class_that_was_closed_is_opened_when_it_becomes_worth_it():
    shift = SHIFTS["closed"]
    assert plan_fluid(shift.before).prefill[0] == 0 and plan_fluid(shift.after).served[0] == 2.0
    assert learned(shift, 60.0, 360.0).plan.served[0] == pytest.approx(2.0, rel=0.1)
    assert learned(shift, 60.0, 360.0, probes=False).plan.served[0] == 0.0


def test_a_wrong_start_is_corrected():
    """Rates ten times too low and patience unknown: after a while the plan is nearly the right one."""
    right = instance(1.0, 1.0)
    wrong = replace(right, flows=tuple(replace(f, rate=0.1, impatience=0.02) for f in right.flows))
    router = Online(plan_fluid(wrong), 20, draws(0))
    Network(right, 20, router, Poisson(right, 20, 3)).run(400.0)
    best = plan_fluid(right)
    assert router.plan.revenue == pytest.approx(best.revenue, rel=0.04)
    throttled = router.plan.throttled.index(True)
    assert best.throttled[throttled]
    assert router.plan.instance.flows[throttled].impatience == pytest.approx(0.1, rel=0.2)
    gauges = router.gauges()
    assert gauges["rate_class0"] == pytest.approx(20.0, rel=0.15)
    assert gauges["plan_revenue"] == router.plan.revenue * 20


def test_quiet_traffic_is_planned_once_a_minute():
    steady = instance(0.3, 0.3)
    router, plans = Online(plan_fluid(steady), 50, draws(0)), []
    inner = router.make
    router.make = lambda plan, *rest: plans.append(plan) or inner(plan, *rest)
    Network(steady, 50, router, Poisson(steady, 50, 1)).run(600.0)
    assert 9 <= len(plans) <= 24  # looked at sixty times; every sixth look plans anyway


def test_roles_move_one_engine_per_look():
    shift = SHIFTS["mix"]
    router = Online(plan_fluid(shift.before), 20, draws(0))
    network = Network(shift.before, 20, router, Shifting(shift.before, shift.after, 50.0, 20, 0))
    before, changes = [slot.role for slot in network.fleet.replicas], []
    for look in range(40):
        network.run(EVERY * (look + 1))
        after = [slot.role for slot in network.fleet.replicas]
        changes.append(sum(a != b for a, b in zip(before, after, strict=True)))
        before = after
    assert max(changes) <= 2  # a stretch of ten seconds may hold two looks at most
    assert before.count(MIXED) == router.inner.roles(20).count(MIXED) or changes[-1]
    assert sum(changes) >= 4


def fleet(roles, now=0.0, decodes=None):
    replicas = [
        SimpleNamespace(
            id=id,
            role=role,
            room=Room(1, 3, 4),
            decoding={"a": (decodes or {}).get(id, 0)},
            prefilling={"a": 0},
        )
        for id, role in enumerate(roles)
    ]
    return SimpleNamespace(replicas=replicas, now=now)


def test_the_emptiest_engine_changes_and_not_back_at_once():
    steps = RoleSteps(dwell=100.0)
    here = fleet([MIXED, SOLO, SOLO, SOLO], 10.0, {1: 3, 2: 1, 3: 2})
    assert steps.step(here, (MIXED, MIXED, SOLO, SOLO)) == ((2, MIXED),)
    here.replicas[2].role = MIXED
    here.now = 20.0
    assert steps.step(here, (MIXED, MIXED, SOLO, SOLO)) == ()
    assert steps.step(here, (MIXED, SOLO, SOLO, SOLO)) == ((0, SOLO),)  # the other one: 2 has just changed
    here.replicas[0].role = SOLO
    assert steps.step(here, (SOLO,) * 4) == ()
    here.now = 110.0
    assert steps.step(here, (SOLO,) * 4) == ((2, SOLO),)


def test_engines_that_are_down_have_no_role_to_change():
    here = fleet([MIXED, SOLO, SOLO])
    here.replicas[0].room = CLOSED
    assert RoleSteps(1.0).step(here, (MIXED, SOLO, SOLO)) == ((1, MIXED),)


def test_bad_settings():
    plan = plan_fluid(instance())
    with pytest.raises(InputError, match="router inside router online"):
        Online(plan, 5, draws(0), router="split")
    with pytest.raises(InputError, match="seconds above 0"):
        Online(plan, 5, draws(0), every=0.0)


def test_a_plan_that_cannot_be_made_leaves_the_old_one(monkeypatch):
    def fails(instance, levels):
        raise RuntimeError("HiGHS stopped")

    start = instance(1.0, 1.0)
    router = Online(plan := plan_fluid(start), 10, draws(0))
    monkeypatch.setattr("headgate.methods.fluid.planner.plan_fluid", fails)
    Network(start, 10, router, Poisson(start, 10, 0)).run(200.0)
    assert router.plan is plan and router.failed >= 2
    assert router.gauges()["plan_age"] > 150  # whoever watches it sees that nothing new is planned
