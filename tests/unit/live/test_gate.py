"""The gate, on a clock that stands still unless it is moved: places, refusals, falls, and the books."""

import asyncio
from math import inf

import pytest

from headgate.core.errors import InputError, RunError
from headgate.core.fleet import ANY, CLOSED, DECODE, STAY, Move, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Slo
from headgate.live.route.gate.gate import ClassLimits, EngineState, Gate, Lapsed, Refused, TicketState
from headgate.live.route.gate.queue import assign, live_room
from headgate.methods.balance.balance import LeastLoaded, RoundRobin
from headgate.methods.split.split import Split
from still_loop import Still, placed


def gate(router=None, engines=2, slots=2, kinds=("chat",), prompts=1, **more):
    loop = Still()
    states = [EngineState(slots, prompts) for _ in range(engines)]
    made = Gate(
        router or LeastLoaded(engines),
        kinds,
        states,
        clock=loop.time,
        loop=loop,
        draw=lambda: 0.5,
        **more,
    )
    return made, loop


def sound(made):
    assert made.check() == []


def test_a_whole_request():
    made, _loop = gate()
    ticket = made.arrive("chat", 10, 100)
    assert placed(made, ticket) == Move(0, 0, Stage.WHOLE)
    assert ticket.state is TicketState.PREFILLING and made.roster.replicas[0].prompts == 1
    made.first_token(ticket)
    made.first_token(ticket)
    assert ticket.state is TicketState.DECODING and made.roster.replicas[0].decodes == 1
    sound(made)
    made.end(ticket, End.STOPPED, 7)
    assert ticket.generated == 7 and made.books()["engines"][0]["decodes"] == 0
    made.end(ticket, End.ABORTED)
    assert made.counts["ended_twice"] == 1
    sound(made)


def test_a_router_learns_patience_from_requests_whose_time_in_the_queue_is_over():
    class Listens(RoutePolicy):
        def __init__(self):
            self.ends = []

        def route(self, fleet):
            return STAY

        def left(self, request, now, how):
            self.ends.append(how)

    router = Listens()
    made, loop = gate(router, limits={"chat": ClassLimits(8, 5.0)})
    made.arrive("chat", 10, 100)
    loop.go(6.0)
    assert made.refused == {"queue time": 1}
    assert router.ends == [End.ABANDONED]


def test_the_least_loaded_engine_takes_it_and_full_ones_make_it_wait():
    made, loop = gate(slots=2)  # and one more inside each engine's own queue
    tickets = [made.arrive("chat", 10, 100) for _ in range(7)]
    assert [placed(made, ticket).replica for ticket in tickets[:6]] == [0, 1, 0, 1, 0, 1]
    assert tickets[6].state is TicketState.QUEUED
    made.end(tickets[0], End.STOPPED)
    assert tickets[6].state is TicketState.QUEUED  # routed with the other events of this turn
    loop.turn()
    assert placed(made, tickets[6]).replica == 0
    sound(made)


def test_waiting_in_a_real_loop():
    async def story():
        made = Gate(LeastLoaded(1), ["chat"], [EngineState(1)])
        first, second, third = (made.arrive("chat", 1, 1) for _ in range(3))
        assert (await made.place(first)).replica == (await made.place(second)).replica == 0
        waiting = asyncio.create_task(made.place(third))
        await asyncio.sleep(0)
        assert not waiting.done()
        made.end(first, End.STOPPED)
        assert await waiting == Move(2, 0)
        made.end(second, End.STOPPED)
        made.end(third, End.STOPPED)
        fourth = made.arrive("chat", 1, 1)
        made.end(fourth, End.ABORTED)
        with pytest.raises(RunError, match="waits for nothing"):
            fourth.answer = None
            await made.place(fourth)
        return made

    made = asyncio.run(story())
    assert made.check() == [] and not made.tickets


def test_split_over_two_engines_and_a_deadline():
    made, loop = gate(Split(2, 1))
    ticket = made.arrive("chat", 10, 100)
    assert placed(made, ticket) == Move(0, 0, Stage.PREFILL)
    made.parted(ticket, lease=10.0)
    assert ticket.state is TicketState.HANDED_OVER
    loop.turn()
    assert placed(made, ticket) == Move(0, 1, Stage.DECODE)
    made.end(ticket, End.LIMIT, 3)
    made.set_engine(1, up=False)
    made.set_engine(0, slots=1)
    loop.turn()
    sound(made)


def test_a_request_is_split_only_where_another_engine_of_the_group_is_up():
    made, loop = gate(Split(3, 1), engines=3)
    for engine, group in enumerate("aab"):
        made.set_engine(engine, group=group)

    def stage():
        ticket = made.arrive("chat", 8, 100)
        move = placed(made, ticket)
        made.end(ticket, End.STOPPED)
        loop.turn()
        return move.replica, move.stage

    assert stage() == (0, Stage.PREFILL)
    made.set_engine(1, up=False)
    assert stage() == (0, Stage.WHOLE)  # engine 2 is up, and could not read its KV
    made.set_engine(1, up=True)
    assert stage() == (0, Stage.PREFILL)
    sound(made)


def test_kv_that_lapses_is_given_up_and_the_request_is_sent_whole():
    made, loop = gate(Split(2, 1), slots=1)
    fill = [made.arrive("chat", 1, 1) for _ in range(4)]
    for ticket in fill[:2]:
        placed(made, ticket)
        made.parted(ticket, lease=10.0)
    loop.turn()
    assert [ticket.state for ticket in fill[:2]] == [TicketState.DECODING] * 2
    last = fill[2]
    placed(made, last)
    made.parted(last, lease=10.0)
    loop.turn()
    assert last.state is TicketState.HANDED_OVER
    loop.go(6.5)
    assert last.whole and made.counts["lapsed"] == 1
    with pytest.raises(Lapsed):
        placed(made, last)
    assert placed(made, last) == Move(2, 0, Stage.WHOLE)
    sound(made)


def test_a_failed_leg_goes_to_the_head_of_the_queue_and_elsewhere():
    made, loop = gate(engines=2, slots=1)
    tickets = [made.arrive("chat", 1, 1) for _ in range(6)]
    first = tickets[0]
    assert placed(made, first).replica == 0
    made.back(first)
    assert list(made.roster.queues["chat"]) == [0, 4, 5] and first.tries == 1
    for ticket in tickets[1:4]:
        made.end(ticket, End.STOPPED)
    loop.turn()
    assert placed(made, first).replica == 1
    rest = [made.arrive("chat", 1, 1) for _ in range(4)]
    with pytest.raises(RunError, match="on no engine"):
        made.back(rest[-1])
    sound(made)


def test_full_queues_refuse_with_the_time_they_take():
    made, loop = gate(engines=1, slots=1, limits={"chat": ClassLimits(queue=1, ttl=30.0)})
    tickets = [made.arrive("chat", 1, 1) for _ in range(3)]
    for turn in range(40):  # one is served every ten seconds
        loop.go(10.0 * (turn + 1))
        made.end(tickets[turn], End.STOPPED)
        loop.turn()
        tickets.append(made.arrive("chat", 1, 1))
    with pytest.raises(Refused) as refused:
        made.arrive("chat", 1, 1)
    assert (refused.value.status, refused.value.reason) == (429, "queue full")
    assert 16 <= refused.value.retry_after <= 20  # it would be the second in the queue
    assert made.books()["refused"] == {"queue full": 1}
    with pytest.raises(Refused, match="wait too long"):
        made.set_classes(["chat"], {})
        made.arrive("chat", 1, 1, most_wait=0.0)
    sound(made)


def test_nobody_waits_longer_than_the_queue_allows():
    made, loop = gate(engines=1, slots=1, limits={"chat": ClassLimits(ttl=5.0)})
    tickets = [made.arrive("chat", 1, 1) for _ in range(3)]
    loop.go(6.0)
    with pytest.raises(Refused, match="429 queue time"):
        placed(made, tickets[2])
    made.set_engine(0, up=False)
    late = made.arrive("chat", 1, 1)
    loop.go(12.0)
    with pytest.raises(Refused, match="503 no engines"):
        placed(made, late)
    made.end(late, End.ABORTED)
    assert made.counts["ended_twice"] == 0
    sound(made)


def test_unknown_classes_are_the_default():
    made, _loop = gate(kinds=("rest", "chat"))
    assert made.arrive("what?", 1, 1).kind == "rest"
    made.set_classes(["rest", "chat", "new"], {})
    assert made.arrive("new", 1, 1).kind == "new"
    sound(made)


class Bad(RoutePolicy):
    """Does what it is told to do wrong at the nth question."""

    def __init__(self, fault, after):
        self.fault, self.after = fault, after

    def route(self, fleet):
        self.after -= 1
        waiting = next((id for queue in fleet.queues.values() for id in queue), None)
        if self.after > 0:
            return (
                STAY
                if waiting is None or not fleet.idle[ANY]
                else Routing((Move(waiting, fleet.idle[ANY][0]),))
            )
        return self.fault(fleet)


def raises(fleet):
    raise ValueError("oh dear")


FAULTS = {
    "raises": raises,
    "no routing": lambda fleet: None,
    "unknown request": lambda fleet: Routing((Move(99, 0),)),
    "unknown engine": lambda fleet: Routing((Move(next(iter(fleet.queues["chat"])), 9),)),
    "decode of one that waits": lambda fleet: Routing(
        (Move(next(iter(fleet.queues["chat"])), 0, Stage.DECODE),)
    ),
    "no kind of move": lambda fleet: Routing((Move("x", "y", "z"),)),
    "refuses strangers": lambda fleet: Routing((), (77,)),
    "unknown role": lambda fleet: Routing(roles=((17, "mixed"),), moves=(Move(99, 0),)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_router_is_disabled_once_and_nobody_is_lost(fault, caplog):
    made, _loop = gate(Bad(FAULTS[fault], 3))
    tickets = [made.arrive("chat", 1, 1) for _ in range(5)]
    assert made.fallen is not None and made.counts["disabled"] == 1
    assert caplog.text.count("is disabled, least-loaded takes over") == 1
    assert [placed(made, ticket).stage for ticket in tickets] == [Stage.WHOLE] * 5
    loads = [slot.load for slot in made.roster.replicas]
    assert made.router.loads.load == loads and sum(loads) == 5
    sound(made)
    made.swap(LeastLoaded(2))
    assert made.fallen is None


def test_a_router_that_moves_nobody_is_disabled():
    made, loop = gate(Bad(lambda fleet: STAY, 2), limits={"chat": ClassLimits(ttl=inf)}, watchdog=20.0)
    tickets = [made.arrive("chat", 1, 1) for _ in range(3)]
    loop.go(19.0)
    assert made.fallen is None and tickets[2].state is TicketState.QUEUED
    loop.go(45.0)
    assert "moved nobody for 20 s" in made.fallen
    assert all(ticket.state is TicketState.PREFILLING for ticket in tickets)


def test_a_gate_may_hold_a_class_back_as_long_as_its_queue_allows():
    made, loop = gate(Bad(lambda fleet: STAY, 2), limits={"chat": ClassLimits(ttl=90.0)}, watchdog=20.0)
    tickets = [made.arrive("chat", 1, 1) for _ in range(3)]
    loop.go(95.0)
    assert made.fallen is None
    with pytest.raises(Refused, match="queue time"):
        placed(made, tickets[2])


class DeafOnce(LeastLoaded):
    def finished(self, request, replica, now):
        raise KeyError(request.id)


class Handing(Split):
    """The same split by a router that keeps nothing: the oldest hand-over, any engine that decodes."""

    def __init__(self):
        super().__init__(4, 2)

    def route(self, fleet):
        if fleet.handoff and fleet.open[DECODE]:
            return Routing((Move(next(iter(fleet.handoff)), fleet.open[DECODE][0], Stage.DECODE),))
        found = self._prompts.next(fleet)
        return STAY if found is None else Routing((Move(*found, Stage.PREFILL),))


def test_hooks_that_raise_are_guarded_too():
    made, _loop = gate(DeafOnce(2))
    one = made.arrive("chat", 1, 1)
    made.end(one, End.STOPPED)
    assert "KeyError" in made.fallen
    assert made.roster.replicas[0].load == 0 and not made.tickets
    assert placed(made, made.arrive("chat", 1, 1)).stage is Stage.WHOLE


def test_a_fall_back_takes_those_between_two_engines():
    made, loop = gate(Split(2, 1), slots=4)
    one = made.arrive("chat", 1, 1)
    made.parted(one, lease=100.0)
    made.swap(LeastLoaded(2))
    loop.turn()
    assert placed(made, one) == Move(0, 0, Stage.DECODE)  # where its KV is
    made.end(one, End.STOPPED)
    sound(made)
    assert made.router.loads.load == [0, 0]


@pytest.mark.parametrize("how", ["drained", "retired", "drained while its prompt runs"])
@pytest.mark.parametrize("routes", [lambda: Split(4, 2), Handing])
def test_hand_overs_from_a_drained_engine_are_placed_first(routes, how):
    """Two engines do prompts, the others are full; the later hand-over is the drained engine's."""
    made, loop = gate(routes(), engines=4, slots=1, prompts=4)
    full = [made.arrive("chat", 1, 1) for _ in range(4)]  # a slot and one more inside, on each of two engines
    for ticket in full:
        placed(made, ticket)
        made.parted(ticket)
    loop.turn()
    assert [ticket.state for ticket in full] == [TicketState.DECODING] * 4
    stays, drained = (made.arrive("chat", 1, 1) for _ in range(2))
    assert [placed(made, ticket).replica for ticket in (stays, drained)] == [0, 1]
    made.parted(stays, lease=50.0)
    if how != "drained while its prompt runs":
        made.parted(drained, lease=50.0)
    made.retire(1) if how == "retired" else made.set_engine(1, up=False)
    if how == "drained while its prompt runs":
        made.parted(drained, lease=50.0)
    loop.turn()
    assert stays.state is drained.state is TicketState.HANDED_OVER
    sound(made)
    made.end(full[0], End.STOPPED)
    loop.turn()
    assert placed(made, drained).stage is Stage.DECODE and stays.state is TicketState.HANDED_OVER
    for ticket in full[1:]:
        made.end(ticket, End.STOPPED)
    loop.turn()
    assert placed(made, stays).stage is Stage.DECODE
    for ticket in (stays, drained):
        made.end(ticket, End.STOPPED)
    loop.turn()
    sound(made)
    assert made.fallen is None and not any(made.router._outputs.load)


def test_engines_come_and_go():
    made, loop = gate(engines=1, slots=1)
    first = made.arrive("chat", 1, 1)
    assert made.add_engine(EngineState(4)) == 1
    loop.turn()
    assert placed(made, made.arrive("chat", 1, 1)).replica == 1
    made.retire(0)
    loop.turn()
    assert made.books()["retiring"] == {0: 1}
    assert made.add_engine(EngineState(4)) == 2  # engine 0 is not empty yet
    made.end(first, End.STOPPED)
    loop.turn()
    assert made.add_engine(EngineState(4)) == 0
    with pytest.raises(InputError, match="no engine 7"):
        made.set_engine(7, up=False)
    with pytest.raises(InputError, match="at least 1 slot"):
        made.set_engine(1, slots=0)
    assert made.desk.engines[1].slots == 4
    sound(made)


def test_requests_given_to_an_engine_that_goes_down_are_given_to_another():
    made, loop = gate(engines=2, slots=1)
    tickets = [made.arrive("chat", 1, 1) for _ in range(6)]  # 4 placed, one waits for each engine
    made.set_engine(0, up=False)
    loop.turn()
    for ticket in tickets[:4]:
        if ticket.engine == 1:
            made.end(ticket, End.STOPPED)
    loop.turn()
    assert [ticket.engine for ticket in tickets[4:]] == [1, 1]
    assert made.roster.replicas[0].room == CLOSED and made.roster.replicas[0].load == 2
    sound(made)


def test_rooms_and_roles():
    assert live_room("any", 16, 2, deep=False) == (2, 16, 16)
    assert live_room("any", 16, 2, deep=True) == (17, 17, 17)
    assert live_room("mixed", 16, 1, deep=False, most=12) == (1, 11, 12)
    assert live_room("solo", 16, 1, deep=False) == (0, 16, 16)
    engines = {0: EngineState(4), 1: EngineState(4), 2: EngineState(4, role="solo"), 3: EngineState(4)}
    engines[3].up = False
    now = {0: "solo", 1: "mixed", 2: "solo", 3: "mixed"}
    assert assign(engines, now, ("mixed", "solo", "solo")) == {0: "solo", 1: "mixed", 2: "solo", 3: "mixed"}
    assert assign(engines, now, ("mixed", "mixed", "solo")) == {0: "mixed", 1: "mixed", 2: "solo", 3: "mixed"}


def test_the_router_may_ask_to_be_woken():
    class Sleepy(LeastLoaded):
        def route(self, fleet):
            return super().route(fleet) if fleet.now >= 2.0 else Routing(wake=2.0)

    made, loop = gate(Sleepy(2))
    ticket = made.arrive("chat", 1, 1)
    assert ticket.state is TicketState.QUEUED
    loop.go(2.5)
    assert ticket.state is TicketState.PREFILLING


def test_wake_ups_in_the_past_mean_soon():
    class Late(LeastLoaded):
        def __init__(self, engines):
            super().__init__(engines)
            self.asked = 0

        def route(self, fleet):
            self.asked += 1
            return super().route(fleet) if self.asked > 3 else Routing(wake=fleet.now - 1.0)

    made, loop = gate(Late(2))
    ticket = made.arrive("chat", 1, 1)
    loop.go(0.1)
    assert ticket.state is TicketState.PREFILLING and made.fallen is None


def test_the_largest_weight_goes_first_and_background_work_takes_no_place_from_others():
    made, loop = gate(engines=1, slots=2, kinds=("gold", "chat", "batch"))  # three at once
    batch = [made.arrive("batch", 10, 100, slo=Slo(background=True)) for _ in range(4)]
    chat = [made.arrive("chat", 10, 100, slo=Slo(1.0)) for _ in range(4)]
    gold = made.arrive("gold", 10, 100, slo=Slo(1.0, weight=10.0))

    def waiting():
        loop.go(0.0)
        sound(made)
        return [each for each in (*batch, *chat, gold) if each.state is TicketState.QUEUED]

    assert waiting() == [batch[3], chat[3], gold]
    made.end(batch[0], End.STOPPED, 7)
    assert waiting() == [batch[3], chat[3], gold]  # the place was none of theirs, nor is it batch's now
    made.end(chat[0], End.STOPPED, 7)
    assert waiting() == [batch[3], chat[3]]
    made.back(batch[1])  # its engine failed it
    assert waiting() == [batch[1], batch[3], chat[3]]
    made.end(chat[1], End.ABORTED)
    assert waiting() == [batch[1], batch[3]]
    for each in (chat[2], chat[3]):
        made.end(each, End.STOPPED, 7)
    assert waiting() == [batch[3]]
    made.set_engine(0, up=False)
    made.end(batch[1], End.STOPPED, 7)
    assert waiting() == [batch[3]]
    made.set_engine(0, up=True)
    assert waiting() == []


@pytest.mark.parametrize("kind", [LeastLoaded, RoundRobin])
def test_the_place_of_a_request_that_comes_back_is_given_to_one_that_waits_for_it(kind):
    made, loop = gate(kind(2), engines=2, slots=1)  # two at once
    tickets = [made.arrive("chat", 10, 100) for _ in range(5)]
    assert tickets[4].state is TicketState.QUEUED
    made.end(tickets[1], End.STOPPED)
    loop.turn()
    made.back(tickets[0])
    loop.turn()
    assert tickets[0].engine == 1 and placed(made, tickets[4]) == Move(4, 0, Stage.WHOLE)
    sound(made)


def test_background_work_that_waits_keeps_nobody_from_its_engine():
    made, _loop = gate(engines=2, slots=2, kinds=("chat", "batch"))  # three at once, each
    made.set_engine(1, up=False)
    batch = [made.arrive("batch", 10, 100, slo=Slo(background=True)) for _ in range(10)]
    made.set_engine(1, up=True)
    assert [each.engine for each in batch] == [0] * 3 + [-1] * 7
    chat = [made.arrive("chat", 10, 100, slo=Slo(1.0)) for _ in range(6)]
    assert sorted(each.engine for each in chat) == [0, 0, 0, 1, 1, 1]
    for each in (*batch, *chat):
        made.end(each, End.STOPPED)
    assert made.router.background.total == made.router.loads.total == 0
    sound(made)


def test_requests_that_wait_go_to_an_engine_that_is_back():
    made, loop = gate(engines=2, slots=1)  # two at once, each
    made.set_engine(1, up=False)
    tickets = [made.arrive("chat", 10, 100) for _ in range(5)]
    made.set_engine(1, up=True)
    loop.turn()
    assert [each.engine for each in tickets] == [0, 0, 1, 1, -1]
    made.add_engine(EngineState(1))
    loop.turn()
    assert tickets[4].engine == 2
    sound(made)


def test_background_work_that_waits_for_its_own_places_disables_no_router():
    made, loop = gate(engines=1, slots=2, kinds=("batch",), limits={"batch": ClassLimits(ttl=30.0)})
    for _ in range(20):
        made.arrive("batch", 10, 100, slo=Slo(background=True))
        loop.go(loop.time() + 10.0)
    assert made.roster.idle[ANY] == [0] and made.fallen is None  # what it could take is for others
    sound(made)


def test_a_router_that_moves_no_background_work_is_disabled():
    made, loop = gate(Bad(lambda fleet: STAY, 0), kinds=("batch",), limits={"batch": ClassLimits(ttl=inf)})
    ticket = made.arrive("batch", 10, 100, slo=Slo(background=True))
    loop.go(70.0)
    assert "moved nobody" in made.fallen and ticket.state is TicketState.PREFILLING
