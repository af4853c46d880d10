"""EB+: runs mixed or exclusive batches, whichever serves more at the present load."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import InputError
from headgate.core.plan import Plan, Until
from headgate.core.policy import BatchPolicy, End, Steps
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.estimators.averages import TimedEma, WindowMean
from headgate.methods.eb.adaptive import AdaptiveExclusive
from headgate.methods.eb.prediction import exclusive_rate, mixed_rate, wants_exclusive
from headgate.methods.mixed.mixed import Mixed

RISING, FALLING = 1.0, 10.0  # seconds: how fast the smoothed demand follows
SURGE = 2.0  # demand above so many times the smoothed one is looked at at once


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class ExclusivePlus(BatchPolicy):
    """Choose between mixed batching and online EB by what each would serve with the requests there are.

    Starts mixed. Every `review` completions, and at once when demand has doubled, it predicts the rate of
    both from the step cost, the lengths seen and the smoothed demand, and changes its mind only for more
    than `margin`, and not before `dwell` seconds have passed. A change waits for the end of a refill;
    prompts that mixed batching left half-done are finished first, and no request is admitted meanwhile.

    Parameters:
        slots: as in `mixed`.
        budget: as in `mixed`.
        cost: as in `eb-online`.
        margin: how much better, as a share, the other must be; below 0 it favours exclusive batches.
        dwell: seconds between two changes at least.
        light: with fewer requests than this it always mixes: there first tokens count, not throughput.
        review: as in `eb-online`, like the next three.
        gate: of its refills.
        slot_rule: how many requests it may hold.
        max_gap: seconds a refill may keep any decode waiting.

    Source: EB+ of arXiv 2606.00516; the machine of modes is ours where the paper is silent (start, dwell,
    hysteresis, half-done prompts). We price whole steps where its rule (8) has lines, and our margin is
    relative: the paper's 1e-5 s/token are a quarter of the whole cost at 27,000 tok/s. As printed it is
    `eb-paper+`, of headgate-papers.

    Examples:
        >>> import headgate
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> policy = headgate.ExclusivePlus(slots=64, budget=8192, cost=engine.cost)
        >>> run = headgate.simulate(engine, policy, headgate.Workload.of([512] * 200, [64] * 200))
        >>> int(run.completed().sum())
        200
    """

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost,
        margin: float = 0.0025,
        dwell: float = 2.0,
        light: int = 16,
        review: int = 100,
        gate: str = "forecast",
        slot_rule: str = "forecast",
        max_gap: float | None = None,
    ) -> None:
        if not (-1 < margin < 1 and dwell >= 0 and light >= 0):
            raise InputError(
                f"eb+: margin={margin}, dwell={dwell}, light={light}; need -1 < margin < 1, others >= 0"
            )
        self.mixed = Mixed(slots, budget)
        self.exclusive = AdaptiveExclusive(slots, cost, gate, slot_rule, review=review, max_gap=max_gap)
        self.slots, self.budget, self.review = slots, budget, review
        self.margin, self.dwell, self.light = margin, dwell, light
        self._in_exclusive = self._wants_exclusive = False
        self._demand = 0  # requests here, waiting or running
        self._smoothed = TimedEma(RISING, FALLING)
        self._seen = 0.0  # when demand was last counted
        self._changed = 0.0  # when the mode last changed
        self._left = review  # completions until the next review
        self._surge = float(light)  # demand that brings the review forward
        self._gain = 0.0
        self._capacity = inf  # KV tokens, once seen
        self._shared = 0.0  # of those a decode reads, how many it shares with others
        self._wasted = WindowMean(review)  # KV tokens that mixed batching computed in vain, by request

    def gauges(self) -> Mapping[str, float]:
        own = {"exclusive": self._in_exclusive, "gain": self._gain, "demand": self._smoothed.value or 0.0}
        return {**own, **self.exclusive.gauges()}

    def arrived(self, request: Request, now: float) -> None:
        self.exclusive.arrived(request, now)
        self._count(now, +1)
        if self._demand > self._surge:
            self._decide(now)

    def prefilled(self, request: Request, now: float) -> None:
        self.exclusive.prefilled(request, now)

    def evicted(self, request: Request, now: float) -> None:
        self.exclusive.evicted(request, now)

    def stepped(self, steps: Steps) -> None:
        self.exclusive.stepped(steps)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self.exclusive.planned(plan, now, gauges)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.exclusive.finished(request, now, how)
        if not self._in_exclusive:
            self._wasted.update(request.wasted)
        self._count(now, -1)
        self._left -= 1
        if self._left <= 0:
            self._decide(now)

    # -- what it decides

    def plan(self, view: View) -> Plan:
        """The chosen one's plan, but at most until the next review."""
        self._capacity = float(view.kv_total)
        self._shared = view.kv_shared / max(1, len(view.decoding))
        self.exclusive.look(view)
        if self._wants_exclusive != self._in_exclusive and not self.exclusive.refilling:
            self._in_exclusive = self._wants_exclusive
            self._changed = view.now
            self.exclusive.take_over()
        plan = (self.exclusive if self._in_exclusive else self.mixed).plan(view)
        until = plan.until
        surge = max(1.0, self._surge - self._demand + 1)
        if until.finishes <= self._left and until.arrivals <= surge:
            return plan
        steps, time, arrivals, prefills, finishes = until
        until = quick(Until, (steps, time, min(arrivals, surge), prefills, min(finishes, self._left)))
        decode, prefill, budget, chunk, evict, _, reject = plan
        return quick(Plan, (decode, prefill, budget, chunk, evict, until, reject))

    def _decide(self, now: float) -> None:
        self._left = self.review
        if self._demand > self._surge:  # else the next review would decide by a demand that lags, and stay
            self._smoothed.update(float(min(self._demand, self.slots)), inf)
        demand = max(self._smoothed.value or 0.0, 1.0)
        self._surge = float(ceil(SURGE * max(demand, self._demand, self.light)))
        if now - self._changed < self.dwell and self._changed:
            return
        slots = max(1.0, min(demand, self._slots()))
        if demand < self.light:
            self._wants_exclusive = False
        else:
            self._gain = self._predicted_gain(demand, slots)
            self._wants_exclusive = self._is_better()

    def _is_better(self) -> bool:
        return wants_exclusive(self._gain, self.margin, self._in_exclusive)

    def _predicted_gain(self, demand: float, slots: float) -> float:
        """How much more EB would serve, as a share of what mixed batching would.

        Where memory holds fewer than there are, mixed batching evicts and computes prompts again, as often as
        it was last seen to; EB's forecast spares nearly all of that.
        """
        lengths, share = self.exclusive.lengths, self.exclusive.share
        again = (self._wasted.value or 0.0) if demand > slots else 0.0
        cost = self.exclusive.cost
        mixed = mixed_rate(cost, lengths.longer(again), slots, self.budget)
        return exclusive_rate(cost, lengths, slots, min(share, 0.99), self.budget) / mixed - 1

    def _slots(self) -> int:
        """How many requests memory holds in either mode, at the mean context less what they share."""
        if self._capacity == inf:
            return self.slots
        held = max(1.0, self.exclusive.lengths.context - self._shared)
        fit = self.exclusive.slots_that_fit(held, self._capacity)
        return max(1, min(self.slots, fit))

    def _count(self, now: float, by: int) -> None:
        self._smoothed.update(float(min(self._demand, self.slots)), max(0.0, now - self._seen))
        self._seen = max(self._seen, now)
        self._demand += by
