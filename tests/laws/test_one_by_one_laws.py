"""Engines that run one by one, where the router's choice is known beforehand, against all at once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_worlds import draws, make_router
from headgate.sim.fleet.lagged import Lagged
from token_fleets import TokenWorld, token_worlds
from worlds import POLICIES, PRICES, TILES, sharing

some = settings(max_examples=max(10, settings.default.max_examples // 3))


@st.composite
def open_worlds(draw: st.DrawFn) -> TokenWorld:
    """Requests come at their own times, some share prompts, some give up, some can never fit."""
    world = draw(token_worlds(tuple(POLICIES)))
    requests = world.workload.all_at_once() if world.workload.closed else world.workload
    cached = draw(st.booleans(), label="prefix cache")
    if cached:
        requests = replace(draw(sharing()), kinds=requests.kinds)
    cost = draw(st.sampled_from([PRICES, TILES]))
    policy = Lagged(world.policy) if draw(st.booleans(), label="asynchronous") else world.policy
    return world._replace(
        workload=requests, policy=policy, engine=world.engine._replace(cost=cost, prefix_cache=cached)
    )


@pytest.mark.parametrize("name", ["round-robin", "random"])
@some
@given(world=open_worlds(), seed=st.integers(0, 3), turn=st.sampled_from([1, 2, 64]), leases=st.booleans())
def test_one_by_one_is_all_at_once_to_the_last_bit(name, world: TokenWorld, seed, turn, leases):
    fleet = world.fleet(make_router(name, world.plan, world.engines, draws(seed)), leases)
    fleet.turn = turn
    fleet.run()
    together, watched = world.run(name, seed, leases)  # a router of another class is asked for every request
    told = sum(what == "arrived" for what, *_ in watched.log)
    assert told == (world.workload.prompt < world.engine.longest).sum()
    assert fleet.alone is not None and together.alone is None
    assert fleet.now == together.now
    ours, theirs = fleet.recorder.tables(), together.recorder.tables()
    for table, columns in theirs.items():
        assert [*ours[table]] == [*columns]
        for column, values in columns.items():
            same = np.array_equal(ours[table][column], values, equal_nan=values.dtype.kind == "f")
            assert same, (table, column)
