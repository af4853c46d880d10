"""The plan a router begins with: what the configuration says of its classes, on engines of a card."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.error_bar import error_bar
from headgate.live.route.config import Class, GateConfig
from headgate.methods.fluid.engine_pace import pace_of
from headgate.methods.fluid.flows import Flow, Instance, Prices

if TYPE_CHECKING:
    from headgate.methods.fluid.plan import FluidPlan

log = logging.getLogger("headgate.route")
PROMPT, OUTPUT, RATE = 512.0, 256.0, 1.0  # of a class of which the configuration says nothing
BUDGET = 8192  # tokens of one step


def first_plan(config: GateConfig, engines: int) -> FluidPlan:
    """Solved once; the online router replaces it as soon as enough requests of a class were seen."""
    from headgate.methods.fluid.planner import plan_fluid  # the solver takes a while to import

    router = config.router
    if router.card is None:
        raise InputError(
            f"router {router.name} plans and needs the speed of its engines; give --card NAME (see headgate "
            "doctor), or choose a router such as least-loaded"
        )
    card = load_card(router.card)
    for line in error_bar(card):
        log.warning("%s", line)
    flows = tuple(_flow(each, engines) for each in (config.default, *config.classes))
    total = sum(flow.rate for flow in flows)
    prompt = sum(flow.rate * flow.prompt for flow in flows) / total
    outputs = sum(flow.rate * flow.output for flow in flows)
    context = sum(flow.rate * flow.output * (flow.prompt + flow.output / 2) for flow in flows) / outputs
    seats = max(1, min(config.fewest_seats, int(card.kv_tokens / max(context, 1.0))))
    pace = pace_of(card.cost, seats, min(BUDGET, card.max_batch_tokens), prompt, context)
    prices = Prices(router.prices.prompt, router.prices.output)
    return plan_fluid(Instance(flows, pace, prices).checked())


def _flow(each: Class, engines: int) -> Flow:
    impatience = 0.0 if each.patience is None else 1 / each.patience
    return Flow(
        each.name, each.prompt or PROMPT, each.output or OUTPUT, (each.rate or RATE) / engines, impatience
    )
