"""Routers of the gate-and-route paper (arXiv 2602.02987) and of ours: a gate before prefill, a decode router.

Where several engines qualify one is drawn at random; inside an event decodes start before prompts.
"""

from __future__ import annotations

from headgate.core.errors import unknown
from headgate.core.fleet import ANY, MIXED, STAY, Fleet, Move, RoutePolicy, Routing, Stage
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.methods.fluid.admission import (
    Admission,
    BackPressure,
    Occupancy,
    Strict,
    TokenBucket,
)
from headgate.methods.fluid.placement import (
    ByPool,
    ByPoolAndKind,
    Draw,
    Placement,
    SoloFirst,
    pick,
)
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.fluid.staffing import staff

GATES = {"occupancy": Occupancy, "back-pressure": BackPressure, "token-bucket": TokenBucket}


class Gated(RoutePolicy):
    """An admission rule for prompts and a placement rule for decodes, on engines of one role for prompts."""

    def __init__(
        self, admission: Admission, placement: Placement | None, prompts_on: str, draw: Draw
    ) -> None:
        self.admission = admission
        self.placement = placement
        self.prompts_on = prompts_on
        self.draw = draw
        self.hands_over = placement is not None
        self._stage = Stage.WHOLE if placement is None else Stage.PREFILL
        self._apart: set[int] = set()  # prompts in service whose output will ask for a place

    def moved(self, request: Request, move: Move, now: float) -> None:
        """Notify gate and placement of a request that entered or found a seat."""
        if move.stage is not Stage.DECODE:
            self.admission.entered(request, now)
            if move.stage is Stage.PREFILL:
                self._apart.add(request.id)
        elif self.placement is not None:
            self.placement.gone(request)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """It looks for a seat, unless it was sent whole."""
        if self.placement is not None and request.id in self._apart:
            self._apart.discard(request.id)
            self.placement.prefilled(request)

    def finished(self, request: Request, replica: int, now: float) -> None:
        """One whose first token was its last never looked for a seat."""
        self._apart.discard(request.id)

    def left(self, request: Request, now: float, how: End) -> None:
        self._apart.discard(request.id)
        if self.placement is not None:
            self.placement.gone(request)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        """Those between two engines look for a seat; a token bucket goes on from the level it had."""
        for id, place in fleet.places.items():
            if self.placement is None:
                break
            if id in fleet.handoff:
                self.placement.prefilled(place.request)
            elif place.stage is Stage.PREFILL:
                self._apart.add(id)
        self.admission.adopt(fleet, before.admission if isinstance(before, Gated) else None)
        self.engines_changed(fleet)

    def engines_changed(self, fleet: Fleet) -> None:
        """The placement rule may have looked at roles, the gate at rooms."""
        self.admission.engines_changed(fleet)
        if self.placement is not None:
            self.placement.engines_changed(fleet)

    def route(self, fleet: Fleet) -> Routing:
        """One move at a time: a decode if there is a seat for one, else a prompt."""
        move = self.placement.next(fleet) if fleet.handoff and self.placement else None
        return Routing((move,)) if move else self.start_prompt(fleet)

    def start_prompt(self, fleet: Fleet) -> Routing:
        """The prompt that the gate lets in, on a random engine that has a place for it."""
        places = fleet.idle[self.prompts_on]
        if places:
            kind = self.admission.choose(fleet)
            if kind is not None:
                return self.let_in(kind, fleet)
        refused = self.admission.refuse(fleet)
        wake = self.admission.wake(fleet) if places else STAY.wake  # without a place no gate matters
        return STAY if not refused and wake == STAY.wake else Routing((), refused, wake)

    def let_in(self, kind: str, fleet: Fleet) -> Routing:
        """The oldest of that kind, whatever the gate says; there must be a place."""
        place = pick(fleet.idle[self.prompts_on], self.draw)
        return Routing((Move(next(iter(fleet.queues[kind])), place, self._stage),))


class Partitioned(Gated):
    """The first engines take prompts and decode beside them, the others only decode (static planning)."""

    def __init__(
        self,
        plan: FluidPlan,
        admission: Admission,
        placement: Placement,
        slack: bool,
    ) -> None:
        super().__init__(admission, placement, MIXED, placement.draw)
        self.plan, self.slack = plan, slack

    def roles(self, engines: int) -> tuple[str, ...]:
        """As many mixed engines as the plan needs, a few more with slack; one at least if all may enter."""
        roles = staff(self.plan, engines, self.slack).roles
        return roles if MIXED in roles or self.admission.closes else (MIXED, *roles[1:])


class GateAndRoute(Partitioned):
    """GG-SP, the paper's policy: ceil(nX*) mixed engines, occupancy gate, solo seats first.

    Its revenue tends to the fluid optimum as the fleet grows (Theorem 2), slowly where a throttled kind
    needs less than one engine's prefill time.
    """

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw, spill: bool = False) -> None:
        super().__init__(plan, Occupancy(plan, engines, spill), SoloFirst(draw), slack=False)


class GateAndRoutePlus(Partitioned):
    """GG-SP+, ours: a few spare mixed engines, and throttled kinds wait for room behind the gate."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw, spill: bool = False) -> None:
        super().__init__(plan, BackPressure(plan, engines, spill), SoloFirst(draw), slack=True)


class BucketAndRoute(Partitioned):
    """Ours: throttled kinds enter at their planned rate. For small fleets whose prefill capacity binds."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(plan, TokenBucket(plan, engines), SoloFirst(draw), slack=True)


class PrioritizeAndRoute(Partitioned):
    """For separate charging (section 4.3): most output per prompt token first, no targets.

    Wants a plan made for separate charging; its revenue tends to that optimum (Theorem 3).
    """

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        flows = sorted(plan.instance.flows, key=lambda flow: -flow.output / flow.computed)
        super().__init__(plan, Strict([flow.name for flow in flows]), SoloFirst(draw), slack=False)


class ServiceLevelRoute(Partitioned):
    """For plans with service levels (section 5): each decode draws its pool, so every kind follows the plan.

    The paper's gate is `occupancy`; it over-serves at finite n, so fairness caps are missed. Ours, and the
    default, is the token bucket.
    """

    PLACEMENT: type[ByPool] = ByPool

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw, gate: str = "token-bucket") -> None:
        if gate not in GATES:
            raise unknown("gate", gate, GATES)
        placement = self.PLACEMENT(plan, draw)
        super().__init__(plan, GATES[gate](plan, engines), placement, slack=False)  # pools as planned


class GeneralRoute(ServiceLevelRoute):
    """The same for plans with a queue before decode (EC.6): the kind that gets a seat is drawn."""

    PLACEMENT = ByPoolAndKind


class DensityFirst(Gated):
    """DP-I, ours: the kind with the most value per decode token of capacity first; coupled, no roles.

    The fluid optimum is a knapsack while prefill capacity is to spare, and this order solves it. It fails
    when prefill binds, where the best is a mix, and it cannot follow service levels.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        worth = zip(plan.instance.densities(), plan.instance.flows, strict=True)
        order = [flow.name for _, flow in sorted(worth, key=lambda pair: -pair[0])]
        super().__init__(Strict(order), None, ANY, draw)
