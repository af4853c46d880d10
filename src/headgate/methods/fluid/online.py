"""Gate-and-route that knows nothing beforehand: it estimates the traffic and plans again while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf

from headgate.core.errors import InputError, unknown
from headgate.core.fleet import ANY, CLOSED, MIXED, STAY, Fleet, Move, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.estimators.traffic import ClassEstimate, TrafficEstimator
from headgate.methods.balance.balance import Loads
from headgate.methods.fluid.flows import Flow, Instance
from headgate.methods.fluid.gates import (
    Admission,
    BucketAndRoute,
    DensityFirst,
    Draw,
    GateAndRoute,
    GateAndRoutePlus,
    Gated,
    pick,
)
from headgate.methods.fluid.plan import FluidPlan

Make = Callable[[FluidPlan, int, Draw], RoutePolicy]
EVERY = 10.0  # seconds between two looks at the estimates
ANYWAY = 6  # looks after which a plan is made although nothing has moved
DRIFT = 0.1  # relative change of an estimate after which a plan is made at once
HALF = 0.5  # the same for patience
HALF_LIFE = 60.0  # seconds, of the estimates


class Online(RoutePolicy):
    """Another router inside, made anew from a plan of what was seen lately.

    The plan it begins with says what to assume of each class until enough was seen of it, and how fast an
    engine is. Every `every` seconds estimates are compared with those of the last plan: if one has moved by
    more than a tenth, or a minute has passed, the program is solved again. The new router adopts the fleet
    and replaces the old one between two events. A plan that cannot be made leaves the old one in force. Roles
    follow by one engine per look, and no engine changes back within two half-lives; what runs on it ends
    there. Of classes that the plan closes a few are let in all the same, to learn from.
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
        self.share = 1.0  # of what the engines take, for this router; several may stand before them
        self.plan, self.planned = plan, 0.0  # and when it was made
        self.failed = 0  # plans that could not be made
        self.traffic = TrafficEstimator(assumed(plan.instance, engines), half_life)
        self._roles, self._probes = RoleSteps(2 * half_life), Probes()
        self._probes.follow(plan, engines, 0.0)
        self._next, self._looks = every, 0
        self._made = self._looked = 0.0  # when the plan was made (the first: seen), estimates last compared

    def roles(self, engines: int) -> tuple[str, ...]:
        return self.inner.roles(engines)

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
        self.traffic.left(request, now, how is End.ABANDONED or how is End.ABORTED)
        self.inner.left(request, now, how)

    def returned(self, request: Request, now: float) -> None:
        self.traffic.returned(request, now)
        self.inner.returned(request, now)

    def passed_over(self, request: Request, now: float) -> None:
        self.inner.passed_over(request, now)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
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
        self.inner.engines_changed(fleet)
        if _open(fleet) != self.engines:
            self._next = fleet.now

    # -- decisions

    def route(self, fleet: Fleet) -> Routing:
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
        routing = inner.route(fleet)
        if not fleet.places and not routing.moves:  # nothing runs, so no event would ask again
            due = self._probes.next_due(fleet)
            if self._roles.waiting or due <= fleet.now:  # no engine takes it yet
                due = self._next
            routing = routing._replace(wake=min(routing.wake, due))
        return routing

    def gauges(self) -> Mapping[str, float]:
        plan, gauges = self.plan, dict(self.inner.gauges())
        gauges["plan_revenue"] = plan.revenue * self.engines
        gauges["plan_age"] = self._looked - self._made
        gauges["plans_failed"] = float(self.failed)
        columns = zip(plan.instance.flows, plan.served, plan.shadows.arrival, strict=True)
        for flow, served, worth in columns:
            gauges[f"rate_{flow.name}"] = flow.rate * self.engines
            gauges[f"served_{flow.name}"] = served * self.engines
            gauges[f"worth_{flow.name}"] = worth
        return gauges

    def _look(self, fleet: Fleet) -> None:
        engines, self._looked = _open(fleet), fleet.now
        if not self._looks:
            self._made = fleet.now
        fleet.catch_up()
        seen = self.traffic.seen(fleet.now)
        if self.share != 1.0:  # this router sees as much of what comes as it has of the engines
            seen = {kind: each._replace(rate=each.rate / self.share) for kind, each in seen.items()}
        self._looks += 1
        if not engines or not any(each.rate > 0 for each in seen.values()):
            return
        before = assumed(self.plan.instance, self.engines)
        if engines == self.engines and self._looks % ANYWAY and not _drifted(before, seen):
            return
        from headgate.methods.fluid.planner import plan_fluid  # the solver takes a while to import

        try:
            plan = plan_fluid(instance_of(self.plan.instance, seen, engines), self.plan.levels)
        except (InputError, RuntimeError, AssertionError):  # levels that cannot be kept, a solver that fails
            self.failed += 1
            return
        inner = self.make(plan, engines, self.draw)
        if isinstance(inner, Gated):
            inner.admission.scale(self.share)
        inner.adopt(fleet, self.inner)
        self.inner, self.plan, self.engines = inner, plan, engines
        self.planned = self._made = fleet.now
        self._probes.follow(plan, engines, fleet.now)


def assumed(instance: Instance, engines: int) -> dict[str, ClassEstimate]:
    return {
        flow.name: ClassEstimate(flow.rate * engines, flow.prompt, flow.output, flow.impatience, flow.cached)
        for flow in instance.flows
    }


def instance_of(like: Instance, seen: Mapping[str, ClassEstimate], engines: int) -> Instance:
    known = {flow.name: flow for flow in like.flows}
    flows = []
    for kind, (rate, prompt, output, impatience, cached) in seen.items():
        before = known.get(kind, Flow(kind, prompt, output, 0.0))
        sized = replace(before, prompt=prompt, output=output, cached=cached)
        flows.append(replace(sized, rate=rate / engines, impatience=impatience))
    return replace(like, flows=tuple(flows))


def _open(fleet: Fleet) -> int:
    return sum(replica.room != CLOSED for replica in fleet.replicas)


def _drifted(before: Mapping[str, ClassEstimate], now: Mapping[str, ClassEstimate]) -> bool:
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


SHARE = 0.005  # of the fleet's decode capacity, for each closed class


class Probes:
    """Ours: a router that learns only from requests it serves would never open a class that it once closed.

    Each closed class may have one request at a time as often as its work stays below half a percent of what
    all engines can decode.
    """

    def __init__(self) -> None:
        self._every: dict[str, float] = {}  # seconds between two probes of closed classes
        self._last: dict[str, float] = {}

    def follow(self, plan: FluidPlan, engines: int, now: float) -> None:
        pace = plan.instance.pace
        spare = SHARE * engines * pace.slots * pace.solo_speed  # tokens per second
        rows = zip(plan.instance.flows, plan.prefill, strict=True)
        self._every = {flow.name: pace.decode_weight(flow) / spare for flow, share in rows if share <= 0}
        for kind in self._every:
            self._last.setdefault(kind, now)

    def due(self, fleet: Fleet) -> str | None:
        for kind, seconds in self._every.items():
            if fleet.now >= self._last[kind] + seconds and fleet.queues.get(kind):
                return kind
        return None

    def next_due(self, fleet: Fleet) -> float:
        times = (self._last[kind] + each for kind, each in self._every.items() if fleet.queues.get(kind))
        return min(times, default=inf)

    def sent(self, kind: str, now: float) -> None:
        self._last[kind] = now


class RoleSteps:
    """One change per step, of the engine that the change costs least, and no engine twice within `dwell`.

    A change of role drains by itself: nothing new of the wrong sort is sent, what runs there ends there.
    """

    def __init__(self, dwell: float) -> None:
        self.dwell = dwell  # seconds
        self.waiting = False  # for an engine that may not change yet
        self._changed: dict[int, float] = {}

    def step(self, fleet: Fleet, wanted: Sequence[str]) -> tuple[tuple[int, str], ...]:
        open = [replica for replica in fleet.replicas if replica.room != CLOSED]
        missing = Counter(wanted[: len(open)])
        missing.subtract(replica.role for replica in open)
        role = max(missing, key=lambda each: missing[each], default="")
        self.waiting = False
        if not role or missing[role] <= 0:
            return ()
        spare = [engine for engine in open if missing[engine.role] < 0]
        settled = [e for e in spare if fleet.now - self._changed.get(e.id, -inf) >= self.dwell]
        if not settled:
            self.waiting = bool(spare)
            return ()

        # in the way is what the new role would not take: decodes before a prompt can start, or prompts
        in_the_way = {e.id: e.decoding if role == MIXED else e.prefilling for e in settled}
        chosen = min(settled, key=lambda engine: (sum(in_the_way[engine.id].values()), engine.id))
        self._changed[chosen.id] = fleet.now
        return ((chosen.id, role),)


# -- a gate for engines that choose their own batches

SPARE = 1 / 16


class DensityDeep(RoutePolicy):
    """DP-I for real engines, ours: the kind with the most value per decode token first, kept ready in depth.

    The gates of the paper start one prompt per engine at a time. A policy that refills many slots at once
    (EB, EB+) then waits for prompts that the gate withholds. This one sends a request to the engine with
    the fewest requests as long as that has fewer than its slots and a share `spare` more, so the engine
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
        if not 0 <= spare < inf:
            raise InputError(f"router density-deep: spare={spare:g}; give 0 or more")
        planned, asked = plan.instance.by_density(), order.split("/") if order else []
        for name in asked:
            if name not in planned:
                raise unknown("class in the order of router density-deep", name, planned)
        self.admission = Admission([*asked, *(name for name in planned if name not in asked)])
        self.most = ceil(plan.instance.pace.slots * (1 + spare))
        self.draw = draw
        self._loads = Loads(range(engines))
        self._at: dict[int, int] = {}

    def moved(self, request: Request, move: Move, now: float) -> None:
        self._at[request.id] = move.replica
        self._loads.add(move.replica, 1)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self._gone(request)

    def passed_over(self, request: Request, now: float) -> None:
        """Queues of classes are all it looks at."""

    def left(self, request: Request, now: float, how: End) -> None:
        self._gone(request)

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        self.engines_changed(fleet)
        for id, place in fleet.places.items():
            if id not in fleet.handoff:
                self.moved(place.request, Move(id, place.replica, place.stage), fleet.now)

    def engines_changed(self, fleet: Fleet) -> None:
        able = [engine.id for engine in fleet.replicas if engine.role == ANY and engine.room.prompts > 0]
        self._loads.only(able or range(len(fleet.replicas)), len(fleet.replicas))

    def route(self, fleet: Fleet) -> Routing:
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


INNER: dict[str, Make] = {
    "gate-and-route": GateAndRoute,
    "gate-and-route+": GateAndRoutePlus,
    "token-bucket": BucketAndRoute,
    "density-first": lambda plan, engines, draw: DensityFirst(plan, draw),
    "density-deep": DensityDeep,
}
