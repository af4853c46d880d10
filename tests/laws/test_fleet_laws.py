"""The laws of a fleet at token level: every router before engines under any policy, with hand-over of KV."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_worlds import ROUTERS
from headgate.core.fleet import DECODE, SOLO, STAY, Move, RoutePolicy, Routing, Stage
from headgate.methods.balance.balance import LeastLoaded
from headgate.methods.fluid.online import INNER
from headgate.record.tables import ENDS
from headgate.stats.gaps import Gaps
from headgate.stats.metrics import summarise
from token_fleets import TokenWorld, token_worlds

MEMBERS = [(name, {}) for name in ROUTERS if name != "split"] + [("split", {"prefill": 1})]
MEMBERS += [("online", {"router": "token-bucket", "every": 0.5, "half_life": 5.0})]
LOOKING = [("online", {"router": router, "every": 0.1, "half_life": 1.0}) for router in sorted(INNER)]
SERVED = ("arrived", "moved whole", "prefilled", "finished")
PARTED = ("arrived", "moved prefill", "prefilled", "moved decode", "finished")
STORIES = {(*SERVED[:n], "left") for n in (1, 2, 3)} | {SERVED}
STORIES |= {(*PARTED[:n], "left") for n in (2, 3, 4)} | {PARTED}
STORIES |= {("arrived", "moved prefill", "finished")}  # its first token was its last
some = settings(max_examples=max(10, settings.default.max_examples // 6))


def members(world: TokenWorld):
    """Those that can route so few engines."""
    return [member for member in MEMBERS if member[0] != "split" or world.engines > 1]


@pytest.mark.parametrize("name, more", MEMBERS)
@some
@given(world=token_worlds())
def test_all_laws(name, more, world: TokenWorld):
    if (name, more) not in members(world):
        return
    fleet, router = world.run(name, **more)
    run = world.tables(fleet)
    everybody_leaves_once(world, run, router.log)
    slots_are_respected(world, fleet, router.log)
    nothing_is_left_behind(fleet)
    every_token_has_its_time(world, run)
    copies_take_their_time(world, run, router.log)


def everybody_leaves_once(world, run, log):
    """One row each, one story each, and nobody has more tokens than it should."""
    requests, workload = run.requests, world.workload
    assert requests["id"].tolist() == list(range(len(workload)))
    assert (requests["how"] >= 0).all()
    stories: dict[int, tuple[str, ...]] = {}
    for what, _, id, *rest in log:
        if what == "engines":
            continue
        told = f"moved {rest[1].value}" if what == "moved" else what
        stories[id] = (*stories.get(id, ()), told)
    refused = workload.prompt >= world.engine.longest
    assert sorted(stories) == np.flatnonzero(~refused).tolist()
    assert set(stories.values()) <= STORIES
    whole = np.minimum(np.minimum(workload.output, workload.limit), world.engine.longest - workload.prompt)
    done = run.completed()
    assert (requests["output"][done] == whole[done]).all()
    assert (requests["output"][~done] <= np.maximum(whole[~done], 0)).all()


def slots_are_respected(world, fleet, log):
    """No step holds more than the engine's slots, and the router kept to the room of each role."""
    steps = fleet.recorder.tables()["steps"]
    assert (steps["decodes"] <= world.engine.running).all()
    assert (steps["decodes"] + steps["prefill"] <= world.engine.batch_tokens).all()
    changes = [rest[0] for what, _, _, *rest in log if what == "engines"]
    roles = [replica.role for replica in fleet.dispatch.roster.replicas]
    prompts: Counter[int] = Counter()
    for what, _, id, *rest in log:
        if what == "moved" and rest[1] is not Stage.DECODE:
            assert changes or roles[rest[0]] not in (SOLO, DECODE)
            prompts[id] += 1
    assert all(count == 1 for count in prompts.values())


def nothing_is_left_behind(fleet):
    """All memory is free again and all books are empty."""
    roster = fleet.dispatch.roster
    assert not roster.waiting and not roster.handoff and not any(roster.prefilling.values())
    assert fleet.working == 0
    for slot, station in zip(roster.replicas, fleet.stations, strict=True):
        assert slot.load == 0 and not any(slot.prefilling.values()) and not any(slot.decoding.values())
        replica = station.replica
        assert not replica.occupied
        # KV that is free again is given back when its engine is next looked at, which may be never
        waiting = [*station.freed, *station.unneeded]
        station.begin(fleet.now)
        assert replica.blocks.free == replica.blocks.total, waiting
        assert not any(replica.blocks.growers)


def every_token_has_its_time(world, run):
    """The gaps between tokens of one request add up, whichever engines made them."""
    requests, gaps = run.requests, Gaps(run).lists()
    for row in np.flatnonzero(run.completed()).tolist():
        assert len(gaps[row]) == requests["output"][row] - 1
        assert min(gaps[row], default=1.0) > 0
        last = requests["first_token"][row] + sum(gaps[row])
        assert last == pytest.approx(requests["finished"][row], abs=1e-6)
    assert set(requests["how"].tolist()) <= set(range(len(ENDS)))
    if run.completed().any():
        assert summarise(run, "all").engine.replicas == world.engines


def copies_take_their_time(world, run, log):
    """Whose KV goes to another engine has no second token before it can be there."""
    at: dict[int, int] = {}
    gaps, evicted = Gaps(run).lists(), run.requests["evictions"]
    for what, _, id, *rest in log:
        if what == "moved" and rest[1] is Stage.PREFILL:
            at[id] = rest[0]
        elif what == "moved" and rest[1] is Stage.DECODE and rest[0] != at[id] and not evicted[id]:
            copied = world.transfer.seconds(int(world.workload.prompt[id]))
            assert not gaps[id] or gaps[id][0] >= copied - 1e-9


@pytest.mark.parametrize("name, more", MEMBERS + LOOKING)
@some
@given(world=token_worlds(), seed=st.integers(0, 3))
def test_same_again_and_leases_change_nothing(name, more, world: TokenWorld, seed):
    """The same history twice; and asking policies at every step gives the same times to the last bit."""
    if name == "split" and world.engines == 1:
        return
    runs = [world.run(name, seed, leases, **more) for leases in (True, True, False)]
    first, second, asked = (fleet.recorder.tables() for fleet, _ in runs)
    for table in first:
        same(first[table], second[table])
    same(first["requests"], asked["requests"])
    if name == "online":  # what it estimated and planned, and when
        plans = [(router.inner.plan, router.inner.engines, router.inner.gauges()) for _, router in runs]
        assert plans[0] == plans[1] == plans[2]


class Reads(LeastLoaded):
    """Notes what a router can read of engines whenever it is asked."""

    def __init__(self, engines):
        super().__init__(engines)
        self.read = []

    def route(self, fleet):
        fleet.catch_up()
        tokens = {id: place.request.generated for id, place in fleet.places.items()}
        self.read.append((fleet.now, tokens, [(each.waiting, each.kv_free) for each in fleet.replicas]))
        return super().route(fleet)


class Refuses(RoutePolicy):
    """Notes when it is asked. It refuses every second request and keeps others back while engines work."""

    sends_at_once = True

    def __init__(self, engines):
        self.read = []

    def route(self, fleet):
        self.read.append(fleet.now)
        waiting = [id for queue in fleet.queues.values() for id in queue]
        engine = min(fleet.replicas, key=lambda each: each.load)
        if refused := tuple(id for id in waiting if id % 2):
            return Routing(reject=refused)
        return STAY if engine.load else Routing((Move(waiting[0], engine.id),))


@pytest.mark.parametrize("kind", [Reads, Refuses])
@some
@given(world=token_worlds())
def test_routers_read_the_same_of_engines_whether_or_not_these_jump_over_steps(kind, world: TokenWorld):
    routers = [kind(world.engines), kind(world.engines)]
    for router, leases in zip(routers, (True, False), strict=True):
        world.fleet(router, leases).run()
    assert routers[0].read == routers[1].read


def same(ours, theirs):
    for column, values in ours.items():
        assert np.array_equal(values, theirs[column], equal_nan=values.dtype.kind == "f"), column
