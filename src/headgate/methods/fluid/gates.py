"""Routers of the gate-and-route paper (arXiv 2602.02987) and of ours: a gate before prefill, a decode router.

Where several engines qualify one is drawn at random; inside an event decodes start before prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf

from headgate.core.errors import unknown
from headgate.core.fleet import ANY, MIXED, SOLO, STAY, Fleet, Move, RoutePolicy, Routing, Stage
from headgate.core.request import Request
from headgate.methods.fluid.plan import FluidPlan, staff

Draw = Callable[[], float]  # uniform on [0, 1)


class Gated(RoutePolicy):
    def __init__(
        self, admission: Admission, placement: SoloFirst | None, prompts_on: str, draw: Draw
    ) -> None:
        self.admission = admission
        self.placement = placement
        self.prompts_on = prompts_on
        self.draw = draw
        self.hands_over = placement is not None
        self._stage = Stage.WHOLE if placement is None else Stage.PREFILL

    def moved(self, request: Request, move: Move, now: float) -> None:
        if move.stage is not Stage.DECODE:
            self.admission.entered(request, now)

    def passed_over(self, request: Request, now: float) -> None:
        """Queues of classes are all it looks at."""

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        self.admission.adopt(fleet, before.admission if isinstance(before, Gated) else None)
        self.engines_changed(fleet)

    def engines_changed(self, fleet: Fleet) -> None:
        self.admission.engines_changed(fleet)
        if self.placement is not None:
            self.placement.engines_changed(fleet)

    def route(self, fleet: Fleet) -> Routing:
        move = self.placement.next(fleet) if fleet.handoff and self.placement else None
        return Routing((move,)) if move else self.start_prompt(fleet)

    def start_prompt(self, fleet: Fleet) -> Routing:
        places = fleet.idle[self.prompts_on]
        if places:
            kind = self.admission.choose(fleet)
            if kind is not None:
                return self.let_in(kind, fleet)
        refused = self.admission.refuse(fleet)
        wake = self.admission.wake(fleet) if places else STAY.wake  # without a place no gate matters
        return STAY if not refused and wake == STAY.wake else Routing((), refused, wake)

    def let_in(self, kind: str, fleet: Fleet) -> Routing:
        place = pick(fleet.idle[self.prompts_on], self.draw)
        return Routing((Move(next(iter(fleet.queues[kind])), place, self._stage),))


class Partitioned(Gated):
    """The first engines take prompts and decode beside them, the others only decode (static planning)."""

    def __init__(self, plan: FluidPlan, admission: Admission, placement: SoloFirst, slack: bool) -> None:
        super().__init__(admission, placement, MIXED, placement.draw)
        self.plan, self.slack = plan, slack

    def roles(self, engines: int) -> tuple[str, ...]:
        """As many mixed engines as the plan needs, a few more with slack; one at least if all may enter."""
        roles = staff(self.plan, engines, self.slack).roles
        return roles if MIXED in roles or self.admission.closes else (MIXED, *roles[1:])


class GateAndRoute(Partitioned):
    """GG-SP, the paper's policy: ceil(nX*) mixed engines, occupancy gate, solo slots first.

    Its revenue tends to the fluid optimum as the fleet grows (Theorem 2), slowly where a throttled kind
    needs less than one engine's prefill time.
    """

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(plan, Occupancy(plan, engines), SoloFirst(draw), slack=False)


class GateAndRoutePlus(Partitioned):
    """GG-SP+, ours: a few spare mixed engines, and throttled kinds wait for room behind the gate."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(plan, BackPressure(plan, engines), SoloFirst(draw), slack=True)


class BucketAndRoute(Partitioned):
    """Ours: throttled kinds enter at their planned rate. For small fleets whose prefill capacity binds."""

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw) -> None:
        super().__init__(plan, TokenBucket(plan, engines), SoloFirst(draw), slack=True)


class ServiceLevelRoute(Partitioned):
    """For plans with service levels (section 5): each decode draws its pool, so every kind follows the plan.

    The paper's gate is `occupancy`; it over-serves at finite n, so fairness caps are missed. Ours, and the
    default, is the token bucket.
    """

    draws_kinds = False

    def __init__(self, plan: FluidPlan, engines: int, draw: Draw, gate: str = "token-bucket") -> None:
        if gate not in GATES:
            raise unknown("gate", gate, GATES)
        placement = ByPoolAndKind(plan, draw) if self.draws_kinds else ByPool(plan, draw)
        super().__init__(plan, GATES[gate](plan, engines), placement, slack=False)  # pools as planned


class GeneralRoute(ServiceLevelRoute):
    """The same for plans with a queue before decode (EC.6): the kind that gets a slot is drawn."""

    draws_kinds = True


class DensityFirst(Gated):
    """DP-I, ours: the kind with the most value per decode token of capacity first; coupled, no roles.

    The fluid optimum is a knapsack while prefill capacity is to spare, and this order solves it. It fails
    when prefill binds, where the best is a mix, and it cannot follow service levels.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(Admission(plan.instance.by_density()), None, ANY, draw)


# -- gates: whose prompt starts next

BUCKET = 5.0  # most admissions a class may save up
FULL = 1 - 1e-6  # a bucket that holds one admission, but for rounding of the clock
SHED_AFTER = 10.0  # seconds of its planned rate that may wait in a class that never gives up


class Admission:
    """Kinds in a fixed order; those not named come last, in the fleet's order. Other gates know more."""

    closes = False  # are there kinds it never lets in?

    def __init__(self, order: Sequence[str] = ()) -> None:
        self.order = order

    def choose(self, fleet: Fleet) -> str | None:
        queues = fleet.queues
        for kind in self.order:
            if queues.get(kind):
                return kind
        return next((kind for kind, queue in queues.items() if queue), None)

    def refuse(self, fleet: Fleet) -> tuple[int, ...]:
        return ()

    def entered(self, request: Request, now: float) -> None:
        """That one's prompt has started."""

    def adopt(self, fleet: Fleet, before: Admission | None) -> None:
        """It takes over a running fleet, perhaps from another gate."""

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines came, went, or have another role or room."""

    def wake(self, fleet: Fleet) -> float:
        return inf

    def scale(self, share: float) -> None:
        """Several routers stand before the engines, and this is its part of what the plan admits."""


class Occupancy(Admission):
    """The paper's gate (section 4.1): the kind furthest below its planned share of engines that prefill.

    The index is ξ = (X - n x*) / x*, whose smallest is the smallest X / x*. Ties: the queue that exceeds its
    planned length most, then the plan's order. It never holds back a kind that the plan serves at all. A
    kind the plan does not serve (x* = 0, or not in the plan) is closed; those of it that never give up are
    turned away, and so is what a throttled kind of that sort has waiting beyond some seconds of its rate.

    Ours: where engines take several prompts at once (real ones do), prompts of all kinds stand in one queue
    inside the engine and are in service equally long. Shares of engines would then give a kind with long
    prompts as many times more admissions as its prompts are longer. The planned rates take their place.
    """

    closes = True

    def __init__(self, plan: FluidPlan, engines: int) -> None:
        super().__init__()
        flows = plan.instance.flows
        self.targets: dict[str, tuple[float, float]] = {}  # x*, and the planned queue of the whole fleet
        self._shares: dict[str, tuple[float, float]] = {}  # x*, and the planned rate
        self.throttled: dict[str, float] = {}  # admissions per second planned for kinds not served in full
        self._shed: dict[str, int] = {}  # the most that may wait of kinds that never give up
        self._patient = {flow.name for flow in flows if flow.impatience > 0}
        self._watched: list[str] | None = None  # kinds of which some may have to be turned away
        columns = (flows, plan.prefill, plan.waiting, plan.prompts, plan.throttled)
        for flow, share, waiting, rate, throttled in zip(*columns, strict=True):
            if share <= 0:
                continue
            self.targets[flow.name] = (share, engines * waiting)
            self._shares[flow.name] = (share, rate)
            if throttled:
                self.throttled[flow.name] = engines * rate
                if flow.impatience == 0:
                    self._shed[flow.name] = max(1, ceil(engines * rate * SHED_AFTER))

    def engines_changed(self, fleet: Fleet) -> None:
        """Shares of engines are the targets while each takes one prompt at a time, else rates."""
        several = any(replica.room.prompts > 1 for replica in fleet.replicas)
        for kind, (share, rate) in self._shares.items():
            self.targets[kind] = (rate if several else share, self.targets[kind][1])

    def choose(self, fleet: Fleet) -> str | None:
        chosen, least, longest = None, inf, -inf
        prefilling, queues = fleet.prefilling, fleet.queues
        for kind, (share, planned) in self.targets.items():
            queue = queues.get(kind)
            if not queue:
                continue
            index = prefilling[kind] / share
            if index > least or not self.lets_in(kind, fleet):
                continue
            excess = len(queue) - planned
            if index < least or excess > longest:
                chosen, least, longest = kind, index, excess
        return chosen

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        return True

    def scale(self, share: float) -> None:
        self.targets = {kind: (x, share * waiting) for kind, (x, waiting) in self.targets.items()}
        self.throttled = {kind: share * rate for kind, rate in self.throttled.items()}

    def refuse(self, fleet: Fleet) -> tuple[int, ...]:
        """Closed kinds that would wait for ever, and the newest of throttled ones that never give up."""
        if self._watched is None:  # the fleet's kinds are known from the first question on
            served = {*self.targets, *self._patient}
            self._watched = [*(kind for kind in fleet.queues if kind not in served), *self._shed]
        refused: list[int] = []
        for kind in self._watched:
            queue, most = fleet.queues.get(kind, {}), self._shed.get(kind, 0)
            if len(queue) > most:
                refused += [*queue][most:]
        return tuple(refused)


class BackPressure(Occupancy):
    """The same, but a throttled kind enters only while no request waits for a decode slot and one is free.

    Ours (GG-SP+). The paper's gate fills every prompt place that happens to be idle, which at finite n
    over-serves kinds whose prompts are cheap and whose decodes are not.
    """

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        return kind not in self.throttled or (not fleet.handoff and fleet.free_slots > 0)


class TokenBucket(Occupancy):
    """The same, but a throttled kind enters at its planned rate: one token each, a few may be saved up.

    Ours, for plans that leave decode slots idle on purpose (fairness, TPOT caps), where a free slot is no
    licence to admit.
    """

    def __init__(self, plan: FluidPlan, engines: int) -> None:
        super().__init__(plan, engines)
        self._level = {kind: (1.0, 0.0) for kind in self.throttled}  # tokens, and when there were so many

    def level(self, kind: str, now: float) -> float:
        tokens, since = self._level[kind]
        return min(BUCKET, tokens + (now - since) * self.throttled[kind])

    def adopt(self, fleet: Fleet, before: Admission | None) -> None:
        """Levels go on from where they were; a kind that was not throttled before begins as at the start."""
        now = fleet.now
        known = before.throttled if isinstance(before, TokenBucket) else {}
        for kind in self.throttled:
            level = before.level(kind, now) if isinstance(before, TokenBucket) and kind in known else 1.0
            self._level[kind] = (level, now)

    def lets_in(self, kind: str, fleet: Fleet) -> bool:
        return kind not in self.throttled or self.level(kind, fleet.now) >= FULL

    def entered(self, request: Request, now: float) -> None:
        if request.kind in self.throttled:
            self._level[request.kind] = (self.level(request.kind, now) - 1.0, now)

    def wake(self, fleet: Fleet) -> float:
        times = [
            fleet.now + (1.0 - self.level(kind, fleet.now)) / rate
            for kind, rate in self.throttled.items()
            if fleet.queues.get(kind)
        ]
        return min(times, default=inf)


GATES = {"occupancy": Occupancy, "back-pressure": BackPressure, "token-bucket": TokenBucket}


# -- placements: where a request decodes whose prompt is done

POOLS = (SOLO, MIXED)


class SoloFirst:
    """The greedy router (section 4.2): a free slot on a solo engine, else on a mixed one, else one queue."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def next(self, fleet: Fleet) -> Move | None:
        """Which request decodes where next; asked only while one waits for that."""
        places = fleet.open[SOLO] or fleet.open[MIXED]
        if not places:
            return None
        id = next(iter(fleet.handoff))
        return Move(id, at_home(fleet, id, places, self.draw), Stage.DECODE)

    def engines_changed(self, fleet: Fleet) -> None:
        """Engines came, went, or have another role or room."""


class ByPool(SoloFirst):
    """The randomised router (section 5.2): each request draws its pool once and waits for a slot there.

    So the decodes of every kind come to stand where the plan wants them, which the greedy router only does
    for their totals.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(draw)
        self.shares = solo_shares(plan)
        self._drawn: dict[int, str] = {}  # the pool of each that waits
        self._roles: set[str] | None = None

    def next(self, fleet: Fleet) -> Move | None:
        lines: dict[str, list[Request]] = {pool: [] for pool in POOLS}
        before, self._drawn = self._drawn, {}
        for id, request in fleet.handoff.items():
            pool = self._drawn[id] = before.get(id) or self._pool(request)
            lines[pool].append(request)
        for pool, other in ((SOLO, MIXED), (MIXED, SOLO)):
            waiting = lines[pool]
            if not waiting:
                continue
            if self._roles is None:  # of engines that take decodes, looked up again when engines change
                self._roles = {replica.role for replica in fleet.replicas if replica.room.decodes > 0}
            places = fleet.open[pool] or (fleet.open[other] if pool not in self._roles else ())
            if places:
                id = self.head(pool, waiting)
                return Move(id, at_home(fleet, id, places, self.draw), Stage.DECODE)
        return None

    def _pool(self, request: Request) -> str:
        """The draw; a kind the plan does not know decodes on solo engines."""
        return SOLO if self.draw() < self.shares.get(request.kind, 1.0) else MIXED

    def head(self, pool: str, waiting: list[Request]) -> int:
        return waiting[0].id

    def engines_changed(self, fleet: Fleet) -> None:
        self._roles = None


class ByPoolAndKind(ByPool):
    """The general router (EC.6), for plans that let requests wait for decode slots.

    When a slot is free in a pool the kind is drawn by its planned rate there, among waiting kinds.
    """

    def __init__(self, plan: FluidPlan, draw: Draw) -> None:
        super().__init__(plan, draw)
        pace, flows = plan.instance.pace, plan.instance.flows
        speed = {SOLO: pace.solo_speed, MIXED: 1 / pace.mixed_step}
        decodes = {SOLO: plan.solo, MIXED: plan.mixed}
        self.weights = {
            pool: {f.name: y * speed[pool] / f.output for f, y in zip(flows, decodes[pool], strict=True)}
            for pool in POOLS
        }
        self._kinds: dict[str, dict[str, None]] = {pool: {} for pool in POOLS}  # in the order they came

    def head(self, pool: str, waiting: list[Request]) -> int:
        """The head of the kind that was drawn; first come, first served where no weight says anything."""
        heads: dict[str, int] = {}
        for request in waiting:
            heads.setdefault(request.kind, request.id)
            self._kinds[pool][request.kind] = None
        weights = self.weights[pool]
        present = [(weights.get(kind, 0.0), heads[kind]) for kind in self._kinds[pool] if kind in heads]
        total = sum(weight for weight, _ in present)
        if total <= 0:
            return waiting[0].id
        mark = self.draw() * total
        for weight, id in present:
            mark -= weight
            if mark < 0:
                return id
        return present[-1][1]


def solo_shares(plan: FluidPlan) -> dict[str, float]:
    """p_s: the share of a kind's decodes that the plan starts on solo engines."""
    pace, shares = plan.instance.pace, {}
    for flow, mixed, solo in zip(plan.instance.flows, plan.mixed, plan.solo, strict=True):
        tokens = mixed / pace.mixed_step + solo * pace.solo_speed
        shares[flow.name] = solo * pace.solo_speed / tokens if tokens > 0 else 1.0
    return shares


def at_home(fleet: Fleet, id: int, places: Sequence[int], draw: Draw) -> int:
    """The engine that did its prompt if that is among these, which have a slot: nothing need be copied then.

    Ours: the paper draws among all, because its model moves KV in no time.
    """
    home = fleet.replicas[fleet.places[id].replica]
    at_hand = home.slots > 0 and fleet.open[home.role] is places
    return home.id if at_hand else pick(places, draw)


def pick(members: Sequence[int], draw: Draw) -> int:
    return members[int(draw() * len(members))] if len(members) > 1 else members[0]
