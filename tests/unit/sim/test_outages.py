"""Engines of a network that fail or drain: known stories."""

from math import inf

import pytest

from fleet_worlds import Listed, Watched, draws
from fluid_worlds import instance
from headgate.core.errors import InputError
from headgate.core.fleet import MIXED
from headgate.experiment.fleet import make_router
from headgate.methods.balance.balance import LeastLoaded
from headgate.methods.fluid.online import Online
from headgate.methods.fluid.planner import plan_fluid
from headgate.sim.fleet.fleet import Outage
from headgate_papers.network.counts import Window
from headgate_papers.network.network import Network
from headgate_papers.network.source import Poisson

ONE = instance(0.5, sizes=((300, 1000),), model=(0.02, 1e-4, 10.0))
ROW = (0.0, 0, 0.5, 10.0, inf, inf)  # half a second of prompt, a second of decode


def story(*outages):
    router = Watched(LeastLoaded(2))
    network = Network(ONE, 2, router, Listed(ROW), outages)
    network.run()
    network.books.check()
    return network, [(what, round(now, 9), *rest) for what, now, _, *rest in router.log if what != "engines"]


def test_a_request_begins_anew_elsewhere():
    network, log = story(Outage(0, 1.0, 9.0))
    assert [row[0] for row in log] == [
        "arrived",
        "moved",
        "prefilled",
        "returned",
        "moved",
        "prefilled",
        "finished",
    ]
    assert log[-1] == ("finished", 2.5, 1)
    counts = network.books.counts
    assert counts["lost_solo"] == counts["waiting_again"] == [1] and counts["prompts_started"] == [2]
    _, log = story(Outage(0, 0.2, 9.0))
    assert log[-1] == ("finished", 1.7, 1)


def test_what_runs_on_an_engine_that_drains_ends_there():
    _, log = story(Outage(0, 1.0, 9.0, drain=True))
    assert log[-1] == ("finished", 1.5, 0)


def test_with_all_engines_away_requests_wait():
    _, log = story(Outage(0, 1.0, 5.0), Outage(1, 0.5, 4.0))
    assert log[-1][:2] == ("finished", 5.5)


def test_outages_that_cannot_be():
    with pytest.raises(InputError, match="numbered from 0"):
        story(Outage(2, 0.0, 1.0))
    with pytest.raises(InputError, match="end after it begins"):
        story(Outage(0, 3.0, 1.0))


def revenue(router, start, engines, away=()):
    network = Network(start, engines, router, Poisson(start, engines, 0), away)
    first, last = network.run(400.0, [200.0])
    network.books.check()
    return Window(start, engines, first, last).revenue() * engines


def test_online_plans_for_the_engines_that_are_left():
    """A quarter of the fleet fails, with it engines that take prompts: as good as 15 that never were 20."""
    start, fewer = instance(1.0, 1.0), instance(20 / 15, 20 / 15)
    plan, away = plan_fluid(start), [Outage(engine, 100.0, 500.0) for engine in range(5)]
    assert Online(plan, 20, draws(0)).roles(20)[:5] == (MIXED,) * 5
    found = revenue(make_router("online", plan, 20), start, 20, away)
    known = revenue(make_router("gate-and-route+", plan_fluid(fewer), 15), fewer, 15)
    assert found > 0.98 * known
