"""Token-budget mixed batching: every decode, then prompt chunks up to the budget (Sarathi, vLLM v1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import BatchPolicy
from headgate.core.request import Request
from headgate.core.view import View

ARRIVAL = Until(arrivals=1)
NOBODY_WAITS = Plan(ALL, until=ARRIVAL)
NO_PLACE_LEFT = Plan(ALL, until=Until(finishes=1))


class Mixed(BatchPolicy):
    """Run every decode in every step and fill what is left of the token budget with prompts.

    Prompts enter in the order of the queue; at most the last one of a step is cut. A prompt is let
    in only when a seat is free; whether its KV fits is the engine's word, except that we do not ask
    again and again for a prompt that cannot fit before somebody leaves.

    Parameters:
        slots: requests that may hold KV at once (`max_num_seqs`).
        budget: tokens in one step, decodes included (`max_num_batched_tokens`).

    Source: vLLM v1's default, and Sarathi-Serve (Agrawal et al., OSDI 2024) as its Algorithm; `spec`
    name MB. We differ from Sarathi in nothing but the name of the parameters.
    """

    def __init__(self, slots: int, budget: int) -> None:
        if slots < 1:
            raise InputError(f"mixed: slots={slots}; at least one request must be able to run")
        if budget < slots:
            raise InputError(
                f"mixed: budget={budget} is below slots={slots}; a step must hold a token for each decode"
            )
        self.slots = slots
        self.budget = budget

    def plan(self, view: View) -> Plan:
        """All decodes; prompts while seats and budget last."""
        width = view.limits.decode_width
        if len(view.decoding) * width > self.budget:  # only after taking over a fuller engine
            oldest = islice(view.decoding, self.budget // width)
            return Plan(frozenset(oldest), budget=self.budget)
        prompts = tuple(self._prompts(view))
        if not prompts:
            return NO_PLACE_LEFT if view.waiting else NOBODY_WAITS
        if len(prompts) == len(view.waiting) + len(view.prefilling):  # the same until somebody comes
            return Plan(ALL, prompts, self.budget, until=ARRIVAL)
        return Plan(ALL, prompts, self.budget)

    def _prompts(self, view: View) -> Iterator[int]:
        decodes = len(view.decoding)
        room = self.budget - decodes * view.limits.decode_width
        for request in view.prefilling.values():
            if room <= 0:
                return
            yield request.id
            room -= request.todo
        seats = min(self.slots, view.limits.running) - decodes - len(view.prefilling)
        if room <= 0 or seats <= 0 or not view.waiting:
            return
        queue = iter(view.waiting.values())
        head = next(queue)
        if not view.prefilling and not _fits(head, view):
            return
        yield head.id
        room -= head.todo
        for request in islice(queue, seats - 1):
            if room <= 0:
                return
            yield request.id
            room -= request.todo


def _fits(request: Request, view: View) -> bool:
    block = view.limits.block
    return -(-request.todo // block) * block <= view.kv_free
