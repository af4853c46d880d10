"""The speeds of an engine as the fluid model wants them, from the cost of its steps."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.cost.model import Shape, StepCost
from headgate.methods.fluid.flows import Pace


def pace_of(cost: StepCost, seats: int, budget: int, prompt: float, context: float) -> Pace:
    """Steps with one mean prompt, and steps without.

    A mean prompt runs in one step if the budget allows, as in a token-level engine, not in small chunks.

    Args:
        cost: how long a step takes.
        seats: decodes that run at once, as memory allows.
        budget: tokens of one step.
        prompt: mean prompt tokens.
        context: KV tokens that a running decode reads at a random moment.
    """
    if seats < 2:
        raise InputError(
            f"routers that plan need at least 2 seats per engine, one for a prompt beside a decode; here are "
            f"{seats}: raise --slots or --kv-tokens, or choose another router such as least-loaded"
        )
    chunk = max(1, min(budget - seats + 1, round(prompt)))
    read, half = round((seats - 1) * context), max(1, chunk // 2)
    whole, part = (cost.seconds(Shape(seats - 1, read, tokens)) for tokens in (chunk, half))
    slope = (whole - part) / (chunk - half) if chunk > half else 0.0
    slope = min(max(slope, 0.0), whole / chunk)
    alone = cost.seconds(Shape(seats, round(seats * context)))
    return Pace(seats, chunk, whole - slope * chunk, slope, 1 / alone)
