"""The gate's books under any order of events: every router, engines that fail, reloads and swaps."""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet_worlds import ROUTERS, draws, make_router
from headgate.core.fleet import Stage
from headgate.core.policy import End
from headgate.live.route.gate.gate import ClassLimits, EngineState, Gate, Lapsed, Refused, TicketState
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.planner import plan_fluid
from still_loop import Still, placed

KINDS = ("rest", "code", "chat")
FLOWS = (
    Flow("rest", 30.0, 20.0, 0.5),
    Flow("code", 300.0, 100.0, 1.0, 0.1),
    Flow("chat", 60.0, 40.0, 2.0),
)
PLAN = plan_fluid(Instance(FLOWS, EnginePace(4, 64, 0.02, 1e-4, 40.0), TokenPrices(0.1, 0.2)))
routers = st.sampled_from([*ROUTERS, *("split", "service-level", "service-level-general", "online") * 2])
slots = st.integers(1, 4)
ENDS = st.sampled_from(End)
LIMITS = {kind: ClassLimits(3, 20.0) for kind in KINDS}


def router(name, engines, seed=0):
    more = {"prefill": max(1, engines // 2)} if name == "split" else {}
    return make_router(name, PLAN, max(2 if name == "split" else 1, engines), draws(seed), **more)


class Books(RuleBasedStateMachine):
    """Handlers of a live router, in any order, with engines that come, go and fail beneath them."""

    @initialize(name=routers, engines=st.integers(1, 4), slots=slots, prompts=st.integers(1, 3))
    def begin(self, name, engines, slots, prompts):
        self.loop = Still()
        states = [EngineState(slots, prompts) for _ in range(engines)]
        options = {"limits": LIMITS, "watchdog": inf, "clock": self.loop.time, "loop": self.loop}
        self.gate = Gate(router(name, engines), KINDS, states, draw=lambda: 0.5, **options)
        self.open = {}  # tickets whose handler has not ended, by number
        self.legs = {}  # number to (engine, stage) that its handler is busy with
        self.spent = set()  # (ticket, hand-over) that was used
        self.handovers = {}  # number to how often it parted

    # -- handlers ---------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from((*KINDS, "what?")),
        prompt=st.integers(0, 500),
        whole=st.booleans(),
        most_wait=st.sampled_from([inf, inf, 0.0, 2.0]),
    )
    def arrive(self, kind, prompt, whole, most_wait):
        try:
            ticket = self.gate.arrive(kind, prompt, 100, whole=whole, most_wait=most_wait)
        except Refused as refused:
            assert refused.status == (429 if self.up() else 503) and 1 <= refused.retry_after <= 60
            return
        assert ticket.kind == (kind if kind in KINDS else "rest")
        self.open[ticket.id] = ticket
        if ticket.state is TicketState.QUEUED:
            assert len(self.gate.roster.queues[ticket.kind]) <= LIMITS[ticket.kind].queue

    def look(self, ticket):
        """Its handler looks whether there is an answer."""
        try:
            move = placed(self.gate, ticket)
        except Refused:
            assert ticket.state is TicketState.GONE and ticket.id not in self.legs
            del self.open[ticket.id]
            return
        except Lapsed:
            assert ticket.whole
            self.look(ticket)
            return
        if move is None:
            return
        assert ticket.id not in self.legs, "sent twice"
        assert move.request == ticket.id and move.replica == ticket.engine
        assert not (ticket.whole and move.stage is not Stage.WHOLE), "split although it must not be"
        if move.stage is Stage.DECODE:
            key = ticket.id, self.handovers[ticket.id]
            assert key not in self.spent, "the same KV parameters twice"
            self.spent.add(key)
        self.legs[ticket.id] = move.replica, move.stage

    def choose(self, data, *states):
        for ticket in [*self.open.values()]:
            if ticket.id not in self.legs:
                self.look(ticket)
        found = [each for each in self.open.values() if each.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def first_token(self, data):
        ticket = self.choose(data, TicketState.PREFILLING)
        if ticket is not None:
            self.gate.first_token(ticket)
            assert ticket.state is TicketState.DECODING

    @rule(data=st.data(), lease=st.sampled_from([inf, 5.0]))
    def parted(self, data, lease):
        ticket = self.choose(data, TicketState.PREFILLING)
        if ticket is not None and self.legs[ticket.id][1] is Stage.PREFILL:
            self.gate.parted(ticket, lease)
            del self.legs[ticket.id]
            self.handovers[ticket.id] = self.handovers.get(ticket.id, 0) + 1

    @rule(data=st.data(), whole=st.sampled_from([None, True]))
    def back(self, data, whole):
        ticket = self.choose(data, TicketState.PREFILLING, TicketState.DECODING, TicketState.HANDED_OVER)
        if ticket is not None:
            self.gate.back(ticket, whole)
            self.legs.pop(ticket.id, None)
            assert next(iter(self.gate.roster.queues[ticket.kind])) == ticket.id

    @rule(data=st.data(), how=ENDS, again=st.booleans())
    def end(self, data, how, again):
        ticket = self.choose(data, *TicketState)
        if ticket is not None:
            twice = self.gate.counts["ended_twice"]
            self.gate.end(ticket, how, 5)
            if again:
                self.gate.end(ticket, how, 5)
            assert self.gate.counts["ended_twice"] == twice + again
            self.legs.pop(ticket.id, None)
            del self.open[ticket.id]

    # -- the world --------------------------------------------------------------------------------------

    def up(self):
        return [id for id, each in self.gate.desk.engines.items() if each.up]

    @rule()
    def turn(self):
        self.loop.turn()

    @rule(seconds=st.sampled_from([0.5, 4.0, 25.0]))
    def wait(self, seconds):
        self.loop.go(self.loop.now + seconds)

    @precondition(lambda self: self.gate.desk.engines)
    @rule(data=st.data(), up=st.booleans())
    def up_or_down(self, data, up):
        self.gate.set_engine(data.draw(st.sampled_from([*self.gate.desk.engines])), up=up)

    @precondition(lambda self: self.gate.desk.engines)
    @rule(
        data=st.data(),
        slots=slots,
        most=st.integers(0, 6),
        role=st.sampled_from(["auto", "auto", "any", "mixed", "solo", "prefill", "decode"]),
    )
    def change(self, data, slots, most, role):
        id = data.draw(st.sampled_from([*self.gate.desk.engines]))
        self.gate.set_engine(id, slots=slots, most=most, role=role)

    @precondition(lambda self: len(self.gate.desk.engines) < 6)
    @rule(slots=slots, prompts=st.integers(1, 3))
    def add(self, slots, prompts):
        on = {stay.replica for stay in self.gate.roster.places.values()}
        id = self.gate.add_engine(EngineState(slots, prompts))
        assert id not in on
        assert len(self.gate.roster.replicas) <= 12

    @precondition(lambda self: self.gate.desk.engines)
    @rule(data=st.data())
    def retire(self, data):
        self.gate.retire(data.draw(st.sampled_from([*self.gate.desk.engines])))

    @rule(name=routers, seed=st.integers(0, 2))
    def swap(self, name, seed):
        self.gate.swap(router(name, len(self.gate.roster.replicas), seed))

    @rule()
    def reload(self):
        self.gate.set_classes(KINDS, LIMITS)

    # -- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def sound(self):
        if not hasattr(self, "gate"):
            return
        assert self.gate.check() == []
        assert self.gate.fallen is None
        for id, (engine, _) in self.legs.items():  # every upstream connection belongs to a request on books
            assert self.gate.roster.places[id].replica == engine

    def teardown(self):
        """Whatever has happened: with an engine there everybody is served or refused, and nothing is left."""
        if not hasattr(self, "gate"):
            return
        self.gate.add_engine(EngineState(8, 8))
        for _ in range(100):
            self.loop.go(self.loop.now + 5.0)
            for ticket in [*self.open.values()]:
                if ticket.id not in self.legs:
                    self.look(ticket)
                elif self.legs[ticket.id][1] is Stage.PREFILL and ticket.state is TicketState.PREFILLING:
                    self.gate.parted(ticket, 30.0)
                    del self.legs[ticket.id]
                    self.handovers[ticket.id] = self.handovers.get(ticket.id, 0) + 1
                else:
                    self.gate.end(ticket, End.STOPPED, 3)
                    del self.open[ticket.id], self.legs[ticket.id]
            if not self.open:
                break
        assert not self.open and not self.gate.tickets and self.gate.check() == []
        assert all(slot.load == 0 for slot in self.gate.roster.replicas)
        assert self.gate.fallen is None


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=settings.default.max_examples * 2, stateful_step_count=60)
