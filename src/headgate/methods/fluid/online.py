"""Gate-and-route that knows nothing beforehand: it estimates the traffic and plans again while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from headgate.core.errors import InputError, unknown
from headgate.core.fleet import CLOSED, Fleet, Move, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.estimators.traffic import Seen, Traffic
from headgate.methods.fluid.density_deep import DensityDeep
from headgate.methods.fluid.flows import Flow, Instance
from headgate.methods.fluid.gates import BucketAndRoute, DensityFirst, GateAndRoute, GateAndRoutePlus, Gated
from headgate.methods.fluid.placement import Draw
from headgate.methods.fluid.plan import FluidPlan
from headgate.methods.fluid.probes import Probes
from headgate.methods.fluid.roles import RoleSteps

if TYPE_CHECKING:
    from headgate.methods.fluid.planner import FluidPlanner

Make = Callable[[FluidPlan, int, Draw], RoutePolicy]
INNER: dict[str, Make] = {
    "gate-and-route": GateAndRoute,
    "gate-and-route+": GateAndRoutePlus,
    "token-bucket": BucketAndRoute,
    "density-first": lambda plan, engines, draw: DensityFirst(plan, draw),
    "density-deep": DensityDeep,
}
EVERY = 10.0  # seconds between two looks at the estimates
ANYWAY = 6  # looks after which a plan is made although nothing has moved
DRIFT = 0.1  # relative change of an estimate after which a plan is made at once
HALF = 0.5  # the same for patience
HALF_LIFE = 60.0  # seconds, of the estimates
KEPT = 256  # plans that are remembered


class Planned(NamedTuple):
    """A plan, what it was made from, and when."""

    time: float
    engines: int
    plan: FluidPlan


class Online(RoutePolicy):
    """Another router inside, made anew from a plan of what was seen lately.

    The plan it begins with says what to assume of each class until enough was seen of it, and how fast an
    engine is. Every `every` seconds estimates are compared with those of the last plan: if one has moved by
    more than a tenth, or a minute has passed, the program is solved again from the last basis. The new
    router adopts the fleet and replaces the old one between two events. A plan that cannot be made leaves
    the old one in force. Roles follow by one engine per look, and no engine changes back within two
    half-lives; what runs on it ends there. Of classes that the plan closes a few are let in all the same, to
    learn from.
    """

    def __init__(
        self,
        plan: FluidPlan,
        engines: int,
        draw: Draw,
        router: str = "gate-and-route+",
        every: float = EVERY,
        half_life: float = HALF_LIFE,
    ) -> None:
        if router not in INNER:
            raise unknown("router inside router online", router, INNER)
        if not (every > 0 and half_life > 0):
            raise InputError(f"router online: every={every:g}, half_life={half_life:g}; give seconds above 0")
        self.make, self.draw = INNER[router], draw
        self.every, self.half_life = every, half_life
        self.inner = self.make(plan, engines, draw)
        self.sends_at_once, self.hands_over = self.inner.sends_at_once, self.inner.hands_over
        self.engines = engines
        self.plan = plan
        self.plans: deque[Planned] = deque([Planned(0.0, engines, plan)], maxlen=KEPT)
        self.failed = 0  # plans that could not be made
        self.traffic = Traffic(assumed(plan.instance, engines), half_life)
        self._roles, self._probes = RoleSteps(2 * half_life), Probes()
        self._probes.follow(plan, engines, 0.0)
        self._planner: FluidPlanner | None = None
        self._next, self._looks = every, 0
        self._made = self._looked = 0.0  # when the plan was made (the first: seen), estimates last compared

    def roles(self, engines: int) -> tuple[str, ...]:
        """As the router inside wants them."""
        return self.inner.roles(engines)

    # -- what happens ----------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float) -> None:
        self.traffic.arrived(request, now)
        self.inner.arrived(request, now)

    def moved(self, request: Request, move: Move, now: float) -> None:
        self.traffic.started(request, now)
        self.inner.moved(request, move, now)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        self.inner.prefilled(request, replica, now)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self.traffic.finished(request, now)
        self.inner.finished(request, replica, now)

    def left(self, request: Request, now: float, how: End) -> None:
        """Its patience or its length is known in part."""
        self.traffic.left(request, now, how is End.ABANDONED or how is End.ABORTED)
        self.inner.left(request, now, how)

    def returned(self, request: Request, now: float) -> None:
        """It waits again, and nobody has arrived."""
        self.traffic.returned(request, now)
        self.inner.returned(request, now)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        """Estimates go on where the router before was of the same sort."""
        now = fleet.now
        if isinstance(before, Online):
            self.traffic, before = before.traffic, before.inner
        else:
            for place in fleet.places.values():
                self.traffic.adopt(place.request, now, waits=False)
            for queue in fleet.queues.values():
                for request in queue.values():
                    self.traffic.adopt(request, now, waits=True)
        self.inner.adopt(fleet, before)
        self._next = now + self.every

    def engines_changed(self, fleet: Fleet) -> None:
        """A plan for the engines that are left is due."""
        self.inner.engines_changed(fleet)
        if _open(fleet) != self.engines:
            self._next = fleet.now

    # -- decisions -------------------------------------------------------------------------------------

    def route(self, fleet: Fleet) -> Routing:
        """What the router inside says, after a look at the estimates if that is due."""
        if fleet.now >= self._next:
            self._next = fleet.now + self.every
            self._look(fleet)
            changes = self._roles.step(fleet, self.inner.roles(self.engines))
            if changes:
                return Routing(roles=changes)
        inner = self.inner
        if isinstance(inner, Gated) and fleet.idle[inner.prompts_on]:
            kind = self._probes.due(fleet)
            if kind is not None:
                self._probes.sent(kind, fleet.now)
                return inner.let_in(kind, fleet)
        return inner.route(fleet)

    def gauges(self) -> Mapping[str, float]:
        """The plan: what it should bring, whom it serves, and what one more of each class is worth."""
        plan, found = self.plan, dict(self.inner.gauges())
        found["plan_revenue"] = plan.revenue * self.engines
        found["plan_age"] = self._looked - self._made
        found["plans_failed"] = float(self.failed)
        columns = zip(plan.instance.flows, plan.served, plan.shadows.arrival, strict=True)
        for flow, served, worth in columns:
            found[f"rate_{flow.name}"] = flow.rate * self.engines
            found[f"served_{flow.name}"] = served * self.engines
            found[f"worth_{flow.name}"] = worth
        return found

    def _look(self, fleet: Fleet) -> None:
        engines, self._looked = _open(fleet), fleet.now
        if not self._looks:
            self._made = fleet.now
        fleet.catch_up()
        seen = self.traffic.seen(fleet.now)
        self._looks += 1
        if not engines or not any(each.rate > 0 for each in seen.values()):
            return
        before = assumed(self.plan.instance, self.engines)
        if engines == self.engines and self._looks % ANYWAY and not _drifted(before, seen):
            return
        if self._planner is None:
            from headgate.methods.fluid.planner import FluidPlanner  # the solver takes a while to import

            self._planner = FluidPlanner(self.plan.levels)
        try:
            plan = self._planner.plan(instance_of(self.plan.instance, seen, engines))
        except (InputError, RuntimeError, AssertionError):  # levels that cannot be kept, a solver that fails
            self.failed += 1
            return
        self._use(plan, engines, fleet)

    def _use(self, plan: FluidPlan, engines: int, fleet: Fleet) -> None:
        inner = self.make(plan, engines, self.draw)
        inner.adopt(fleet, self.inner)
        self.inner, self.plan, self.engines = inner, plan, engines
        self.plans.append(Planned(fleet.now, engines, plan))
        self._made = fleet.now
        self._probes.follow(plan, engines, fleet.now)


def assumed(instance: Instance, engines: int) -> dict[str, Seen]:
    """The classes of a plan as estimates for the whole fleet."""
    return {
        flow.name: Seen(flow.rate * engines, flow.prompt, flow.output, flow.impatience, flow.cached)
        for flow in instance.flows
    }


def instance_of(like: Instance, seen: Mapping[str, Seen], engines: int) -> Instance:
    """What a plan is made from, for so many engines; paces and prices as before."""
    known = {flow.name: flow for flow in like.flows}
    flows = []
    for kind, (rate, prompt, output, impatience, cached) in seen.items():
        before = known.get(kind, Flow(kind, prompt, output, 0.0))
        sized = replace(before, prompt=prompt, output=output, cached=cached)
        flows.append(replace(sized, rate=rate / engines, impatience=impatience))
    return replace(like, flows=tuple(flows))


def _open(fleet: Fleet) -> int:
    return sum(replica.room != CLOSED for replica in fleet.replicas)


def _drifted(before: Mapping[str, Seen], now: Mapping[str, Seen]) -> bool:
    """Has anything moved by more than a tenth since the last plan? Patience, known less well, by half."""
    if before.keys() != now.keys():
        return True
    total = sum(seen.rate for seen in now.values())
    for kind, seen in now.items():
        was = before[kind]
        if abs(seen.rate - was.rate) > DRIFT * max(was.rate, DRIFT * total):
            return True
        sizes = ((seen.prompt, was.prompt), (seen.output, was.output), (seen.computed, was.computed))
        if any(abs(x - y) > DRIFT * y for x, y in sizes):
            return True
        if abs(seen.impatience - was.impatience) > HALF * was.impatience:
            return True
    return False
