"""The token budget of plain mixed batching that keeps a promise on the gaps between tokens."""

from __future__ import annotations

from collections.abc import Callable

from headgate.cost.model import Shape, StepCost

FILLED = 0.97  # of the promised gap: what a full step may take
MULTIPLE = 256  # budgets are rounded down to this


def gap_budget(
    cost: StepCost, prompt: float, output: float, rate: float, gap: float, seats: int, most: int
) -> int:
    """`max_num_batched_tokens` for which a full step takes the promised gap: d decodes and x prompt tokens.

    Every step is as long as the promise when prompts queue, so d = rate x output x gap requests decode, and
    read d x (prompt + output / 2) tokens. Fewer tokens waste capacity, more break the promise.
    """
    decodes = max(1, min(seats, round(rate * output * gap)))
    context = round(decodes * (prompt + output / 2))
    beside = most_tokens(
        most - decodes, lambda chunk: cost.seconds(Shape(decodes, context, chunk)) <= FILLED * gap
    )
    return max(MULTIPLE, (beside + decodes) // MULTIPLE * MULTIPLE)


def most_tokens(most: int, fits: Callable[[int], bool]) -> int:
    """The most prompt tokens beside the decodes of a step that still fit, of 0 to `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
