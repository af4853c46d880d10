"""The engine's speeds, fixed roles and service levels of a fluid plan, from its settings."""

from __future__ import annotations

from math import inf, isfinite

from headgate.advisor.fluid.demand import Demand
from headgate.advisor.settings import FleetSettings, LevelSettings, StepSettings
from headgate.core.durations import duration, price
from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.error_bar import error_bar
from headgate.cost.model import Shape, StepCost
from headgate.experiment.build import make_engine
from headgate.experiment.settings import Experiment
from headgate.methods.fluid.flows import Pace
from headgate.methods.fluid.levels import Levels
from headgate.methods.fluid.staffing import Staffing, fixed_staff

CHUNK = 512  # prompt tokens in a mixed step of a card's engine, unless told otherwise
PAPER_SEATS, PAPER_CHUNK = 16, 256  # with step costs as numbers


def make_levels(settings: Experiment, asked: LevelSettings, roles: Staffing | None) -> Levels:
    """Service levels as asked; a fixed number of mixed engines caps those that prefill."""
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
        asked.prefill_fairness,
        asked.decode_fairness,
        settings.tpot,
        tpot_over=asked.tpot_over,
        served=served,
        prefilling=roles.mixed / roles.engines if roles else 1.0,
    )


def fixed_roles(asked: FleetSettings, engines: int) -> Staffing | None:
    """The engines that may prefill, where the user says; one number leaves the rest to the other role."""
    mixed, solo = asked.mixed, asked.solo
    if mixed is None and solo is None:
        return None
    if solo is None:
        solo = max(0, engines - (mixed or 0))
    if mixed is None:
        mixed = max(0, engines - solo)
    return fixed_staff(engines, mixed, solo)


def make_pace(settings: Experiment, asked: StepSettings, who: Demand) -> tuple[Pace, str, tuple[str, ...]]:
    """The engine's speeds: from three numbers, or from a card at the seats and contexts of these classes."""
    costs = asked.costs
    if not costs:
        return _card_pace(settings, asked, who)
    missing = next((name for name, text in costs.items() if text is None), None)
    if missing:
        raise InputError(f"{missing} is missing; give all three step costs, or none")
    if "card" in settings.model_fields_set:
        raise InputError("--card and step costs as numbers; the numbers replace a card, drop one of the two")
    fixed, per_token, alone = (_seconds(name, str(text)) for name, text in costs.items())
    if alone <= 0:
        raise InputError("--solo-step 0; a decode step takes time, give such as 22ms")
    seats = settings.slots or PAPER_SEATS
    chunk = PAPER_CHUNK if asked.chunk is None else asked.chunk
    return Pace(seats, chunk, fixed, per_token, 1 / alone, asked.whole_chunks), "step costs as given", ()


def _seconds(flag: str, text: str) -> float:
    try:
        return price(text) if flag == "--mixed-per-token" else duration(text)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None


def _card_pace(settings: Experiment, asked: StepSettings, who: Demand) -> tuple[Pace, str, tuple[str, ...]]:
    """A straight line through the card's mixed steps at this chunk, and its decode step with all seats."""
    card = load_card(settings.card)
    engine = make_engine(settings, card)
    seats, context = engine.running, who.context
    chunk = asked.chunk
    if chunk is None:
        chunk = settings.budget - seats + 1 if settings.budget else CHUNK
    if chunk < 1 or chunk + seats - 1 > engine.batch_tokens:
        raise InputError(
            f"a chunk of {chunk} tokens beside {seats - 1} decodes does not fit the step's budget of "
            f"{engine.batch_tokens}; choose another --chunk, --slots or --budget"
        )
    alone = engine.cost.seconds(Shape(seats, round(seats * context)))
    fixed, slope = _mixed_line(engine.cost, who, seats - 1, chunk)
    held = seats * context
    notes = tuple(error_bar(card))
    if held > engine.kv_tokens:
        notes = (
            *notes,
            f"{seats} seats of {context:,.0f} KV tokens each need {held:,.0f}, the engine has "
            f"{engine.kv_tokens:,}: lower --slots",
        )
    return Pace(seats, chunk, fixed, slope, 1 / alone, asked.whole_chunks), f"card {card.name}", notes


def _mixed_line(cost: StepCost, who: Demand, decodes: int, chunk: int) -> tuple[float, float]:
    """Constant and price per prompt token, exact at this chunk."""
    rate = sum(flow.rate for flow in who.flows) or 1.0
    behind = round(sum(flow.prompt * flow.rate for flow in who.flows) / rate / 2)
    read, half = round(decodes * who.context), max(1, chunk // 2)
    whole, part = (cost.seconds(Shape(decodes, read, tokens, behind)) for tokens in (chunk, half))
    slope = (whole - part) / (chunk - half) if chunk > half else 0.0
    slope = min(max(slope, 0.0), whole / chunk)
    return whole - slope * chunk, slope
