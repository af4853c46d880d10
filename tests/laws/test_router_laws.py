"""The laws every router must keep, for random plans, fleets and requests.

A world is dear to make and cheap to run, so every world meets every router.
"""

from collections import Counter

from hypothesis import given, note, settings
from hypothesis import strategies as st

from fleet_worlds import ROUTERS, Listed, Watched, World, draws, make_router, worlds
from headgate.core.fleet import Stage, room
from headgate_papers.network.network import Network

MEMBERS = [(name, {}) for name in ROUTERS if name != "split"] + [("split", {"prefill": 1})]
MEMBERS += [("service-level", {"gate": gate}) for gate in ("occupancy", "back-pressure")]
MEMBERS += [("online", {"router": "token-bucket", "every": 0.5, "half_life": 5.0})]
STORIES = (
    ["arrived", "left"],
    ["arrived", "moved whole", "prefilled", "finished"],
    ["arrived", "moved prefill", "prefilled", "left"],
    ["arrived", "moved prefill", "prefilled", "moved decode", "finished"],
)
BALANCE = ("round-robin", "random", "least-loaded", "least-pending", "power-of-two", "affinity", "split")
BALANCE += ("prefix-aware", "overlap", "llm-d")
half_as_many = settings(max_examples=settings.default.max_examples // 2)  # each world is met by all


def members(world: World):
    """Those that can route so few engines."""
    return [member for member in MEMBERS if member[0] != "split" or world.engines > 1]


def test_every_router_is_a_member():
    assert {name for name, _ in MEMBERS} == set(ROUTERS)


@half_as_many
@given(world=worlds(), seed=st.integers(0, 3))
def test_same_again(world: World, seed):
    for name, more in members(world):
        note(name)
        logs = [world.run(name, seed, **more)[1].log for _ in range(2)]
        assert logs[0] == logs[1]


@half_as_many
@given(world=worlds())
def test_all_laws(world: World):
    for name, more in members(world):
        note(f"{name} {more}")
        network, router = world.run(name, **more)
        everybody_is_served_once_or_leaves(world, network, router.log)
        slots_are_respected(world, router)
        if name not in BALANCE:  # those give every engine a line of its own
            first_come_first_served_inside_a_kind(router.log)


def everybody_is_served_once_or_leaves(world, network, log):
    """It ends, and everybody arrives once, is moved once per stage, and leaves once, in that order."""
    network.books.check()
    assert not any(network.fleet.queues.values()) and not network.fleet.handoff
    assert all(slot.prompts == slot.decodes == 0 for slot in network.fleet.replicas)
    stories: dict[int, list[str]] = {}
    for what, _, id, *rest in log:
        if what != "engines":
            stories.setdefault(id, []).append(f"moved {rest[1].value}" if what == "moved" else what)
    assert len(stories) == len(world.rows)
    assert all(story in STORIES for story in stories.values())


def slots_are_respected(world, router):
    """Counted from the log alone, by request and engine; roles may change, and what is inside then stays."""
    slots, log = world.plan.instance.pace.slots, router.log
    changes = [rest[0] for what, _, _, *rest in log if what == "engines"]
    rooms = [room(role, slots) for role in router.began]
    prompts: Counter[int] = Counter()
    decodes: Counter[int] = Counter()
    whole: set[int] = set()
    for what, _, id, *rest in log:
        if what == "moved":
            (decodes if rest[1] is Stage.DECODE else prompts)[rest[0]] += 1
            if rest[1] is Stage.WHOLE:
                whole.add(id)
        elif what == "prefilled":
            prompts[rest[0]] -= 1
            decodes[rest[0]] += id in whole
        elif what == "finished":
            decodes[rest[0]] -= 1
        elif what == "engines":
            rooms = [room(role, slots) for role in rest[0]]
        if what == "moved" or (not changes and what in ("prefilled", "finished")):
            engine = rest[0]
            assert 0 <= prompts[engine] <= rooms[engine].prompts or rest[-1] is Stage.DECODE
            assert 0 <= decodes[engine] <= rooms[engine].decodes or (changes and rest[-1] is not Stage.DECODE)
            assert prompts[engine] + decodes[engine] <= rooms[engine].total


def first_come_first_served_inside_a_kind(log):
    """Prompts of one kind start in the order of arrival."""
    kinds = {id: rest[0] for what, _, id, *rest in log if what == "arrived"}
    newest: dict[str, int] = {}
    for what, _, id, *rest in log:
        if what == "moved" and rest[1] is not Stage.DECODE:
            assert newest.get(kinds[id], -1) < id
            newest[kinds[id]] = id


CONSERVING = (
    "gate-and-route",
    "fi-wsp",
    "gi-wsp",
    "gf-wsp",
    "fg-sp",
    "density-first",
    "prioritize-and-route",
)


class Vigilant(Watched):
    """Looks at the fleet whenever the router moves nobody."""

    def route(self, fleet):
        routing = super().route(fleet)
        if not routing.moves and not routing.reject:
            role = self.inner.prompts_on
            served = getattr(self.inner.admission, "targets", fleet.queues)
            assert not fleet.idle[role] or not any(fleet.queues[kind] for kind in served)
            assert not fleet.handoff or not any(fleet.open.values())
        return routing


@half_as_many
@given(world=worlds())
def test_nobody_waits_beside_an_idle_place(world: World):
    """Routers that hold nobody back on purpose leave no place idle that somebody waits for."""
    for name in CONSERVING:
        note(name)
        inner = make_router(name, world.plan, world.engines, draws(0))
        Network(world.plan.instance, world.engines, Vigilant(inner), Listed(*world.rows)).run()


class Replaced(Watched):
    """Another router takes over at the given question."""

    def __init__(self, inner, fresh, when):
        super().__init__(inner)
        self.fresh, self.countdown = fresh, when

    def route(self, fleet):
        self.countdown -= 1
        if self.countdown == 0:
            self.fresh.adopt(fleet, self.inner)
            self.inner = self.fresh
        return super().route(fleet)


@half_as_many
@given(world=worlds(), when=st.integers(1, 60))
def test_take_over_half_way(world: World, when):
    """A fresh copy that adopts the fleet half-way serves everybody and over-fills no engine."""
    for name, more in members(world):
        note(name)
        first, second = (make_router(name, world.plan, world.engines, draws(s), **more) for s in (0, 1))
        router = Replaced(first, second, when)
        network = Network(world.plan.instance, world.engines, router, Listed(*world.rows))
        network.run()
        everybody_is_served_once_or_leaves(world, network, router.log)
        slots_are_respected(world, router)
