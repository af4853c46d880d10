"""How long before its token is due a decode becomes critical: so many steps of the length expected."""

from __future__ import annotations

from math import isfinite, log

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import InputError, unknown
from headgate.core.policy import Steps
from headgate.core.view import View
from headgate.cost.model import Shape, StepCost
from headgate.estimators.averages import Ema, Mean

PACES = ("predicted", "average", "recent")
PREDICTED_STEPS = 2.0  # one without the decode, one with it
MEAN_STEPS = 5.0  # the paper's, while memory is not crowded
RECENT = log(0.5) / log(0.9)  # half-life in steps of an average that weighs the newest by 0.1


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Margin:
    """δ times the length of a step (equation 8 of arXiv 2508.01002), with a larger δ while it is crowded.

    A decode that is left out waits for one more step and is served in the next, so it is in time if the
    margin covers both: δ = 2 is enough for steps of known length, and the mean of unequal steps needs more.

    It is crowded when a share of the KV is in use, or of the seats: decodes that wait hold both, and whoever
    cannot enter for want of them gains nothing from their waiting. (The paper looks at KV only.)

    `pace` says how long a step is thought to be: "predicted", a full step with all requests; "average",
    the mean of all steps so far, the paper's; "recent", an average that forgets.
    """

    def __init__(
        self,
        pace: str,
        offset: float | None,
        crowded_offset: float,
        crowded: float,
        relaxed: float,
        cost: StepCost,
    ) -> None:
        if pace not in PACES:
            raise unknown("pace of slai", pace, PACES)
        if offset is None:
            offset = PREDICTED_STEPS if pace == "predicted" else MEAN_STEPS
        if not (isfinite(offset + crowded_offset) and min(offset, crowded_offset) >= 0):
            raise InputError(
                f"slai: offset={offset}, crowded_offset={crowded_offset} steps; both must be 0 or more"
            )
        if not 0 < relaxed <= crowded <= 1:
            raise InputError(f"slai: relaxed={relaxed}, crowded={crowded}; need 0 < relaxed <= crowded <= 1")
        self.offset, self.crowded_offset = offset, crowded_offset
        self.crowded, self.relaxed = crowded, relaxed
        self.is_crowded = False
        self.step = 0.0  # how long the next step is thought to be
        self._cost = cost
        self._mean: Ema | Mean | None = None
        if pace != "predicted":
            self._mean = Mean() if pace == "average" else Ema(RECENT)

    def ran(self, steps: Steps) -> None:
        """Learn how long steps are."""
        if self._mean is not None:
            before = steps.start
            for end in steps.ends:
                self._mean.update(end - before)
                before = end

    def seconds(self, view: View, budget: int, seats: int, longest: float) -> float:
        """The margin now, when a step has `budget` tokens and takes no longer than `longest`.

        Ask only when the answer matters: whether it is crowded depends on when it was looked at.
        """
        taken = (len(view.decoding) + len(view.prefilling)) / seats
        used = max((view.kv_total - view.kv_free) / view.kv_total, taken)
        if used >= self.crowded:
            self.is_crowded = True
        elif used < self.relaxed:
            self.is_crowded = False
        if self._mean is None:
            self.step = min(longest, self._full_step(view, budget))
        else:
            self.step = self._mean.value or 0.0
        return (self.crowded_offset if self.is_crowded else self.offset) * self.step

    def _full_step(self, view: View, budget: int) -> float:
        decodes = len(view.decoding)
        tokens = max(1, budget - decodes * view.limits.decode_width)
        held = view.kv_total - view.kv_free + view.kv_shared + decodes
        return self._cost.seconds(quick(Shape, (decodes, held, tokens, behind(view), ())))


def behind(view: View) -> int:
    """KV that is already there for the prompt under way, or cached for the next one."""
    for request in view.prefilling.values():
        return request.prompt + request.generated - request.todo
    for request in view.waiting.values():
        return request.cached
    return 0
