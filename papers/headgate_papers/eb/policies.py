"""Online EB and EB+ as the paper has them, as policies that `--policy NAME` finds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.estimators.hazard import Survival
from headgate.methods.eb.adaptive import AdaptiveExclusive
from headgate.methods.eb.costs import Lengths, PhaseCosts, checked_costs, checked_lengths
from headgate.methods.eb.hybrid import ExclusivePlus
from headgate.methods.eb.thresholds import SlotBounds, Threshold, settle
from headgate_papers.eb.theory import LinearHazard, compare, fit_lives, guarded, paper_share, paper_slots


class PaperExclusive(AdaptiveExclusive):
    """EB(k̂*) by Algorithm 1 of arXiv 2606.00516, with the guards of its public code.

    Parameters: those of `eb-online`, and
        gate: "paper": equation (23), a refill only while a share of KV is free.
        slot_rule: "planned": the bound (6).
    """

    def __init__(
        self,
        slots: int,
        cost: StepCost,
        gate: str = "paper",
        slot_rule: str = "planned",
        window: int = 500,
        warm: int = 100,
        review: int = 100,
        prior: float = 256.0,
        max_gap: float | None = None,
    ) -> None:
        self._reserves = gate == "paper"
        own = "fit" if self._reserves else gate
        super().__init__(slots, cost, own, slot_rule, window, warm, review, prior, max_gap)
        self._completed: deque[tuple[int, bool]] = deque(maxlen=window)  # these alone, in full

    def _learn(self) -> None:
        self._completed.extend((decoded, ended) for decoded, ended, *_ in self._unlearned)
        super()._learn()

    def _settled(self, slots: int) -> Threshold:
        return settle(self._share, slots)

    def _planned(self, survival: Survival | None, bounds: SlotBounds) -> Threshold | None:
        ends, known = np.array(self._completed).T
        fit = fit_lives(ends, known.astype(np.bool_)) if known.any() else None
        if fit is None or fit.base >= 1:
            return None
        hazard = guarded(fit, self.lengths.output)
        return paper_plan(self.costs(self.slots), self.lengths, hazard, bounds, self.slots)

    def _that_fit(self, view: View, prompts: Iterable[Request]) -> list[int]:
        if self._reserves and view.decoding:
            reserve = kv_reserve(self.slots, self.lengths.output, view.kv_total)
            if view.kv_free < reserve * view.kv_total:
                return []
        return super()._that_fit(view, prompts)


class PaperPlus(ExclusivePlus):
    """EB+ of the same paper: rule (8) over `eb-paper`, one-sided.

    Parameters: those of `eb+`, and
        margin: δ of rule (8), in s/token.
    """

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost,
        margin: float = 1e-5,
        dwell: float = 2.0,
        light: int = 16,
        review: int = 100,
        gate: str = "paper",
        slot_rule: str = "planned",
        max_gap: float | None = None,
    ) -> None:
        super().__init__(slots, budget, cost, margin, dwell, light, review)
        self.exclusive = PaperExclusive(slots, cost, gate, slot_rule, review=review, max_gap=max_gap)

    def _predicted_gain(self, demand: float, slots: float) -> float:
        return compare(self.exclusive.costs(round(slots)), self.exclusive.lengths).gain(slots)

    def _is_better(self) -> bool:
        return self._gain > self.margin


def paper_plan(
    costs: PhaseCosts, lengths: Lengths, hazard: LinearHazard, bounds: SlotBounds, previous: int | None = None
) -> Threshold:
    """Equations (3), (5) and (6). Give a `guarded` hazard.

    The correction (5) contains the number of slots, which follows from the share; the paper uses that of the
    review before, `previous`, else the most.
    """
    slots = bounds.most if previous is None else previous
    load = costs.decode_per_request * slots / costs.decode_fixed  # rho = beta_d N / alpha_d
    share = paper_share(checked_costs(costs).overhead, hazard, load)
    clipped = settle(share, slots).share
    if clipped >= 1:  # one slot: no other request to wait for
        return settle(share, 1)
    bound = paper_slots(clipped, hazard.base, checked_lengths(lengths).prompt, bounds.capacity, bounds.miss)
    return settle(share, min(max(bound, 1, bounds.least), bounds.most))


def kv_reserve(slots: int, output: float, capacity: float) -> float:
    """The share of KV that must be free before a refill, from 0.05 to 0.6: f_KV of equation (23).

    Room for half the output of every slot. The paper's rule; it ignores the prompts about to enter
    and starves the batch when outputs are long.
    """
    return min(0.6, max(0.05, slots * output * 0.5 / capacity))
