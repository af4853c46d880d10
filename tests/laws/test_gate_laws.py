"""The law of "the same objects": a gate that is told what a simulation's engines did makes its moves."""

from contextlib import suppress
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from fleet_worlds import ROUTERS, Watched, draws, make_router
from headgate.core.dispatch import Dispatch, simulated_rooms
from headgate.core.ledger import Entry
from headgate.core.roster import Nothing
from headgate.live.route.gate.gate import ClassLimits, EngineState, Gate, Refused
from headgate.sim.fleet.fleet import FleetSimulator
from still_loop import Still
from token_fleets import TokenWorld, token_worlds

MEMBERS = [(name, {}) for name in ROUTERS if name != "split"] + [("split", {"prefill": 1})]
MEMBERS += [("online", {"router": "token-bucket", "every": 0.5, "half_life": 5.0})]
TOLD = ("arrived", "prompt_done", "ended", "left", "woken", "route")
some = settings(max_examples=max(10, settings.default.max_examples // 6))


def frozen(about):
    """What is known of a request at the moment; other things as they are."""
    if not isinstance(about, Entry):
        return about
    names = ("id", "kind", "prompt", "limit", "guess", "priority", "slo", "generated")
    return SimpleNamespace(**{name: getattr(about, name) for name in names})


class Reported(Nothing):
    """An engine that says what a simulated one said."""

    def __init__(self, waiting, kv_free):
        self.waiting, self.kv_free = waiting, kv_free


class Recorded(Dispatch):
    """What the engines of a simulation tell its router's side, and when the router is asked.

    It takes the place of the simulation's own: compiled engines would not see a method that is replaced.
    """

    def __init__(self, fleet: FleetSimulator, world: TokenWorld) -> None:
        self.calls, self._depth = [], 0
        self.tokens = []  # of everybody on an engine, at each call
        self.engines = []  # what each engine reports of itself, which llm-d reads, at each call
        router, roster = fleet.dispatch.router, fleet.dispatch.roster
        roles = [member.role for member in roster.replicas]
        rooms = simulated_rooms(router, world.engine.running)
        own = fleet.dispatch
        super().__init__(router, roles, rooms, tuple(roster.queues), own._send, own._refuse, own._set_wake)
        for member, before in zip(self.roster.replicas, roster.replicas, strict=True):
            member.inside = before.inside


def _listening(name):
    def tell(self, *about):
        if not self._depth:  # not what a router's answer brings about
            self.calls.append((name, *map(frozen, about)))
            roster = self.roster
            roster.catch_up()
            self.tokens.append({id: stay.request.generated for id, stay in roster.places.items()})
            self.engines.append([Reported(member.waiting, member.kv_free) for member in roster.replicas])
        self._depth += 1
        try:
            return getattr(Dispatch, name)(self, *about)
        finally:
            self._depth -= 1

    return tell


for _name in TOLD:
    setattr(Recorded, _name, _listening(_name))


def simulated(world: TokenWorld, name, more):
    router = Watched(make_router(name, world.plan, world.engines, draws(0), **more))
    fleet = world.fleet(router)
    recorded = fleet.dispatch = Recorded(fleet, world)
    roles = [slot.role for slot in recorded.roster.replicas]
    fleet.run()
    return recorded, router.log, roles


class Replay:
    """Feeds a gate."""

    def __init__(self, world: TokenWorld, name, more):
        self.router = Watched(make_router(name, world.plan, world.engines, draws(0), **more))
        rooms = simulated_rooms(self.router, world.engine.running)
        states = [EngineState(world.engine.running, rooms=rooms) for _ in range(world.engines)]
        kinds = [kind.name for kind in world.workload.kinds]
        limits = {kind: ClassLimits(2**31, inf) for kind in kinds}
        self.loop = Still()
        self.gate = Gate(
            self.router, kinds, states, limits=limits, watchdog=inf, clock=self.loop.time, loop=self.loop
        )
        self.tickets = {}  # by the simulation's number
        self.numbers = {}  # the simulation's number, by the gate's

    def feed(self, name, *about):
        request, gate = about[0], self.gate
        self.loop.now = next(each for each in reversed(about) if isinstance(each, float))
        if name == "arrived":
            self.numbers[gate._number] = request.id
            shown = {"guess": request.guess, "priority": request.priority, "slo": request.slo}
            with suppress(Refused):  # by the router, which the log tells
                self.tickets[request.id] = gate.arrive(request.kind, request.prompt, request.limit, **shown)
        elif name == "prompt_done":
            done = gate.parted if about[-1] is False else gate.first_token  # False: it does not stay
            done(self.tickets[request.id])
        elif name in ("ended", "left"):
            gate.end(self.tickets[request.id], about[-1], request.generated)
        elif name == "woken":
            gate.desk.woken(self.loop.now)
        else:
            gate.settle()

    def log(self):
        """As the simulation's, without the engines that were there from the start."""
        log = self.router.log[1:]
        return [(what, now, self.numbers.get(id, -1), *rest) for what, now, id, *rest in log]


@pytest.mark.parametrize("name, more", MEMBERS)
@some
@given(world=token_worlds())
def test_a_gate_makes_the_moves_of_the_simulator(name, more, world: TokenWorld):
    """To the last one, at the same times, and its router hears the same in the same order."""
    if name == "split" and world.engines < 2:
        return
    recorded, log, roles = simulated(world, name, more)
    replay = Replay(world, name, more)
    assert [slot.role for slot in replay.gate.roster.replicas] == roles
    told = zip(recorded.calls, recorded.tokens, recorded.engines, strict=True)
    for number, (call, tokens, engines) in enumerate(told):
        for id, made in tokens.items():
            replay.tickets[id].generated = made  # a live handler counts them
        for slot, reported in zip(replay.gate.roster.replicas, engines, strict=True):
            slot.inside = reported
        replay.feed(*call)
        if number % 50 == 0:
            assert replay.gate.check() == []
    assert replay.log() == log
    assert replay.gate.fallen is None and not replay.gate.tickets
    assert replay.gate.check() == []
