"""Engines that fail, drain and come back under every router: nobody is lost, the books balance."""

from hypothesis import given, note, settings
from hypothesis import strategies as st
from test_router_laws import members

from fleet_worlds import Listed, Watched, World, draws, make_router, worlds
from headgate.sim.fleet.fleet import Outage
from headgate_papers.network.network import Network

fewer = settings(max_examples=max(10, settings.default.max_examples // 3))


@st.composite
def outages(draw: st.DrawFn, engines: int) -> list[Outage]:
    """Up to two for each engine, one after the other; all engines may be away at once."""
    found = []
    for engine in range(engines):
        now = 0.0
        for _ in range(draw(st.integers(0, 2))):
            start = now + draw(st.sampled_from([0.0, 0.4, 3.0, 11.0]))
            now = start + draw(st.sampled_from([0.1, 2.0, 30.0]))
            found.append(Outage(engine, start, now, draw(st.booleans())))
            now += 0.05
    return found


@fewer
@given(world=worlds(), data=st.data())
def test_nobody_is_lost(world: World, data):
    away = data.draw(outages(world.engines))
    for name, more in members(world):
        note(f"{name} {more}")
        router = Watched(make_router(name, world.plan, world.engines, draws(0), **more))
        network = Network(world.plan.instance, world.engines, router, Listed(*world.rows), away)
        network.run()
        network.books.check()
        assert not network.fleet.places and not network.fleet.waiting
        assert all(slot.load == 0 for slot in network.fleet.replicas)
        ends = [id for what, _, id, *_ in router.log if what in ("finished", "left")]
        assert sorted(ends) == list(range(len(world.rows)))
        nothing_is_sent_to_one_that_is_away(router.log, away)


def nothing_is_sent_to_one_that_is_away(log, away):
    for what, now, _, *rest in log:
        if what == "moved":
            assert not any(each.engine == rest[0] and each.start < now < each.end for each in away)
