"""One refill: are enough slots idle and enough KV free, and how it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.core.errors import InputError
from headgate.core.plan import NONE, Plan
from headgate.core.view import View
from headgate.cost.model import Shape, StepCost


def refill_due(slots: int, refill: int, decoding: int, waiting: int) -> bool:
    """Whether to leave decode for a refill, in whole numbers.

    With a long queue: N - n >= k. With a short one, the prompts that could enter must be k / N of the batch
    they would make, so that a threshold tuned for a full engine still makes sense in a half-empty one. An
    empty batch refills as soon as a request waits.
    """
    if decoding == 0:
        return waiting > 0
    fillable = min(waiting, max(0, slots - decoding))
    return fillable >= 1 and fillable * (slots - refill) >= decoding * refill


SMALLEST = 16  # tokens of a piece when the promise cannot be kept at all


class Pieces:
    """How much of a refill may run before decodes must get a token.

    A decode's gap is a piece and the decode step after it, so a piece may take `max_gap` less such a step.
    Above a step's token budget a piece is several full steps, below it one smaller step. Where the decode
    step alone is longer than `max_gap` the promise cannot be kept; prompts then go on in the smallest pieces.
    """

    def __init__(self, max_gap: float, cost: StepCost | None) -> None:
        if not max_gap > 0:
            raise InputError(f"eb: max_gap={max_gap} s; it must be above 0, or left out for no bound")
        if cost is None:
            raise InputError("eb: max_gap needs a cost to know how long a piece takes; give it a card's cost")
        self.max_gap = max_gap
        self.decodes_are_due = False
        self._cost, self._host = cost, cost.host
        self._tokens = 0  # per step of the piece under way
        self._left = 0  # steps of it that are left; 0: none is under way
        self._after_prompts = False  # the newest tokens of the decodes came with their prompts

    def next_piece(self, view: View, prompts: Iterable[int] = ()) -> tuple[int, int]:
        """Tokens per step and steps of the piece to run now; the same until it has run."""
        if not self._left:
            # Prompts completed in the piece decode in the step after it: count them, then cut once more.
            tokens, steps = self._piece(view, 0, 0)
            room, joining = tokens * steps, 0
            for id in prompts:
                request = view.prefilling.get(id) or view.waiting[id]
                if room < request.todo:
                    break
                room -= request.todo
                joining += 1
            self._tokens, self._left = self._piece(view, joining, tokens * steps)
        return self._tokens, self._left

    def _piece(self, view: View, joining: int, tokens: int) -> tuple[int, int]:
        decodes = len(view.decoding) + joining
        held = view.kv_total - view.kv_free + view.kv_shared + tokens  # what they read, less a token each
        after = self._cost.seconds(Shape(decodes, held + decodes))
        budget, late = view.limits.batch_tokens, 0.0
        if self._host is not None and self._after_prompts:
            # An asynchronous host looks at the tokens of the next decode step only when it has launched the
            # step with prompts that follows. After decodes it did so the last time, too; after prompts of an
            # empty engine it did not.
            late = max(0.0, self._host.seconds(Shape(prefill=budget)) - after)
        return self._largest(self.max_gap - after - late, budget)

    def composed(self, plan: Plan) -> None:
        """Count the piece down; the decode step after it ends the debt.

        Steps count when they are composed: an asynchronous engine composes the next one before this has run.
        """
        if plan.decode is not NONE:
            self.decodes_are_due = self._after_prompts = False
        elif self._left:
            self._left -= 1
            self.decodes_are_due = not self._left
        else:
            self._after_prompts = True

    def end(self) -> None:
        self._left = 0
        self.decodes_are_due = True

    def _largest(self, seconds: float, budget: int) -> tuple[int, int]:
        full = self._cost.seconds(Shape(prefill=budget))
        if full <= seconds:
            return budget, int(seconds / full)
        low, high = SMALLEST, max(SMALLEST, budget)
        while low < high:  # the most tokens that one step can hold in that time
            middle = (low + high + 1) // 2
            if self._cost.seconds(Shape(prefill=middle)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return min(low, budget), 1
