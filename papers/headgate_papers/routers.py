"""The baselines and ablations of the gate-and-route paper, as routers that `--router NAME` finds."""

from __future__ import annotations

from headgate.core.fleet import ANY, Fleet, Move, Routing, Stage
from headgate.methods.fluid.gates import (
    Admission,
    Draw,
    Gated,
    Occupancy,
    Partitioned,
    SoloFirst,
    at_home,
)
from headgate.methods.fluid.plan import FluidPlan


class FirstComeCoupled(Gated):
    """FI-WSP, as Sarathi does: prompts in order of arrival, decodes where the prompt was, no roles."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(FirstCome(), None, ANY, draw)


class GateCoupled(Gated):
    """GI-WSP: the occupancy gate, decodes where the prompt was, no roles."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(Occupancy(plan, engines), None, ANY, draw)


class GateDecoupled(Gated):
    """GF-WSP: the occupancy gate without roles; an engine's free slot goes to a prompt before a decode."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(Occupancy(plan, engines), Anywhere(draw), ANY, draw)

    def route(self, fleet: Fleet) -> Routing:
        routing = self.start_prompt(fleet)
        if routing.moves or self.placement is None or not fleet.handoff:
            return routing
        move = self.placement.next(fleet)
        return routing if move is None else Routing((move,))


class FirstComePartitioned(Partitioned):
    """FG-SP: the paper's ablation without a gate. Static planning, prompts in order of arrival."""

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(plan, FirstCome(), SoloFirst(draw), slack=False)


class PrioritizeAndRoute(Partitioned):
    """For separate charging (section 4.3): most output per prompt token first, no targets.

    Wants a plan made for separate charging; its revenue tends to that optimum (Theorem 3).
    """

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        flows = sorted(plan.instance.flows, key=lambda flow: -flow.output / flow.computed)
        super().__init__(plan, Admission([flow.name for flow in flows]), SoloFirst(draw), slack=False)


class FirstCome(Admission):
    """The request that came first, of all kinds."""

    def choose(self, fleet: Fleet) -> str | None:
        """The kind with the oldest head."""
        first, chosen = None, None
        for kind, queue in fleet.queues.items():
            if queue:
                id = next(iter(queue))
                if first is None or id < first:
                    first, chosen = id, kind
        return chosen


class Anywhere(SoloFirst):
    """Any engine with a free slot, for fleets without roles."""

    def next(self, fleet: Fleet) -> Move | None:
        """The head of the queue."""
        if not fleet.open[ANY]:
            return None
        id = next(iter(fleet.handoff))
        return Move(id, at_home(fleet, id, fleet.open[ANY], self.draw), Stage.DECODE)
