"""Token-budget mixed batching: every decode, then prompt chunks up to the budget (Sarathi, vLLM v1)."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import ClassVar

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError
from headgate.core.plan import ALL, EACH_STEP, Plan, Until, plan_of
from headgate.core.policy import BatchPolicy
from headgate.core.view import View

ARRIVAL = Until(arrivals=1)
NONE_WAITS = Plan(ALL, until=ARRIVAL)
NO_PLACE_LEFT = Plan(ALL, until=Until(finishes=1))


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Mixed(BatchPolicy):
    """Run every decode in every step and fill what is left of the token budget with prompts.

    Prompts enter in the order of the queue; at most the last one of a step is cut. A prompt is let
    in only when a slot is free; whether its KV fits is decided by the engine, except that we do not ask
    again and again for a prompt that cannot fit before a request leaves.

    Parameters:
        slots: requests that may hold KV at once (`max_num_seqs`).
        budget: tokens in one step, decodes included (`max_num_batched_tokens`).

    Source: vLLM v1's default, MB in arXiv 2606.00516. `sarathi` is the same with Sarathi-Serve's watermark.

    Examples:
        >>> import headgate
        >>> headgate.Mixed(slots=256, budget=8192).budget
        8192
    """

    name: ClassVar[str] = "mixed"  # for error messages

    def __init__(self, slots: int, budget: int) -> None:
        if slots < 1:
            raise InputError(f"{self.name}: slots={slots}; at least one request must be able to run")
        if budget < slots:
            raise InputError(
                f"{self.name}: budget={budget} is below slots={slots}; "
                "a step must hold a token for each decode"
            )
        self.slots = slots
        self.budget = budget

    def plan(self, view: View) -> Plan:
        waiting, prefilling, decodes = view.waiting, view.prefilling, len(view.decoding)
        limits = view.limits
        room = self.budget - decodes * limits.decode_width
        if room < 0:  # only after taking over a fuller engine
            oldest = islice(view.decoding, self.budget // limits.decode_width)
            return Plan(frozenset(oldest), budget=self.budget)
        if not waiting and not prefilling:
            return NONE_WAITS
        prompts: list[int] = []
        for request in prefilling.values():
            if room > 0:
                prompts.append(request.id)
                room -= request.todo
        slots = min(self.slots, limits.running) - decodes - len(prefilling)
        if slots > 0 and room > 0 and waiting:
            self._admit(view, slots, room, prompts)
        if not prompts:
            return NO_PLACE_LEFT
        if len(prompts) == len(waiting) + len(prefilling):  # the same until a request arrives
            return plan_of(ALL, tuple(prompts), self.budget, inf, ARRIVAL)
        return plan_of(ALL, tuple(prompts), self.budget, inf, EACH_STEP)

    def _admit(self, view: View, slots: int, room: int, prompts: list[int]) -> None:
        """Add new prompts in the order of the queue; none if the first cannot fit before one leaves."""
        block = view.limits.block
        for request in view.waiting.values():
            if not prompts and -(-request.room // block) * block > view.kv_free:
                return
            prompts.append(request.id)
            room -= request.todo
            slots -= 1
            if room <= 0 or slots <= 0:
                return
