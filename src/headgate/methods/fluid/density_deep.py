"""A gate for engines that choose their own batches: the best kind first, prompts ready on every engine."""

from __future__ import annotations

from math import ceil

from headgate.core.errors import InputError, unknown
from headgate.core.fleet import ANY, STAY, Fleet, Move, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.balance.assigned import Loads
from headgate.methods.fluid.admission import Strict
from headgate.methods.fluid.placement import Draw, pick
from headgate.methods.fluid.plan import FluidPlan

SPARE = 1 / 16


class DensityDeep(RoutePolicy):
    """DP-I for real engines, ours: the kind with the most value per decode token first, kept ready in depth.

    The gates of the paper start one prompt per engine at a time. A policy that refills many seats at once
    (EB, EB+) then waits for prompts that the gate withholds. This one sends a request to the engine with
    the fewest requests as long as that has fewer than its seats and a share `spare` more, so the engine
    always has prompts to choose from, and requests that the fleet cannot serve still wait before the gate.
    Where an engine takes one prompt at a time (the stochastic network) it is `density-first`.

    Values per decode token are those of the plan, which prices one prompt at a time. Where engines run
    several in a step the order of kinds may be another one: `order` names kinds, best first, with slashes
    between them; kinds it does not name come last.
    """

    sends_at_once = True

    def __init__(
        self, plan: FluidPlan, engines: int, draw: Draw, spare: float = SPARE, order: str = ""
    ) -> None:
        if not 0 <= spare < float("inf"):
            raise InputError(f"router density-deep: spare={spare:g}; give 0 or more")
        worth = zip(plan.instance.densities(), plan.instance.flows, strict=True)
        planned = [flow.name for _, flow in sorted(worth, key=lambda pair: -pair[0])]
        asked = order.split("/") if order else []
        for name in asked:
            if name not in planned:
                raise unknown("class in the order of router density-deep", name, planned)
        self.admission = Strict([*asked, *(name for name in planned if name not in asked)])
        self.most = ceil(plan.instance.pace.seats * (1 + spare))
        self.draw = draw
        self._loads = Loads(range(engines))
        self._at: dict[int, int] = {}

    def moved(self, request: Request, move: Move, now: float) -> None:
        self._at[request.id] = move.replica
        self._loads.add(move.replica, 1)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self._gone(request)

    def left(self, request: Request, now: float, how: End) -> None:
        """One fewer, if it was sent anywhere."""
        self._gone(request)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        """Counts who is on which engine."""
        self.engines_changed(fleet)
        for id, place in fleet.places.items():
            if id not in fleet.handoff:
                self.moved(place.request, Move(id, place.replica, place.stage), fleet.now)

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines that take no prompts are not looked at."""
        found = [each.id for each in fleet.replicas if each.role == ANY and each.room.prompts > 0]
        self._loads.only(found or range(len(fleet.replicas)), len(fleet.replicas))

    def route(self, fleet: Fleet) -> Routing:
        """The best kind to the emptiest engine, while that is not deep enough."""
        kind = self.admission.choose(fleet)
        if kind is None or not fleet.idle[ANY]:
            return STAY
        engine = self._loads.least()
        if not fleet.replicas[engine].idle:
            engine = pick(fleet.idle[ANY], self.draw)
        if self._loads.load[engine] >= self.most:
            return STAY
        return Routing((Move(next(iter(fleet.queues[kind])), engine),))

    def _gone(self, request: Request) -> None:
        engine = self._at.pop(request.id, None)
        if engine is not None:
            self._loads.add(engine, -1)
