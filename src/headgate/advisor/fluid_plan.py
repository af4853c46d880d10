"""How a fleet splits its engines between prompts and decodes, which requests it serves, and its worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headgate.advisor.capacity.traffic import own_rate
from headgate.advisor.settings import FleetSettings, LevelSettings, StepSettings
from headgate.advisor.situation import drawn_workload, named_after
from headgate.core.durations import duration
from headgate.core.errors import InputError, unknown
from headgate.core.policy import End
from headgate.cost.card import load_card
from headgate.cost.likeness import error_bar
from headgate.cost.model import Shape, StepCost
from headgate.estimators.traffic import MOST_CACHED
from headgate.experiment import build
from headgate.experiment.fleet import flow_of, mean_lengths
from headgate.experiment.settings import MAKE_LENGTHS, Experiment, at_once, flag
from headgate.methods.bounds import Requests, engine_bound
from headgate.methods.fluid import planner
from headgate.methods.fluid.flows import (
    BUNDLED,
    SEPARATE,
    EnginePace,
    Flow,
    Instance,
    TokenPrices,
    mixed_line,
)
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.plan import Staffing, fixed_staff, staff
from headgate.record.live_trace import read_route_trace
from headgate.record.tables import ENDS, Run
from headgate.sim.engine.engine import Engine
from headgate.stats.metrics import without_nan

MOST_CLUSTERS = 50
MOST_ENGINES = 1_000_000  # beyond, shares of them come near the solver's tolerance
NO_LEVELS_HERE = ("ttft", "abort")


@dataclass(frozen=True)
class Demand:
    source: str
    flows: tuple[Flow, ...]
    context: float  # KV tokens a running decode reads, at a random moment
    notes: tuple[str, ...] = ()
    lost: build.Unservable = build.ALL_FIT


@dataclass(frozen=True)
class FluidAnswer:
    """The answer of `headgate plan fluid`. Rates and revenue of the plan are per engine."""

    costs: str
    demand: Demand
    plan: planner.FluidPlan
    staffing: Staffing
    spare: Staffing  # with the slack that withholding gates want
    gains: tuple[float, float]  # revenue per second of one engine more, and of one fewer (negative)
    next_mixed: bool  # whether the next engine takes prompts
    full: float  # engines that would serve every request, as a fluid
    notes: tuple[str, ...]
    per_second: dict[str, float]  # what a full engine earns with each class alone, best first; from cards

    @property
    def engines(self) -> int:
        return self.staffing.engines

    def as_dict(self) -> dict[str, Any]:
        plan, pace, shadows = self.plan, self.plan.instance.pace, self.plan.shadows
        more = {"adds": self.gains[0], "role": "mixed" if self.next_mixed else "solo"}
        slots = {"prefill": shadows.prefill, "mixed_slot": shadows.mixed, "solo_slot": shadows.solo}
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
            "shadow_prices": slots | {"levels": shadows.levels},
            "one_more_engine": more,
            "one_engine_less": {"adds": self.gains[1]},
            "engines_to_serve_all": self.full,
            "value_per_engine_second": self.per_second,
            "notes": list(self.notes),
        }
        return dict(without_nan(document))

    def _classes(self) -> list[dict[str, Any]]:
        plan, classes = self.plan, []
        per_engine = {"served": plan.served, "prefilling": plan.prefill, "mixed_decodes": plan.mixed}
        per_engine |= {"solo_decodes": plan.solo, "waiting": plan.waiting}
        per_engine |= {"waiting_for_decode": plan.decode_waiting}
        for place, flow in enumerate(plan.instance.flows):
            one = {"name": flow.name, "prompt": flow.prompt, "output": flow.output}
            one |= {"cached": flow.cached} if flow.cached else {}
            one |= {"arrivals": flow.rate * self.engines, "impatience": flow.impatience}
            one |= {name: values[place] * self.engines for name, values in per_engine.items()}
            one["turned_away"] = not isfinite(plan.waiting[place])
            one["worth_of_one_more"] = plan.shadows.arrival[place]
            one["worth_when_prefilled"] = plan.shadows.prefilled[place]
            classes.append(one)
        return classes


def make_fluid_plan(
    settings: Experiment, fleet: FleetSettings, steps: StepSettings, asked: LevelSettings
) -> FluidAnswer:
    build.refuse_speculation(settings, "plan fluid")
    engines, roles = fleet.size(settings), _checked(settings, fleet)
    traffic = _demand(settings, fleet, steps)
    pace, costs, notes = make_pace(settings, steps, traffic)
    flows = tuple(replace(flow, rate=flow.rate / engines) for flow in traffic.flows)
    prices = TokenPrices(*fleet.prices(settings))
    instance = Instance(flows, pace, prices, SEPARATE if fleet.separate else BUNDLED).checked()
    levels = make_levels(settings, asked, roles)
    plan = planner.plan_fluid(instance, levels)
    more, less = (_gain(instance, levels, plan, engines, change) for change in (1, -1))
    grown = planner.plan_fluid(_with_engines(instance, engines, 1), levels)
    return FluidAnswer(
        costs=costs,
        demand=traffic,
        plan=plan,
        staffing=roles or staff(plan, engines),
        spare=staff(plan, engines, slack=True),
        gains=(more, less),
        next_mixed=staff(grown, engines + 1).mixed > staff(plan, engines).mixed,
        full=fluid_bound(instance) * engines,
        notes=(*traffic.notes, *notes, *_warnings(plan)),
        per_second={} if steps.costs else _per_second(settings, traffic, prices),
    )


def _demand(settings: Experiment, fleet: FleetSettings, steps: StepSettings) -> Demand:
    if fleet.from_log is None:
        engine = None if steps.costs else build.make_engine(settings, load_card(settings.card))
        return demand(settings, fleet.classes, fleet.clusters, engine)
    if fleet.classes:
        raise InputError("--from-log and --class: both describe the requests; drop one of the two")
    not_with(settings, "--from-log")
    return logged_demand(fleet.from_log)


def _per_second(settings: Experiment, traffic: Demand, prices: TokenPrices) -> dict[str, float]:
    """Value over the least time a request takes from an engine that runs as much as it can in every step.

    The plan's own order of classes prices one prompt at a time, which real engines do not run.
    """
    engine = build.make_engine(settings, load_card(settings.card))
    earned = {}
    for flow in traffic.flows:
        lengths = Requests.of([max(flow.prompt, 1.0)], [max(flow.output - 1, 0.0)])
        bound = engine_bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
        earned[flow.name] = prices.value(flow) / bound.seconds
    return dict(sorted(earned.items(), key=lambda each: -each[1]))


def _checked(settings: Experiment, fleet: FleetSettings) -> Staffing | None:
    engines = fleet.size(settings)
    if engines < 1:
        raise InputError(f"--engines {engines}; give at least 1")
    if engines > MOST_ENGINES:
        raise InputError(f"--engines {engines}; a plan is exact up to {MOST_ENGINES:,}, give fewer")
    if settings.slots is not None and settings.slots < 2:
        raise InputError(
            f"--slots {settings.slots}; give at least 2 slots: a prompt takes one beside the decodes"
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
    pace, flows = instance.pace, instance.flows
    prefill = sum(flow.rate * pace.prefill_seconds(flow) for flow in flows)
    decode = sum(flow.rate * pace.decode_weight(flow) for flow in flows) / (pace.slots * pace.solo_speed)
    return max(prefill, decode)


def _with_engines(instance: Instance, engines: int, change: int) -> Instance:
    scale = engines / (engines + change)
    return replace(instance, flows=tuple(replace(flow, rate=flow.rate * scale) for flow in instance.flows))


def _gain(instance: Instance, levels: Levels, plan: planner.FluidPlan, engines: int, change: int) -> float:
    if engines + change < 1:
        return -plan.revenue
    other = planner.plan_fluid(_with_engines(instance, engines, change), levels)
    return other.revenue * (engines + change) - plan.revenue * engines


def _warnings(plan: planner.FluidPlan) -> Iterator[str]:
    pace = plan.instance.pace
    if plan.prefilling <= planner.NOTHING:
        yield "no request is served: no engine may prefill under these roles and levels; loosen one"
    if not pace.keeps_up:
        yield (
            f"mixed steps are so short (κ = {pace.ratio:.2f}) that a queue before decode may pay; what the "
            "paper proves of its router does not hold"
        )
    short = [flow.name for flow in plan.instance.flows if flow.computed < pace.chunk]
    if short and not pace.whole_chunks:
        yield (
            f"prompts of {', '.join(short)} are shorter than a chunk of {pace.chunk}: --whole-chunks counts "
            "a whole step for each"
        )
    cached = {flow.name: flow.cached / flow.prompt for flow in plan.instance.flows if flow.cached}
    if cached:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in cached.items())
        yield f"prompt tokens in prefix caches are paid for but no prefill work: {shares}"
    if any(loss > planner.NOTHING for loss in plan.decode_loss):
        yield "the plan lets requests give up after their prompt: use the service-level-general router"


# -- classes: given, drawn or cut from a trace

Floats = NDArray[np.float64]
NUMBERS = ("prompt", "output", "rate")
OPTIONAL = ("patience", "cached")
DRAWN = 50_000  # requests drawn to know the means of length laws
ROUNDS = 60  # of the clustering
NOT_WITH_CLASSES = (*MAKE_LENGTHS, "classes", "stages", "trace", "rate", "clients", "requests")


def demand(words: Experiment, classes: tuple[str, ...], clusters: int, engine: Engine | None) -> Demand:
    if classes:
        not_with(words, "--class")
        flows = tuple(_flow(text, words.patience) for text in classes)
        tokens = sum(flow.rate * flow.output for flow in flows)
        # outputs are taken to be exponential: the one that runs has made D tokens on average
        read = sum(flow.rate * flow.output * (flow.prompt + flow.output) for flow in flows)
        return Demand("classes as given", flows, read / tokens if tokens > 0 else 0.0)
    if words.clients or at_once(words):
        raise InputError("a fluid plan needs arrivals per second; give --rate instead of another load")
    if words.rate is None and words.trace is None:
        raise InputError(
            "no class has arrivals; give --rate for the whole fleet, --class NAME:...,rate=R or a trace"
        )
    workload, notes = drawn_workload(words, DRAWN)
    lost = build.ALL_FIT if engine is None else build.unservable(workload, engine)
    workload = workload if engine is None else build.servable(workload, engine)
    rate = words.rate or own_rate(workload, "give --rate")
    outputs = np.minimum(workload.output, workload.limit).astype(np.float64)
    prompts = workload.prompt.astype(np.float64)
    several = len(set(workload.kind.tolist())) > 1
    groups = workload.kind if several else cluster(prompts, outputs, clusters)
    names = {place: kind.name for place, kind in enumerate(workload.kinds)} if several else {}
    numbers = np.unique(groups).tolist()
    flows = tuple(flow_of(workload, outputs, groups == n, names.get(n) or None, rate) for n in numbers)
    _, context = mean_lengths(workload)
    return Demand(named_after(words, workload), named_apart(flows), context, tuple(notes), lost)


def not_with(words: Experiment, name: str) -> None:
    for word in NOT_WITH_CLASSES:
        if word in words.model_fields_set and getattr(words, word) not in (None, ()):
            raise InputError(f"{name} and {flag(word)}: both describe the requests; drop one of the two")


def cluster(prompts: Floats, outputs: Floats, most: int) -> NDArray[np.int64]:
    """Up to so many groups of like prompt and output length: k-means in logarithms, the same every time.

    It starts from equal parts along the direction in which lengths differ most.
    """
    points = np.log(np.column_stack([np.maximum(prompts, 1.0), np.maximum(outputs, 1.0)]))
    centred = points - points.mean(axis=0)
    along = centred @ np.linalg.svd(centred, full_matrices=False)[2][0]
    edges = np.quantile(along, np.linspace(0, 1, most + 1)[1:-1])
    group = np.searchsorted(edges, along, side="right")
    for _ in range(ROUNDS):
        used = np.unique(group)
        centres = np.array([points[group == each].mean(axis=0) for each in used])
        nearest = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        if np.array_equal(nearest, group):
            break
        group = nearest
    return np.asarray(group, np.int64)


def named_apart(flows: tuple[Flow, ...]) -> tuple[Flow, ...]:
    seen, named = Counter[str](), []
    for flow in flows:
        seen[flow.name] += 1
        number = f".{seen[flow.name]}" if seen[flow.name] > 1 else ""
        named.append(replace(flow, name=flow.name + number))
    return tuple(named)


def _flow(text: str, patience: float | None) -> Flow:
    """`code:prompt=300,output=1000,rate=10,patience=10s` as a class."""
    name, colon, rest = text.partition(":")
    if not colon or not name.strip():
        raise InputError(
            f"--class {text!r} is not NAME:prompt=TOKENS,output=TOKENS,rate=R; write "
            "code:prompt=300,output=1000,rate=10"
        )
    name, about, values = name.strip(), f"--class {name.strip()}: ", {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"{about}{part!r} is not NAME=VALUE; write it as prompt=300")
        if key not in (*NUMBERS, *OPTIONAL):
            raise unknown(f"setting of --class {name}", key, (*NUMBERS, *OPTIONAL))
        if key in values:
            raise InputError(f"{about}{key} is given twice; drop one of the two")
        values[key] = duration(value) if key == "patience" else _number(about + key, value)
    missing = [key for key in NUMBERS if key not in values]
    if missing:
        raise InputError(f"{about}{missing[0]} is missing; write {missing[0]}=NUMBER")
    wait = values.get("patience", patience)
    if wait is not None and wait <= 0:
        raise InputError(f"{about}patience is {wait:g} s; give more than 0, or leave it out for ever")
    prompt, output, rate = (values[key] for key in NUMBERS)
    if rate <= 0:
        fault = "no request arrives" if rate == 0 else "a rate is at least 0"
        raise InputError(f"{about}rate is {rate:g} requests/s: {fault}; give more than 0, or drop the class")
    impatience = 1 / wait if wait else 0.0
    return Flow(name, prompt, output, rate, impatience, cached=values.get("cached", 0.0))


def _number(about: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise InputError(f"{about}={text!r} is not a finite number; fix it")
    return value


# -- classes as a router saw them

LONGEST_PATIENCE = 3600.0  # seconds; more patient classes count as never giving up
FEW = 30  # finished requests, or exits from the queue, below which an estimate is called rough


def logged_demand(path: str) -> Demand:
    """Rates, lengths and patience by class, over the whole file.

    Lengths and patience are estimated as the running router does: ends over exposure. Requests that broke
    off count with the tokens they had, requests that were refused or served with the time they waited; a
    mean over finished requests alone would be too short. The class names are those of the router.
    """
    run = read_route_trace(path)
    arrival = run.requests["arrival"]
    span = float(arrival.max() - arrival.min())
    if span <= 0:
        raise InputError(
            f"trace {path}: all requests came at one moment, so no rate is known; take a longer one"
        )
    notes: list[str] = []
    flows = tuple(_flows(run, span, notes))
    done = run.completed()
    outputs = run.requests["output"][done].astype(np.float64)
    reads = outputs * (run.requests["prompt"][done] + outputs / 2)
    return Demand(f"router trace {path}", flows, float(reads.sum() / max(outputs.sum(), 1.0)), tuple(notes))


def _flows(run: Run, span: float, notes: list[str]) -> Iterator[Flow]:
    requests, done = run.requests, run.completed()
    if not done.any():
        raise InputError("no request of the trace finished, so no output length is known; take another one")
    overall = float(requests["output"].sum() / done.sum())
    for number, kind in enumerate(run.kinds):
        name, mine = str(kind["name"]), requests["kind"] == number
        ended = int((mine & done).sum())
        output = float(requests["output"][mine].sum() / ended) if ended else overall
        if not ended:
            notes.append(f"no request of class {name} finished: its output is the mean of all classes")
        elif ended < FEW:
            notes.append(f"{ended} requests of class {name} finished: its output length is rough")
        rate = float(mine.sum()) / span
        prompt = float(requests["prompt"][mine].mean())
        # what engines told of their caches at the end of their answers
        share = float(requests["cached"][mine & done].sum() / max(requests["prompt"][mine & done].sum(), 1.0))
        cached = max(0.0, min(share, MOST_CACHED)) * prompt
        yield Flow(name, prompt, max(output, 1.0), rate, _impatience(run, mine, name, notes), cached=cached)


def _impatience(run: Run, mine: NDArray[np.bool_], name: str, notes: list[str]) -> float:
    """Clients that left the queue over the seconds that all of the class waited; 0: none gives up."""
    requests = run.requests
    queued = np.isnan(requests["admitted"])
    gone = requests["how"] == ENDS.index(End.ABORTED)
    exits = int((mine & queued & gone).sum())
    until = np.where(queued, requests["finished"], requests["admitted"])
    waited = float((until - requests["arrival"])[mine].sum())
    if exits == 0 or waited <= 0 or exits / waited < 1 / LONGEST_PATIENCE:
        return 0.0
    if exits < FEW:
        notes.append(f"{exits} clients of class {name} left the queue: its patience is rough")
    return exits / waited


# -- speeds, roles and service levels

CHUNK = 512  # prompt tokens in a mixed step of a card's engine, unless told otherwise
PAPER_SLOTS, PAPER_CHUNK = 16, 256  # with step costs as numbers


def make_levels(settings: Experiment, asked: LevelSettings, roles: Staffing | None) -> Levels:
    served: dict[str, float] = {}
    for text in asked.serve:
        name, equals, share = text.rpartition("=")
        try:
            value = float(share.rstrip("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            value = inf
        if not equals or not isfinite(value):
            raise InputError(f"--serve {text!r} is not CLASS=SHARE; write it as --serve code=90%")
        served[name] = value
    return Levels(
        prefill_fairness=asked.prefill_fairness,
        decode_fairness=asked.decode_fairness,
        tpot=settings.tpot,
        tpot_over=asked.tpot_over,
        served=served,
        prefilling=roles.mixed / roles.engines if roles else 1.0,
    )


def fixed_roles(asked: FleetSettings, engines: int) -> Staffing | None:
    mixed, solo = asked.mixed, asked.solo
    if mixed is None and solo is None:
        return None
    solo = max(0, engines - (mixed or 0)) if solo is None else solo
    return fixed_staff(engines, max(0, engines - solo) if mixed is None else mixed, solo)


def make_pace(
    settings: Experiment, asked: StepSettings, traffic: Demand
) -> tuple[EnginePace, str, tuple[str, ...]]:
    costs = asked.costs
    if not costs:
        return _card_pace(settings, asked, traffic)
    missing = next((name for name, text in costs.items() if text is None), None)
    if missing:
        raise InputError(f"{missing} is missing; give all three step costs, or none")
    if "card" in settings.model_fields_set:
        raise InputError("--card and step costs as numbers; the numbers replace a card, drop one of the two")
    fixed, per_token, alone = (_seconds(name, str(text)) for name, text in costs.items())
    if alone <= 0:
        raise InputError("--solo-step 0; a decode step takes time, give such as 22ms")
    slots = settings.slots or PAPER_SLOTS
    chunk = PAPER_CHUNK if asked.chunk is None else asked.chunk
    pace = EnginePace(slots, chunk, fixed, per_token, 1 / alone, asked.whole_chunks)
    return pace, "step costs as given", ()


def _seconds(flag: str, text: str) -> float:
    try:
        return duration(text, None) if flag == "--mixed-per-token" else duration(text)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None


def _card_pace(
    settings: Experiment, asked: StepSettings, traffic: Demand
) -> tuple[EnginePace, str, tuple[str, ...]]:
    """A straight line through the card's mixed steps at this chunk, and its decode step with all slots."""
    card = load_card(settings.card)
    engine = build.make_engine(settings, card)
    slots, context = engine.running, traffic.context
    chunk = asked.chunk
    if chunk is None:
        chunk = settings.budget - slots + 1 if settings.budget else CHUNK
    if chunk < 1 or chunk + slots - 1 > engine.batch_tokens:
        raise InputError(
            f"a chunk of {chunk} tokens beside {slots - 1} decodes does not fit the step's budget of "
            f"{engine.batch_tokens}; choose another --chunk, --slots or --budget"
        )
    alone = engine.cost.seconds(Shape(slots, round(slots * context)))
    fixed, slope = _mixed_line(engine.cost, traffic, slots - 1, chunk)
    held = slots * context
    notes = list(error_bar(card))
    if held > engine.kv_tokens:
        each = f"{slots} slots of {context:,.0f} KV tokens each"
        notes.append(f"{each} need {held:,.0f}, the engine has {engine.kv_tokens:,}: lower --slots")
    pace = EnginePace(slots, chunk, fixed, slope, 1 / alone, asked.whole_chunks)
    return pace, f"card {card.name}", tuple(notes)


def _mixed_line(cost: StepCost, traffic: Demand, decodes: int, chunk: int) -> tuple[float, float]:
    rate = sum(flow.rate for flow in traffic.flows) or 1.0
    behind = round(sum(flow.prompt * flow.rate for flow in traffic.flows) / rate / 2)
    return mixed_line(cost, decodes, traffic.context, chunk, behind)
