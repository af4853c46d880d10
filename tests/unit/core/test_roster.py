"""The roster keeps count of a fleet and refuses what cannot be."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import RunError
from headgate.core.fleet import ANY, CLOSED, MIXED, PREFILL, ROLES, SOLO, Move, Room, Stage, room
from headgate.core.roster import OpenEngines, Roster


def request(id: int, kind: str = "a"):
    return SimpleNamespace(id=id, kind=kind)


def roster(*roles: str, slots: int = 3) -> Roster:
    return Roster(roles, lambda role: room(role, slots), ("a", "b"))


def test_rooms_by_role():
    assert room(MIXED, 16) == Room(1, 15, 16)
    assert room(SOLO, 16) == room("decode", 16) == Room(0, 16, 16)
    assert room(PREFILL, 16) == Room(1, 0, 1)
    assert room(ANY, 16) == Room(1, 16, 16)


def test_a_request_goes_through_a_fleet():
    fleet = roster(MIXED, SOLO)
    assert (fleet.idle[MIXED], fleet.open[MIXED], fleet.open[SOLO], fleet.free_slots) == ([0], [0], [1], 5)
    one = request(7, "b")
    fleet.arrive(one)
    assert list(fleet.queues["b"]) == [7] and not fleet.queues["a"]
    found, slot = fleet.find(Move(7, 0, Stage.PREFILL))
    assert found is one
    fleet.start_prompt(one, slot, Stage.PREFILL)
    assert fleet.idle[MIXED] == [] and fleet.prefilling == {"a": 0, "b": 1}
    assert slot.prefilling["b"] == 1 and fleet.free_slots == 5
    fleet.end_prompt(one, slot, stays=False)
    assert list(fleet.handoff) == [7] and fleet.idle[MIXED] == [0]
    _, other = fleet.find(Move(7, 1, Stage.DECODE))
    fleet.start_decode(one, other)
    assert (other.slots, other.decoding["b"], fleet.free_slots) == (2, 1, 4)
    fleet.finish(one, other)
    assert fleet.free_slots == 5 and not fleet.handoff


def test_a_whole_request_stays():
    fleet = roster(ANY, slots=2)
    slot = fleet.replicas[0]
    for id in (0, 1):
        fleet.arrive(request(id))
        found, _ = fleet.find(Move(id, 0))
        fleet.start_prompt(found, slot, Stage.PREFILL)
        assert fleet.idle[ANY] == []
        fleet.end_prompt(found, slot, stays=True)
    assert (slot.decodes, slot.slots, fleet.idle[ANY], fleet.open[ANY]) == (2, 0, [], [])


def test_those_who_wait_may_leave():
    fleet = roster(ANY)
    one, two = request(1), request(2)
    fleet.arrive(one)
    assert fleet.waiting_one(1) is one
    fleet.leave(one)
    assert not fleet.queues["a"]
    with pytest.raises(RunError, match="does not wait"):
        fleet.waiting_one(1)
    fleet.arrive(two)
    fleet.start_prompt(two, fleet.replicas[0], Stage.PREFILL)
    fleet.end_prompt(two, fleet.replicas[0], stays=False)
    fleet.leave(two)
    assert not fleet.handoff


def test_what_cannot_be_is_refused():
    fleet = roster(MIXED, SOLO, slots=2)
    fleet.arrive(request(1))
    fleet.arrive(request(2))
    for move, said in (
        (Move(1, 5), "there are 2 engines"),
        (Move(1, -1), "there are 2 engines"),
        (Move(1, 1, Stage.PREFILL), "no place for a prompt"),
        (Move(9, 0, Stage.PREFILL), "request 9 does not wait for that"),
        (Move(1, 0, Stage.DECODE), "request 1 does not wait for that"),
    ):
        with pytest.raises(RunError, match=said):
            fleet.find(move)
    first, slot = fleet.find(Move(1, 0, Stage.PREFILL))
    fleet.start_prompt(first, slot, Stage.PREFILL)
    with pytest.raises(RunError, match="no place for a prompt"):
        fleet.find(Move(2, 0, Stage.PREFILL))
    fleet.end_prompt(first, slot, stays=False)
    fleet.start_decode(first, slot)
    second, _ = fleet.find(Move(2, 0, Stage.PREFILL))
    fleet.start_prompt(second, slot, Stage.PREFILL)
    fleet.end_prompt(second, slot, stays=False)
    with pytest.raises(RunError, match="no decode slot"):
        fleet.find(Move(2, 0, Stage.DECODE))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_pools_are_sets_without_holes(steps):
    pool, members = OpenEngines(), set()
    for id, inside in steps:
        pool.put(id, inside)
        (members.add if inside else members.discard)(id)
        assert sorted(pool.members) == sorted(members)


@given(st.data())
def test_pools_and_counts_follow_every_transition(data):
    """Against a count from scratch, for random walks through random fleets."""
    roles = data.draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=4))
    fleet = roster(*roles, slots=data.draw(st.integers(2, 3)))
    running: list[tuple[SimpleNamespace, object, bool]] = []
    decoding: list[tuple[SimpleNamespace, object]] = []
    for id in range(data.draw(st.integers(1, 12))):
        fleet.arrive(request(id, data.draw(st.sampled_from(["a", "b"]))))
        for step in data.draw(st.lists(st.sampled_from(["prompt", "done", "decode", "finish"]), max_size=4)):
            idle = [engine for pool in fleet.idle.values() for engine in pool]
            waiting = [r for queue in fleet.queues.values() for r in queue.values()]
            places = [engine for pool in fleet.open.values() for engine in pool]
            if step == "prompt" and idle and waiting:
                who, slot = fleet.find(Move(waiting[0].id, idle[0]))
                fleet.start_prompt(who, slot, Stage.PREFILL)
                running.append((who, slot, data.draw(st.booleans()) and slot.role == ANY))
            elif step == "done" and running:
                who, slot, stays = running.pop()
                fleet.end_prompt(who, slot, stays)
                if stays:
                    decoding.append((who, slot))
            elif step == "decode" and fleet.handoff and places:
                who, slot = fleet.find(Move(next(iter(fleet.handoff)), places[0], Stage.DECODE))
                fleet.start_decode(who, slot)
                decoding.append((who, slot))
            elif step == "finish" and decoding:
                fleet.finish(*decoding.pop())
            audit(fleet)


def audit(fleet: Roster) -> None:
    slots = 0
    for slot in fleet.replicas:
        assert slot.prompts == sum(slot.prefilling.values()) <= slot.room.prompts
        assert slot.decodes == sum(slot.decoding.values())
        left = slot.room.total - slot.prompts - slot.decodes
        assert left >= 0
        assert (slot.id in fleet.idle[slot.role]) == (left > 0 and slot.prompts < slot.room.prompts)
        assert slot.slots == max(0, min(left, slot.room.decodes - slot.decodes))
        assert (slot.id in fleet.open[slot.role]) == (slot.slots > 0)
        slots += slot.slots
    assert fleet.free_slots == slots
    assert sum(fleet.prefilling.values()) == sum(slot.prompts for slot in fleet.replicas)


def test_engines_come_go_and_change():
    fleet = roster(MIXED, SOLO)
    free = fleet.free_slots
    added = fleet.add("any", Room(1, 4, 4))
    assert added.id == 2 and fleet.open["any"] == [2] and fleet.free_slots == free + 4
    fleet.set_role(2, SOLO, Room(0, 4, 4))
    assert not fleet.open["any"] and not fleet.idle["any"] and sorted(fleet.open[SOLO]) == [1, 2]
    assert fleet.free_slots == free + 4
    fleet.set_role(2, "odd", Room(1, 1, 1))
    assert fleet.idle["odd"] == [2]
    fleet.set_room(2, CLOSED)
    assert not fleet.idle["odd"] and fleet.free_slots == free
    fleet.retire(2)
    with pytest.raises(RunError, match="no engine 2"):
        fleet.set_room(2, Room(1, 1, 1))
    assert fleet.add(MIXED, Room(1, 3, 4)).id == 2 and len(fleet.replicas) == 3


def test_those_inside_stay_counted_when_room_shrinks():
    fleet = roster(MIXED)
    one, two = request(0, "a"), request(1, "a")
    for who in (one, two):
        fleet.arrive(who)
    slot = fleet.replicas[0]
    fleet.start_prompt(one, slot, Stage.WHOLE)
    fleet.end_prompt(one, slot, True)
    fleet.start_prompt(two, slot, Stage.WHOLE)
    fleet.set_room(0, CLOSED)
    assert (slot.prompts, slot.decodes, slot.slots, slot.idle, fleet.free_slots) == (1, 1, 0, False, 0)
    fleet.retire(0)
    assert fleet.add(MIXED, Room(1, 3, 4)).id == 1  # its number is not free yet
    fleet.finish(one, slot)
    fleet.drop_prompt(two, slot)
    assert fleet.add(MIXED, Room(1, 3, 4)).id == 0


@pytest.mark.parametrize("where", ["prompt", "between", "decode"])
def test_taken_back_to_the_head_of_its_queue(where):
    fleet = roster(MIXED, SOLO)
    first, other = request(0, "a"), request(1, "a")
    fleet.arrive(first)
    slot = fleet.replicas[0]
    fleet.start_prompt(first, slot, Stage.PREFILL)
    assert fleet.places[0].replica == 0 and not fleet.places[0].decoding
    if where != "prompt":
        fleet.end_prompt(first, slot, False)
        assert fleet.places[0].replica == 0  # where its KV is
    if where == "decode":
        fleet.start_decode(first, fleet.replicas[1])
        assert fleet.places[0].replica == 1 and fleet.places[0].decoding
    fleet.arrive(other)
    fleet.take_back(first)
    assert list(fleet.queues["a"]) == [0, 1] and set(fleet.waiting) == {0, 1}
    assert not fleet.places and not fleet.handoff and not any(fleet.prefilling.values())
    assert all(each.load == 0 for each in fleet.replicas)


def test_unknown_kinds_are_the_first_one():
    fleet = roster(MIXED)
    assert fleet.kind("b") == "b" and fleet.kind("?") == "a"
    fleet.add_kind("c")
    late = request(3, "c")
    fleet.arrive(late)
    fleet.start_prompt(late, fleet.replicas[0], Stage.WHOLE)
    assert fleet.replicas[0].prefilling["c"] == 1
