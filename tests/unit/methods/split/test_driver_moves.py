"""A driver that places a request itself, even on the engine that the router had in mind."""

from types import SimpleNamespace

import pytest

from fleet_worlds import carry_out
from headgate.core.fleet import ANY, CLOSED, DECODE, STAY, Move, Stage, endless
from headgate.core.request import NO_SLO
from headgate.core.roster import Roster
from headgate.methods.split.split import Split


class Drivable:
    """Two engines before which the driver may act on its own."""

    def __init__(self) -> None:
        self.router = Split(2, 1)
        self.roster = Roster(self.router.roles(2), endless, ("",))
        self.request = SimpleNamespace(id=0, kind="", prompt=8, slo=NO_SLO, priority=0)
        self.roster.arrive(self.request)
        self.router.arrived(self.request, 0.0)

    def act(self, move: Move) -> None:
        carry_out(move, self.roster, self.router)


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.WHOLE])
def test_a_prompt_that_the_driver_sends_is_not_sent_again(stage):
    fleet = Drivable()
    fleet.act(Move(0, 0, stage))
    assert fleet.router.route(fleet.roster) == STAY


def test_an_output_that_the_driver_places_is_not_placed_again():
    fleet = Drivable()
    (move,) = fleet.router.route(fleet.roster).moves
    fleet.act(move)
    fleet.roster.end_prompt(fleet.request, fleet.roster.replicas[0], stays=False)
    fleet.router.prefilled(fleet.request, 0, 0.0)
    fleet.act(Move(0, 1, Stage.DECODE))
    assert fleet.router.route(fleet.roster) == STAY


def test_a_request_sent_whole_weighs_on_its_engine_as_long_as_its_prompt_runs():
    router = Split(3, 2)
    roster = Roster(router.roles(3), endless, ("",))
    places = []
    for id, prompt in enumerate((8, 1, 1)):
        request = SimpleNamespace(id=id, kind="", prompt=prompt, slo=NO_SLO, priority=0)
        roster.arrive(request)
        router.arrived(request, 0.0)
        (move,) = router.route(roster).moves
        places.append(move.replica)
        roster.start_prompt(request, roster.replicas[move.replica], Stage.WHOLE)
        router.moved(request, move._replace(stage=Stage.WHOLE), 0.0)
    assert places == [0, 1, 1]


def test_an_engine_that_was_alone_is_given_its_role_back_however_late():
    """A third engine returns before the wish for it is heard; and once it is granted, nothing is asked."""
    router = Split(3, 1)
    roster = Roster(router.roles(3), endless, ("",))

    def change(*up: int) -> None:
        for slot in roster.replicas:
            roster.set_room(slot.id, endless(slot.role) if slot.id in up else CLOSED)
        router.engines_changed(roster)

    change(1)
    assert router.route(roster).roles == ((1, ANY),)
    roster.set_role(1, ANY, endless(ANY))
    change(1)
    assert router.route(roster) == STAY
    change(0, 1)
    change(0, 1, 2)
    assert router.route(roster).roles == ((1, DECODE),)
    roster.set_role(1, DECODE, endless(DECODE))
    change(0, 1, 2)
    assert router.route(roster) == STAY
    roster.set_role(1, ANY, endless(ANY))  # another's decision
    change(0, 1)
    assert router.route(roster) == STAY
