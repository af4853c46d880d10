"""The bundled fluid plan as a knapsack of two rows, solved exactly without a solver.

Without a queue for decode slots (Proposition 1) the program (40) asks only how many requests r of each
class to serve: at most λ, within the decode capacity B·γ (a request takes D + ωP tokens of it) and within the
prefill capacity 1 (it takes Pτ/C seconds). Ours; the paper keeps the full program.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.methods.fluid.flows import Instance


class Item(NamedTuple):
    """One class: what a request brings and takes, and how many come per second."""

    value: float
    decode: float
    prefill: float
    most: float


class Knapsack(NamedTuple):
    """Requests served per second by class, what they bring, and the two prices."""

    served: tuple[float, ...]
    value: float
    decode_price: float  # ρ, of one decode token per second
    prefill_price: float  # π_p, of all of an engine's prefill time


def knapsack(instance: Instance) -> Knapsack:
    """The best bundled plan in closed form; valid only where Proposition 1 holds."""
    pace = instance.pace
    if not pace.keeps_up:
        raise InputError(
            f"mixed steps are shorter than solo ones by more than one slot in {pace.slots} (κ = "
            f"{pace.ratio:.3g}): the knapsack form does not hold; use the linear program"
        )
    items = [
        Item(instance.prices.value(flow), pace.decode_weight(flow), pace.prefill_seconds(flow), flow.rate)
        for flow in instance.flows
    ]
    served, price, scarce = fill(items, pace.slots * pace.solo_speed, 1.0)
    value = sum(item.value * rate for item, rate in zip(items, served, strict=True))
    return Knapsack(tuple(served), value, price, scarce)


def fill(items: Sequence[Item], decode: float, prefill: float) -> tuple[list[float], float, float]:
    """Best amounts, the price of decode capacity and of prefill capacity.

    For a given prefill price the best is greedy, by what is left of the value per decode token. The order
    changes only at prices where two classes are worth the same (or one is worth nothing): between two such
    prices the greedy amounts are constant. The price where prefill use crosses its capacity is found by
    bisection over these, and the two amounts beside it are mixed so that both rows are full.
    """
    amounts, price = _greedy(items, decode, 0.0)
    if _use(items, amounts) <= prefill:
        return amounts, price, 0.0
    turns = _turns(items)
    low, high = 0, len(turns)
    while low < high:  # the first turn above which the greedy amounts fit
        middle = (low + high) // 2
        if _use(items, _greedy(items, decode, _between(turns, middle))[0]) <= prefill:
            high = middle
        else:
            low = middle + 1
    scarce = turns[low]
    above, _ = _greedy(items, decode, _between(turns, low))
    below, _ = _greedy(items, decode, _between(turns, low - 1))
    over, under = _use(items, below), _use(items, above)
    share = (prefill - under) / (over - under)
    mixed = [share * b + (1 - share) * a for b, a in zip(below, above, strict=True)]
    return mixed, _greedy(items, decode, scarce)[1], scarce


def _greedy(items: Sequence[Item], decode: float, scarce: float) -> tuple[list[float], float]:
    """Amounts in decreasing worth per decode token, and the worth of the class that is served in part."""
    worth = [(item.value - scarce * item.prefill) / item.decode for item in items]
    amounts, left = [0.0] * len(items), decode
    for place in sorted(range(len(items)), key=lambda place: -worth[place]):
        if worth[place] <= 0:
            break
        item = items[place]
        amounts[place] = min(item.most, left / item.decode)
        left -= amounts[place] * item.decode
        if amounts[place] < item.most:
            return amounts, worth[place]
    return amounts, 0.0


def _turns(items: Sequence[Item]) -> list[float]:
    """Prefill prices at which two classes change places, or one becomes worth nothing."""
    found = {item.value / item.prefill for item in items}
    for one, other in combinations(items, 2):
        slopes = one.prefill / one.decode - other.prefill / other.decode
        gap = one.value / one.decode - other.value / other.decode
        if slopes and gap / slopes > 0:
            found.add(gap / slopes)
    return sorted(found)


def _between(turns: list[float], place: int) -> float:
    """A price above that turn and below the next."""
    if place < 0:
        return turns[0] / 2
    return (turns[place] + turns[place + 1]) / 2 if place + 1 < len(turns) else 2 * turns[place]


def _use(items: Sequence[Item], amounts: list[float]) -> float:
    return sum(item.prefill * amount for item, amount in zip(items, amounts, strict=True))
