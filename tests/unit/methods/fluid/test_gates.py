"""Gates and decode routers: known decisions."""

from collections import Counter, defaultdict
from itertools import cycle
from math import inf
from types import SimpleNamespace

import pytest

from fleet_worlds import draws, make_router
from fluid_worlds import CODE, EXTRACT, instance
from headgate.core.errors import InputError
from headgate.core.fleet import MIXED, SOLO, Room, Stage
from headgate.methods.fluid.gates import (
    Admission,
    BackPressure,
    ByPool,
    ByPoolAndKind,
    Occupancy,
    SoloFirst,
    TokenBucket,
    pick,
    solo_shares,
)
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import plan_fluid
from headgate.methods.names import ROUTE
from headgate_papers.routers import Anywhere, FirstCome

BASE = plan_fluid(instance())


def fleet(running=(0, 0), waiting=(1, 1), handoff=0, free=100, now=0.0):
    """As much of a fleet as gates read; requests are numbered by kind, then by order."""
    ids = iter(range(1000))
    queues = {f"class{place}": {next(ids): None for _ in range(count)} for place, count in enumerate(waiting)}
    return SimpleNamespace(
        now=now,
        queues=queues,
        prefilling={f"class{place}": count for place, count in enumerate(running)},
        handoff={1000 + place: one(1000 + place) for place in range(handoff)},
        places=defaultdict(lambda: SimpleNamespace(replica=0)),
        free_slots=free,
        idle={MIXED: [0], "any": [0]},
        open={SOLO: [1], MIXED: [0], "any": [0]},
        replicas=[engine(0, MIXED), engine(1, SOLO)],
    )


def engine(id: int, role: str, slots: int = 4):
    return SimpleNamespace(id=id, role=role, slots=slots, room=Room(1, slots, slots))


def one(id: int, kind: str = "class0"):
    return SimpleNamespace(id=id, kind=kind)


@pytest.mark.parametrize(
    ("running", "waiting", "chosen"),
    [
        ((4, 38), (1, 1), "class1"),
        ((3, 38), (1, 1), "class0"),
        ((3, 32), (1, 1), "class1"),  # 164.31 against 164.14
        ((0, 0), (10, 3), "class1"),  # a tie; class 0 has 53 fewer waiting than planned
        ((0, 0), (70, 3), "class0"),
        ((9, 9), (1, 0), "class0"),  # nobody else waits: it is not held back
        ((0, 0), (0, 0), None),
    ],
)
def test_occupancy_gate(running, waiting, chosen):
    assert Occupancy(BASE, 200).choose(fleet(running, waiting)) == chosen


def test_where_engines_take_several_prompts_kinds_enter_at_their_planned_rates():
    """By shares of engines the kind with the longer prompts would come in more often than planned."""
    plan, many = plan_fluid(instance()), fleet((3, 3), (1, 1))
    shares, rates = plan.prefill, plan.prompts
    assert shares[0] / shares[1] != pytest.approx(rates[0] / rates[1], rel=0.5)
    gate, running, entered = Occupancy(plan, 200), [0, 0], Counter()
    many.replicas[0].room = Room(6, 7, 8)
    gate.engines_changed(many)
    for _ in range(1000):  # all prompts inside have the same time left, whatever their kind
        many.prefilling = {f"class{place}": count for place, count in enumerate(running)}
        kind = gate.choose(many)
        entered[kind] += 1
        running[int(kind[-1])] += 1
        if sum(running) > 30:
            running = [count // 2 for count in running]
    assert entered["class0"] / entered["class1"] == pytest.approx(rates[0] / rates[1], rel=0.1)
    gate.engines_changed(fleet())
    assert [gate.targets[f"class{place}"][0] for place in range(2)] == list(shares)


def test_ties_go_to_the_first_class():
    twins = plan_fluid(instance(1, 1, sizes=(CODE, CODE)))
    level = Occupancy(twins, 10)
    level.targets = {kind: (0.1, 0.0) for kind in level.targets}
    assert level.choose(fleet((0, 0), (5, 5))) == "class0"


def test_closed_classes_wait_or_are_turned_away():
    closed = plan_fluid(instance(2, 2))  # D1: class 0 is not served at all
    gate = Occupancy(closed, 10)
    assert gate.choose(fleet(waiting=(5, 0))) is None
    assert gate.refuse(fleet(waiting=(5, 0))) == ()  # they give up by themselves
    patient = Occupancy(plan_fluid(instance(2, 2, impatience=0.0)), 10)
    assert patient.refuse(fleet(waiting=(5, 3))) == (0, 1, 2, 3, 4)
    assert Occupancy(BASE, 10).choose(fleet(waiting=(0, 0))) is None
    stranger = fleet()
    stranger.queues = {"class0": {}, "class1": {}, "new": {4: None}}
    assert Occupancy(BASE, 10).refuse(stranger) == (4,)


def test_a_throttled_class_that_never_gives_up_is_shed():
    plan = plan_fluid(instance(1, 1, impatience=0.0))  # C1: 0.217 of class 0 per engine
    gate = Occupancy(plan, 10)
    assert gate.refuse(fleet(waiting=(22, 50))) == ()  # ten seconds of 2.17 per second
    assert gate.refuse(fleet(waiting=(25, 50))) == (22, 23, 24)


def test_back_pressure():
    gate = BackPressure(BASE, 200)
    assert gate.throttled.keys() == {"class0"}
    assert gate.choose(fleet(waiting=(1, 0))) == "class0"
    assert gate.choose(fleet(waiting=(1, 0), handoff=1)) is None
    assert gate.choose(fleet(waiting=(1, 0), free=0)) is None
    assert gate.choose(fleet(waiting=(1, 1), free=0)) == "class1"  # served in full: never held back


def test_token_bucket():
    gate = TokenBucket(BASE, 5)
    rate = 5 * 0.468275
    assert gate.throttled == {"class0": pytest.approx(rate, rel=1e-5)}
    assert gate.choose(fleet(waiting=(3, 0))) == "class0"
    gate.entered(one(0), 0.0)
    assert gate.choose(fleet(waiting=(3, 0))) is None
    wake = gate.wake(fleet(waiting=(3, 0)))
    assert wake == pytest.approx(1 / rate, rel=1e-5)
    assert gate.choose(fleet(waiting=(3, 0), now=0.99 * wake)) is None
    assert gate.choose(fleet(waiting=(3, 0), now=wake)) == "class0"
    assert gate.level("class0", 1000.0) == 5  # it does not save up more
    assert gate.wake(fleet(waiting=(0, 3))) == inf
    gate.entered(one(1, "class1"), 0.0)  # free of charge
    assert gate.level("class0", 0.0) == 0


def test_orders():
    assert FirstCome().choose(fleet(waiting=(0, 2))) == "class1"
    assert FirstCome().choose(fleet(waiting=(1, 2))) == "class0"
    assert FirstCome().choose(fleet(waiting=(0, 0))) is None
    assert Admission(["class1", "class0"]).choose(fleet(waiting=(2, 2))) == "class1"
    assert Admission(["class1"]).choose(fleet(waiting=(2, 0))) == "class0"
    assert Admission([]).choose(fleet(waiting=(0, 0))) is None


def test_orders_of_the_routers():
    assert make_router("density-first", BASE, 5, draws(0)).admission.order == ["class1", "class0"]
    assert make_router("prioritize-and-route", BASE, 5, draws(0)).admission.order == ["class0", "class1"]


def test_roles():
    for name, mixed in (
        ("gate-and-route", 5),
        ("gate-and-route+", 8),
        ("token-bucket", 8),
        ("fg-sp", 5),
        ("service-level", 5),
    ):
        roles = make_router(name, BASE, 20, draws(0)).roles(20)
        assert (len(roles), roles.count(MIXED)) == (20, mixed)
    for name in ("fi-wsp", "gi-wsp", "gf-wsp", "density-first"):
        assert make_router(name, BASE, 20, draws(0)).roles(20) == ("any",) * 20
    nothing = plan_fluid(instance(impatience=0.0), Levels(prefilling=0.0))
    assert make_router("gate-and-route", nothing, 3, draws(0)).roles(3) == (SOLO,) * 3
    assert make_router("fg-sp", nothing, 3, draws(0)).roles(3) == (MIXED, SOLO, SOLO)


def test_solo_slots_first():
    router = SoloFirst(draws(0))
    assert router.next(fleet(handoff=2)) == (1000, 1, Stage.DECODE)
    full = fleet(handoff=2)
    full.open = {SOLO: [], MIXED: [0]}
    assert router.next(full) == (1000, 0, Stage.DECODE)
    full.open = {SOLO: [], MIXED: []}
    assert router.next(full) is None


@pytest.mark.parametrize("make", [SoloFirst, Anywhere])
def test_decodes_stay_where_their_kv_is_if_they_can(make):
    role = MIXED if make is SoloFirst else "any"
    here = fleet(handoff=1)
    here.replicas = [engine(number, role) for number in range(5)]
    here.open = {SOLO: [], MIXED: [0, 1, 2, 3, 4], "any": [0, 1, 2, 3, 4]}
    here.places[1000].replica = 3
    router = make(lambda: pytest.fail("nothing to draw"))
    assert router.next(here) == (1000, 3, Stage.DECODE)
    here.replicas[3].slots = 0
    here.open[role].remove(3)
    assert make(lambda: 0.99).next(here) == (1000, 4, Stage.DECODE)


def test_a_token_bucket_goes_on_from_the_level_it_had():
    plan = plan_fluid(instance(1, 1))
    before, after, stranger = (TokenBucket(plan, 20) for _ in range(3))
    (kind,) = before.throttled
    for _ in range(5):
        before.entered(one(0, kind), 100.0)
    after.adopt(fleet(now=100.0), before)
    assert after.level(kind, 100.0) == before.level(kind, 100.0) == 0.0
    stranger.adopt(fleet(now=100.0), None)
    assert stranger.level(kind, 100.0) == 1.0  # not what a hundred seconds would have brought


def test_shares_of_the_pools():
    assert list(solo_shares(BASE).values()) == pytest.approx([0.856164, 0.856164], rel=1e-5)
    fair = plan_fluid(instance(), Levels(decode_fairness=1.0))
    shares = solo_shares(fair)
    assert shares["class1"] == pytest.approx(1.0)
    assert shares["class0"] == pytest.approx(
        5.400440 * 45.45 / (5.400440 * 45.45 + 3.122743 / 0.033272), rel=1e-5
    )
    assert solo_shares(plan_fluid(instance(2, 2)))["class0"] == 1.0  # 0/0


def test_each_request_draws_its_pool_once():
    router = ByPool(BASE, cycle([0.1, 0.9]).__next__)
    here = fleet(handoff=3)
    assert router.next(here) == (1000, 1, Stage.DECODE)
    del here.handoff[1000]
    here.open = {SOLO: [], MIXED: [0]}
    assert router.next(here) == (1001, 0, Stage.DECODE)  # 1002 drew the solo pool and waits for it
    del here.handoff[1001]
    assert router.next(here) is None


def test_a_pool_without_engines_leaves_its_requests_to_the_other():
    router = ByPool(BASE, lambda: 0.1)
    here = fleet(handoff=1)
    here.open, here.replicas = {SOLO: [], MIXED: [0]}, [engine(0, MIXED)]
    assert router.next(here) == (1000, 0, Stage.DECODE)


def test_the_general_router_draws_kinds_by_their_planned_rate():
    plan = plan_fluid(instance(1, 1, charging="separate"))
    router = ByPoolAndKind(plan, draws(1))
    weights = router.weights[SOLO]
    assert weights["class0"] / weights["class1"] == pytest.approx(plan.solo[0] / plan.solo[1] * 400 / 1000)
    here, starts = fleet(), Counter()
    here.handoff = {id: one(id, f"class{id % 2}") for id in range(4000)}
    here.open = {SOLO: [1], MIXED: []}
    for _ in range(1000):
        move = router.next(here)
        starts[move.request % 2] += 1
        del here.handoff[move.request]
    share = weights["class0"] / (weights["class0"] + weights["class1"])
    assert starts[0] / 1000 == pytest.approx(share, abs=0.04)


def test_the_general_router_without_weights_takes_the_first():
    router = ByPoolAndKind(plan_fluid(instance(2, 2)), draws(0))
    here = fleet()
    here.handoff = {5: one(5), 3: one(3)}  # closed in the plan, so it has no weight
    assert router.next(here).request == 5


def test_pick_is_uniform():
    draw = draws(0)
    found = Counter(pick([3, 5, 9], draw) for _ in range(3000))
    assert set(found) == {3, 5, 9} and min(found.values()) > 900
    assert pick([4], lambda: pytest.fail("no draw for one")) == 4


def test_gf_wsp_starts_prompts_before_decodes():
    router = make_router("gf-wsp", BASE, 5, draws(0))
    assert router.route(fleet(handoff=1)).moves[0].stage is Stage.PREFILL
    assert router.route(fleet(handoff=1, waiting=(0, 0))).moves[0].stage is Stage.DECODE
    other = make_router("gate-and-route", BASE, 5, draws(0))
    assert other.route(fleet(handoff=1)).moves[0].stage is Stage.DECODE


def test_a_bucket_wakes_only_beside_an_idle_place():
    router = make_router("token-bucket", BASE, 5, draws(0))
    router.moved(one(0), SimpleNamespace(stage=Stage.PREFILL), 0.0)
    assert router.route(fleet(waiting=(3, 0))).wake < inf
    busy = fleet(waiting=(3, 0))
    busy.idle = {MIXED: []}
    assert router.route(busy).wake == inf


def test_unknown_gate():
    with pytest.raises(InputError, match="unknown gate 'bucket'; did you mean 'token-bucket'"):
        ROUTE["service-level"](BASE, 5, draws(0), gate="bucket")


def test_both_rows_bind():
    """N1: at n = 20 the plan gives class 0 a quarter of an engine; the gate still aims at that."""
    gate = Occupancy(plan_fluid(instance(0.5, 5, sizes=(CODE, EXTRACT))), 20)
    assert gate.choose(fleet((0, 19))) == "class0"
    assert gate.choose(fleet((1, 18))) == "class1"
