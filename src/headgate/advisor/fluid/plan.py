"""How a fleet splits its engines between prompts and decodes, whom it serves, and what that is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from headgate.advisor.fluid.demand import Demand, demand, not_with
from headgate.advisor.fluid.from_log import logged_demand
from headgate.advisor.fluid.pace import fixed_roles, make_levels, make_pace
from headgate.advisor.settings import FleetSettings, LevelSettings, StepSettings
from headgate.core.errors import InputError, unknown
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.settings import Experiment
from headgate.methods.bounds.capacity import Requests, engine_bound
from headgate.methods.fluid.flows import BUNDLED, SEPARATE, Instance, Prices
from headgate.methods.fluid.frontier import CAPS, PARAMETERS, Point, elasticity, frontier
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.planner import NOTHING, FluidPlan, plan_fluid
from headgate.methods.fluid.staffing import Staffing, staff
from headgate.stats.metrics import without_nan

FRONTIER_POINTS = 8
MOST_CLUSTERS = 50
MOST_ENGINES = 1_000_000  # beyond, shares of them come near the solver's tolerance
NO_LEVELS_HERE = ("ttft", "abort")


@dataclass(frozen=True)
class FluidAnswer:
    """The answer of `headgate plan fluid`. Rates and revenue of the plan are per engine."""

    costs: str
    demand: Demand
    plan: FluidPlan
    staffing: Staffing
    spare: Staffing  # with the slack that withholding gates want
    gains: tuple[float, float]  # revenue per second of one engine more, and of one fewer (negative)
    next_mixed: bool  # whether the next engine takes prompts
    full: float  # engines that would serve everybody, as a fluid
    sensitivity: dict[str, float]
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    per_second: dict[str, float]  # what a full engine earns with each class alone, best first; from cards

    @property
    def engines(self) -> int:
        return self.staffing.engines

    @property
    def per_engine(self) -> float:
        """Requests per second that each engine is offered."""
        return sum(flow.rate for flow in self.plan.instance.flows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, None where there is none."""
        plan, pace = self.plan, self.plan.instance.pace
        more = {"adds": self.gains[0], "role": "mixed" if self.next_mixed else "solo"}
        document = {
            "costs_from": self.costs,
            "classes_from": self.demand.source,
            "engines": self.engines,
            "pace": asdict(pace) | {"mixed_step": pace.mixed_step},
            "prices": asdict(plan.instance.prices),
            "charging": plan.instance.charging,
            "levels": {key: value for key, value in asdict(plan.levels).items() if value is not None},
            "classes": self._classes(),
            "mixed_engines": self.staffing.mixed,
            "solo_engines": self.staffing.solo,
            "mixed_engines_with_slack": self.spare.mixed,
            "revenue": plan.revenue * self.engines,
            "revenue_per_engine": plan.revenue,
            "tpot": {"over_tokens": plan.token_tpot, "over_slots": plan.tpot},
            "shadow_prices": _prices(plan),
            "one_more_engine": more,
            "one_engine_less": {"adds": self.gains[1]},
            "engines_to_serve_all": self.full,
            "elasticities": self.sensitivity,
            "frontier": [_point(point) for point in self.points],
            "value_per_engine_second": self.per_second,
            "notes": list(self.notes),
        }
        plain = without_nan(document)
        assert isinstance(plain, dict)
        return plain

    def _classes(self) -> list[dict[str, Any]]:
        """One entry each, with numbers of the whole fleet."""
        plan, found = self.plan, []
        per_engine = {
            "served": plan.served,
            "prefilling": plan.prefill,
            "mixed_decodes": plan.mixed,
            "solo_decodes": plan.solo,
            "waiting": plan.waiting,
            "waiting_for_decode": plan.decode_waiting,
        }
        for place, flow in enumerate(plan.instance.flows):
            each = {"name": flow.name, "prompt": flow.prompt, "output": flow.output}
            each |= {"cached": flow.cached} if flow.cached else {}
            each |= {"arrivals": flow.rate * self.engines, "impatience": flow.impatience}
            each |= {name: values[place] * self.engines for name, values in per_engine.items()}
            each["turned_away"] = not isfinite(plan.waiting[place])
            each["worth_of_one_more"] = plan.shadows.arrival[place]
            each["worth_when_prefilled"] = plan.shadows.prefilled[place]
            found.append(each)
        return found


def _prices(plan: FluidPlan) -> dict[str, Any]:
    shadows = plan.shadows
    seats = {"prefill": shadows.prefill, "mixed_seat": shadows.mixed, "solo_seat": shadows.solo}
    return seats | {"levels": shadows.levels}


def _point(point: Point) -> dict[str, float | None]:
    return {"value": point.value, "revenue": point.revenue if point.plan else None, "slope": point.slope}


def make_fluid_plan(
    settings: Experiment, fleet: FleetSettings, steps: StepSettings, asked: LevelSettings
) -> FluidAnswer:
    """The whole answer."""
    engines, roles = fleet.size(settings), _checked(settings, fleet)
    who = _demand(settings, fleet, steps)
    pace, costs, notes = make_pace(settings, steps, who)
    flows = tuple(replace(flow, rate=flow.rate / engines) for flow in who.flows)
    prices = Prices(*fleet.prices(settings))
    instance = Instance(flows, pace, prices, SEPARATE if fleet.separate else BUNDLED).checked()
    levels = make_levels(settings, asked, roles)
    plan = plan_fluid(instance, levels)
    more, less = (_gain(instance, levels, plan, engines, change) for change in (1, -1))
    return FluidAnswer(
        costs=costs,
        demand=who,
        plan=plan,
        staffing=roles or staff(plan, engines),
        spare=staff(plan, engines, slack=True),
        gains=(more, less),
        next_mixed=_next_is_mixed(instance, levels, engines),
        full=fluid_bound(instance) * engines,
        sensitivity={name: elasticity(instance, name, levels) for name in PARAMETERS},
        points=tuple(_frontier(instance, levels, plan, asked.frontier)),
        notes=(*who.notes, *notes, *_warnings(plan)),
        per_second={} if steps.costs else _per_second(settings, who, prices),
    )


def _demand(settings: Experiment, fleet: FleetSettings, steps: StepSettings) -> Demand:
    """The classes: as given, as a router saw them, or of a workload."""
    if fleet.from_log is None:
        engine = None if steps.costs else make_engine(settings, load_card(settings.card))
        return demand(settings, fleet.classes, fleet.clusters, engine)
    if fleet.classes:
        raise InputError("--from-log and --class: both describe the requests; drop one of the two")
    not_with(settings, "--from-log")
    return logged_demand(fleet.from_log)


def _per_second(settings: Experiment, who: Demand, prices: Prices) -> dict[str, float]:
    """Value over the least time a request takes from an engine that runs as much as it can in every step.

    The plan's own order of classes prices one prompt at a time, which real engines do not run.
    """
    engine = make_engine(settings, load_card(settings.card))
    earned = {}
    for flow in who.flows:
        lengths = Requests.of([max(flow.prompt, 1.0)], [max(flow.output - 1, 0.0)])
        bound = engine_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
        earned[flow.name] = prices.value(flow) / bound.seconds
    return dict(sorted(earned.items(), key=lambda each: -each[1]))


def _checked(settings: Experiment, fleet: FleetSettings) -> Staffing | None:
    """The roles the user asks for, if any; what cannot be is refused before anything is read."""
    engines = fleet.size(settings)
    if engines < 1:
        raise InputError(f"--engines {engines}; give at least 1")
    if engines > MOST_ENGINES:
        raise InputError(f"--engines {engines}; a plan is exact up to {MOST_ENGINES:,}, give fewer")
    if settings.slots is not None and settings.slots < 2:
        raise InputError(
            f"--slots {settings.slots}; give at least 2 seats: a prompt takes one beside the decodes"
        )
    if not 1 <= fleet.clusters <= MOST_CLUSTERS:
        raise InputError(f"--clusters {fleet.clusters}; give 1 to {MOST_CLUSTERS}")
    for word in NO_LEVELS_HERE:
        if word in settings.model_fields_set and getattr(settings, word) is not None:
            raise InputError(
                f"--{word} is no level of a fluid plan, which knows rates and no single wait; drop it, or "
                "ask headgate plan capacity --find engines"
            )
    return fixed_roles(fleet, engines)


def fluid_bound(instance: Instance) -> float:
    """How many times these engines would serve everybody, if requests were a fluid."""
    pace, flows = instance.pace, instance.flows
    prefill = sum(flow.rate * pace.prefill_seconds(flow) for flow in flows)
    decode = sum(flow.rate * pace.decode_weight(flow) for flow in flows) / (pace.seats * pace.solo_speed)
    return max(prefill, decode)


def _with_engines(instance: Instance, engines: int, change: int) -> Instance:
    """The same arrivals on another number of engines."""
    scale = engines / (engines + change)
    return replace(instance, flows=tuple(replace(flow, rate=flow.rate * scale) for flow in instance.flows))


def _gain(instance: Instance, levels: Levels, plan: FluidPlan, engines: int, change: int) -> float:
    """Revenue of the fleet with an engine more or fewer, less what it is now."""
    if engines + change < 1:
        return -plan.revenue
    other = plan_fluid(_with_engines(instance, engines, change), levels)
    return other.revenue * (engines + change) - plan.revenue * engines


def _next_is_mixed(instance: Instance, levels: Levels, engines: int) -> bool:
    now = staff(plan_fluid(instance, levels), engines).mixed
    return staff(plan_fluid(_with_engines(instance, engines, 1), levels), engines + 1).mixed > now


def _frontier(instance: Instance, levels: Levels, plan: FluidPlan, level: str | None) -> list[Point]:
    """R along one cap, from the tightest that makes sense to where it stops to matter."""
    if level is None:
        return []
    name = level.replace("-", "_")
    if name not in CAPS:
        raise unknown("service level", level, [cap.replace("_", "-") for cap in CAPS])
    free = plan_fluid(instance, replace(levels, **{name: None}))  # type: ignore[arg-type]
    low, high = 0.0, max(free.prefill) - min(free.prefill)
    if name == "decode_fairness":
        high = max(free.solo) - min(free.solo)
    elif name == "tpot":
        low = 1.0001 / instance.pace.solo_speed
        high = free.tpot if levels.tpot_over == "slots" else free.token_tpot
    steps = range(FRONTIER_POINTS)
    values = [low + (high - low) * step / (FRONTIER_POINTS - 1) for step in steps] if high > low else [high]
    return frontier(instance, name, values, levels)


def _warnings(plan: FluidPlan) -> list[str]:
    """Where the plan leans on what its model leaves out."""
    pace, found = plan.instance.pace, []
    if plan.prefilling <= NOTHING:
        found.append("nobody is served: no engine may prefill under these roles and levels; loosen one")
    if not pace.keeps_up:
        found.append(
            f"mixed steps are so short (κ = {pace.ratio:.2f}) that a queue before decode may pay; what the "
            "paper proves of its router does not hold"
        )
    short = [flow.name for flow in plan.instance.flows if flow.computed < pace.chunk]
    if short and not pace.whole_chunks:
        found.append(
            f"prompts of {', '.join(short)} are shorter than a chunk of {pace.chunk}: --whole-chunks counts "
            "a whole step for each"
        )
    cached = [
        f"{flow.name} {100 * flow.cached / flow.prompt:.0f} %" for flow in plan.instance.flows if flow.cached
    ]
    if cached:
        found.append(f"prompt tokens in prefix caches are paid for but no prefill work: {', '.join(cached)}")
    if any(loss > NOTHING for loss in plan.decode_loss):
        found.append(
            "the plan lets requests give up after their prompt: use the service-level-general router"
        )
    return found
