"""Engines of a fleet at token level that fail, drain and come back; and sends that keep an engine busy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_worlds import ROUTERS, Watched, draws, make_router
from headgate.core.errors import InputError
from headgate.core.policy import End
from headgate.methods.balance.balance import LeastLoaded, RoundRobin
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.split.split import Split
from headgate.record.recorder import HOW
from headgate.sim.engine.engine import Engine
from headgate.sim.fleet.fleet import NO_TIME, FleetSimulator, Outage
from headgate.sim.fleet.kv_handover import Transfer
from headgate.workloads.workload import Workload
from token_fleets import token_worlds
from worlds import Line

SECOND = Line(fixed=1.0, prefill=0.0, decode=0.0, context=0.0, behind=0.0)  # every step takes a second
ENGINE = Engine(SECOND, 1000, 1000, 64, 8, block=10)
few = settings(max_examples=max(5, settings.default.max_examples // 6))


def fleet_of(router, workload, *outages, transfer=NO_TIME, policies=None, engines=2):
    def policy(role):
        made = Mixed(8, 64)
        if policies is not None:
            policies.append(made)
        return made

    fleet = FleetSimulator(ENGINE, engines, policy, router, workload, transfer=transfer, outages=outages)
    fleet.run()
    return fleet.recorder.tables()


def test_a_request_goes_on_elsewhere_with_the_tokens_it_has():
    """Prompt done at 1, tokens at 2 and 3; the engine fails at 2.5, so the step that ends at 3 is its last.

    The other engine prefills prompt and three tokens in one step: token four comes at 4, token five at 5.
    """
    tables = fleet_of(RoundRobin(2), Workload.of([10], [5]), Outage(0, 2.5, 50.0))
    row = tables["requests"]
    assert row["first_token"].tolist() == [1.0] and row["finished"].tolist() == [5.0]
    assert (row["replica"][0], row["evictions"][0], row["output"][0]) == (1, 1, 5)
    steps = tables["steps"]
    assert steps["prefill"].tolist() == [10, 0, 13, 0] and steps["replica"].tolist() == [0, 0, 1, 1]


def test_what_runs_on_an_engine_that_drains_ends_there():
    workload = Workload.of([10, 10], [5, 5], arrival=[0.0, 3.0])
    tables = fleet_of(LeastLoaded(2), workload, Outage(0, 2.5, 50.0, drain=True))
    assert tables["requests"]["replica"].tolist() == [0, 1]
    assert tables["requests"]["finished"].tolist() == [5.0, 8.0]


def test_it_comes_back_empty_and_with_a_policy_that_has_learned_nothing():
    made = []
    workload = Workload.of([10, 10], [3, 3], arrival=[0.0, 6.0])
    tables = fleet_of(RoundRobin(2), workload, Outage(1, 0.5, 9.0), Outage(0, 1.5, 5.0), policies=made)
    assert tables["requests"]["replica"].tolist() == [0, 0]  # engine 0 fails at 2, is back at 5
    assert tables["requests"]["finished"].tolist() == [6.0, 9.0]
    assert len(made) == 4


def test_a_copy_whose_sender_fails_is_computed_again_where_it_decodes():
    """Prompt done at 1 on engine 0, copied until 11; the sender fails at 3, the receiver prefills at 11."""
    tables = fleet_of(Split(2, 1), Workload.of([10], [3]), Outage(0, 3.0, 90.0), transfer=Transfer(10.0))
    row = tables["requests"]
    assert row["first_token"].tolist() == [1.0] and row["finished"].tolist() == [13.0]
    assert row["replica"].tolist() == [1] and row["evictions"].tolist() == [1]


def test_a_copy_whose_receiver_fails_begins_anew():
    """Its engine fails at 3: prompt and token are computed again, and copied to the other until 14."""
    outage, transfer = Outage(1, 3.0, 90.0), Transfer(10.0)
    tables = fleet_of(Split(3, 1), Workload.of([10], [3]), outage, transfer=transfer, engines=3)
    row = tables["requests"]
    assert row["first_token"].tolist() == [1.0] and row["finished"].tolist() == [15.0]
    assert row["replica"].tolist() == [2]


@pytest.mark.parametrize("left", [0, 1])
def test_the_only_engine_left_of_a_split_serves_whole_requests_until_another_is_back(left):
    """As many as under a router that never splits; then prompts and outputs are apart again."""
    away = Outage(1 - left, 0.5, 50.0)
    rows = {"arrival": [0.0, 0.7, 3.0, 60.0]}
    split = fleet_of(Split(2, 1), Workload.of([10] * 4, [3] * 4, **rows), away, transfer=Transfer(10.0))
    whole = fleet_of(LeastLoaded(2), Workload.of([10] * 4, [3] * 4, **rows), away)
    ends = split["requests"]["finished"].tolist()
    assert ends[1:3] == whole["requests"]["finished"].tolist()[1:3]
    assert set(split["requests"]["replica"].tolist()[:3]) == {left}
    assert split["requests"]["replica"][3] == 1 and ends[3] == 60.0 + 1.0 + 10.0 + 2.0


@few
@given(data=st.data(), world=token_worlds(), name=st.sampled_from(sorted(set(ROUTERS) - {"online", "split"})))
def test_nobody_is_lost(data, world, name):
    """Whatever fails, everybody is served to the end or leaves by its own will, and no KV leaks."""
    outages = []
    for engine in range(world.engines):
        if data.draw(st.booleans(), label="fails"):
            start = data.draw(st.floats(0, 30), label="start")
            length = data.draw(st.floats(0.1, 30), label="length")
            outages.append(Outage(engine, start, start + length, data.draw(st.booleans(), label="drain")))
    router = Watched(make_router(name, world.plan, world.engines, draws(0)))
    fleet = world.fleet(router, outages=outages)
    fleet.run()
    rows = fleet.recorder.tables()["requests"]
    assert len(rows["id"]) == len(world.workload) and (rows["how"] >= 0).all()
    served = np.isin(rows["how"], (HOW[End.STOPPED], HOW[End.LIMIT]))
    wanted = np.minimum(world.workload.output, world.workload.limit)
    room = world.engine.longest - world.workload.prompt
    assert (rows["output"] == np.minimum(wanted, room))[served].all()
    for station in fleet.stations:
        blocks = station.replica.blocks
        assert blocks.free == blocks.total and not station.replica.occupied


def test_no_step_begins_while_it_is_away():
    workload = Workload.of([10] * 40, [5] * 40, arrival=np.arange(40) / 2)
    steps = fleet_of(LeastLoaded(2), workload, Outage(0, 4.5, 15.0))["steps"]
    begun = steps["start"][steps["replica"] == 0]
    assert not ((begun >= 5.0) & (begun < 15.0)).any() and (begun >= 15.0).any()


@pytest.mark.parametrize(
    ("outages", "said"),
    [
        ((Outage(2, 0.0, 1.0),), "there are 2, numbered from 0"),
        ((Outage(0, 2.0, 1.0),), "must end after it begins"),
        ((Outage(0, 0.0, 5.0), Outage(0, 4.0, 9.0)), "two outages of engine 0 at 4 s"),
    ],
)
def test_outages_that_cannot_be(outages, said):
    with pytest.raises(InputError, match=said):
        fleet_of(RoundRobin(2), Workload.of([10], [5]), *outages)


def test_a_send_keeps_the_prefill_engine_busy():
    """Two prompts, one a step: the second begins when the first is sent, which takes 0.25 s."""
    workload = Workload.of([10, 10, 10], [2, 2, 2], arrival=[0.0, 0.5, 0.6])
    ready = Transfer(0.0, 0.0, 0.25)
    tables = fleet_of(Split(2, 1), workload, transfer=ready)
    steps = tables["steps"]
    assert steps["start"][steps["replica"] == 0].tolist() == [0.0, 1.25]
    plain = fleet_of(Split(2, 1), workload)["steps"]
    assert plain["start"][plain["replica"] == 0].tolist() == [0.0, 1.0]


def test_nothing_is_paid_for_a_request_that_stays():
    workload = Workload.of([10] * 6, [4] * 6)
    dear = fleet_of(RoundRobin(2), workload, transfer=Transfer(0.0, 0.0, 9.0))
    free = fleet_of(RoundRobin(2), workload)
    assert np.array_equal(dear["requests"]["finished"], free["requests"]["finished"])
