"""The plan a router begins with: what the configuration says of its classes, on engines of a card."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.error_bar import error_bar
from headgate.live.route.config import GateConfig
from headgate.methods.fluid.engine_pace import pace_of
from headgate.methods.fluid.flows import Flow, Instance, Prices

if TYPE_CHECKING:
    from headgate.methods.fluid.plan import FluidPlan

log = logging.getLogger("headgate.route")
PROMPT, OUTPUT, RATE = 512.0, 256.0, 1.0  # where the configuration says nothing of any class
OTHERS = 0.05  # of the rates that are given: the rate of a class without one
BUDGET = 8192  # tokens of one step


def first_plan(config: GateConfig, engines: int) -> FluidPlan:
    """Solved once; the online router replaces it as soon as enough requests of a class were seen."""
    from headgate.methods.fluid.planner import plan_fluid  # the solver takes a while to import

    router = config.router
    if router.card is None:
        raise InputError(
            f"router {router.name} plans and needs the speed of its engines; give --card NAME or card = "
            "NAME in [router] (see headgate doctor), or choose a router such as least-loaded"
        )
    card = load_card(router.card)
    for line in error_bar(card):
        log.warning("%s", line)
    flows = _flows(config, engines)
    total = sum(flow.rate for flow in flows)
    prompt = sum(flow.rate * flow.prompt for flow in flows) / total
    outputs = sum(flow.rate * flow.output for flow in flows)
    context = sum(flow.rate * flow.output * (flow.prompt + flow.output / 2) for flow in flows) / outputs
    seats = max(1, min(config.fewest_seats, int(card.kv_tokens / max(context, 1.0))))
    pace = pace_of(card.cost, seats, min(BUDGET, card.max_batch_tokens), prompt, context)
    prices = Prices(router.prices.prompt, router.prices.output)
    return plan_fluid(Instance(flows, pace, prices).checked())


def _flows(config: GateConfig, engines: int) -> tuple[Flow, ...]:
    """What is not said of a class is as in the mean of the others; nobody waits longer than `queue_ttl`."""
    classes = (config.default, *config.classes)
    rates = [each.rate for each in classes if each.rate]
    rate = OTHERS * sum(rates) if rates else RATE
    prompt = _mean([each.prompt for each in classes], PROMPT)
    output = _mean([each.output for each in classes], OUTPUT)
    ttl = config.limits.queue_ttl
    return tuple(
        Flow(
            each.name,
            each.prompt or prompt,
            each.output or output,
            (each.rate or rate) / engines,
            1 / min(each.patience or ttl, ttl),
        )
        for each in classes
    )


def _mean(given: list[float | None], unsaid: float) -> float:
    said = [each for each in given if each]
    return sum(said) / len(said) if said else unsaid
