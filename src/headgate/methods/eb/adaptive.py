"""EB(k̂*): exclusive batches whose threshold and slots follow the traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, inf, log1p, sqrt
from statistics import NormalDist

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError, unknown
from headgate.core.policy import COMPLETE, End, Steps
from headgate.core.request import Request, uncached
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.estimators.averages import WindowMean
from headgate.estimators.hazard import OutputHazard, Survival
from headgate.methods.eb.costs import IterationCost, Lengths, PhaseCosts, phase_costs
from headgate.methods.eb.exclusive import Exclusive
from headgate.methods.eb.prediction import whole_steps
from headgate.methods.eb.thresholds import SlotBounds, Threshold, base_share, settle, stationary_plan

KNOWN = {"gate": ("forecast", "fit"), "slot_rule": ("forecast", "planned", "fixed")}
NEWEST = 0.3  # weight of the newest share in the smoothed one, as in the paper's public code
MISS = 0.01  # the accepted chance that memory overflows
LEARNED_AT_ONCE = 64  # requests that left
LEAST_SLOTS = 16  # and a tenth of the most: fewer would starve the engine


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class AdaptiveExclusive(Exclusive):
    """EB whose threshold k and slots N are planned anew from the requests that left and those that run.

    Every `review` completions the output law is estimated (those still running count as censored, so that
    a cold start or a shift does not look short), the share of slots to refill is planned, smoothed, and put
    into force when the next refill is complete, never inside a phase.

    Parameters:
        slots: the most slots, N_max.
        cost: what steps cost.
        gate: which prompts may enter. "forecast": as many as fit now and, by a forecast over the next
            phase, at the peak of memory; "fit": as many as fit now.
        slot_rule: N. "forecast": as many as memory will hold by the same forecast, taken anew when a refill
            is complete; "planned": `safe_slots` from the estimated lengths; "fixed": `slots`. With more
            slots than memory holds, slots are always idle and k means nothing.
        window, warm: completions remembered, and needed before the first plan.
        review: completions between two plans.
        prior: mean output expected before anything is known.
        max_gap: as in `eb`.

    Source: arXiv 2606.00516, Algorithm 1. We differ: the share is planned for the steady state of the
    estimated law, not by θ0 + Δθ; N and the gate forecast memory, because (6) does not hold and (23) ignores
    the prompts of the refill and asks for up to 60 % free memory. As printed it is `eb-paper`, of
    headgate-papers.
    """

    def __init__(
        self,
        slots: int,
        cost: StepCost,
        gate: str = "forecast",
        slot_rule: str = "forecast",
        window: int = 500,
        warm: int = 100,
        review: int = 100,
        prior: float = 256.0,
        max_gap: float | None = None,
    ) -> None:
        super().__init__(slots, 1, max_gap, cost)
        for name, given in (("gate", gate), ("slot_rule", slot_rule)):
            if given not in KNOWN[name]:
                raise unknown(f"{name} of eb-online", given, KNOWN[name])
        if warm < 1 or review < 1:
            raise InputError(f"eb-online: warm={warm}, review={review}; both must be at least 1")
        if not prior > 1:
            raise InputError(f"eb-online: prior={prior} output tokens; it must be above 1")
        self.most = slots
        self.gate, self.slot_rule = gate, slot_rule
        self.review, self.warm = review, warm
        self.cost = self._step_cost = cost  # of an iteration, and of a step: with speculation not the same
        self._tokens_per_step = 1.0
        self._hazard = OutputHazard(window)
        self._prompts = WindowMean(window)
        self._computed = WindowMean(window)  # of those, what no cache had
        # Not yet in these, which only a plan reads: iterations, whether it ended, when; prompt, computed.
        self._unlearned: list[tuple[int, bool, int, int, int]] = []
        self._running: dict[int, Request] = {}  # those that decode
        self._clock = 0.0  # iterations so far: tokens of a request that has decoded from the start
        self._left = 0  # completions since the last plan
        self._memory: tuple[int, int] | None = None  # KV tokens and block, once seen
        self._step_tokens = inf  # the most in a step, once seen
        self._slots_known = slot_rule != "forecast"
        self._margin = NormalDist().inv_cdf(1 - MISS)
        self.lengths = Lengths(prior, prior)
        self._share = base_share(self.costs(slots).overhead / prior)
        self._next: Threshold | None = settle(self._share, slots)
        self._adopt_plan()

    def costs(self, slots: int) -> PhaseCosts:
        return phase_costs(self.cost, self.lengths, slots)

    def gauges(self) -> Mapping[str, float]:
        estimates = {"share": self._share, "output": self.lengths.output, "prompt": self.lengths.prompt}
        return {**super().gauges(), **estimates}

    def prefilled(self, request: Request, now: float) -> None:
        self._running[request.id] = request
        super().prefilled(request, now)

    def evicted(self, request: Request, now: float) -> None:
        """It stops decoding; its age goes on when it comes back."""
        self._running.pop(request.id, None)
        super().evicted(request, now)

    def stepped(self, steps: Steps) -> None:
        if steps.decodes:
            self._clock += len(steps.ends) * self._tokens_per_step

    def finished(self, request: Request, now: float, how: End) -> None:
        super().finished(request, now, how)
        self._running.pop(request.id, None)
        decoded = request.generated - 1  # the prompt brought the first token
        if decoded < 1:
            return
        ended = how in COMPLETE
        self._unlearned.append((decoded, ended, int(self._clock), request.prompt, uncached(request)))
        self._left += 1
        due = self._left >= self.review and self._memory is not None
        if due or len(self._unlearned) >= LEARNED_AT_ONCE:
            self._learn()
        if due and len(self._hazard) >= self.warm:
            self._left = 0
            self._plan_anew()

    def _learn(self) -> None:
        """Several requests one after the other: the first of them pays for what the caches have lost."""
        for decoded, ended, at, prompt, computed in self._unlearned:
            self._hazard.update(decoded, ended, at)
            self._prompts.update(prompt)
            self._computed.update(computed)
        self._unlearned = []

    # -- what it plans

    def _plan_anew(self) -> None:
        """Estimate lengths, plan the share and the slots; they wait for the refill to be complete."""
        ages = [request.generated - 1 for request in self._running.values()]
        mean = self._hazard.mean(ages, int(self._clock))
        if mean is None or self._memory is None:
            return
        survival = self._hazard.survival(ages, int(self._clock))
        prompt, spread = self._prompts.value or 1.0, self._prompts.spread or 0.0
        output = max(mean, 1.0 + 1e-9)
        output_sd = output * survival.spread if survival else 0.0
        uncached = self._computed.value or 1.0, self._computed.spread or 0.0
        self.lengths = Lengths(prompt, output, spread, output_sd, uncached)
        capacity, block = self._memory
        least = min(self.most, max(LEAST_SLOTS, self.most // 10))
        bounds = SlotBounds(max(capacity, prompt + block + mean + 1), self.most, least, MISS, block)
        planned = self._planned(survival, bounds)
        if planned is None:
            return
        self._share += NEWEST * (planned.share - self._share)
        slots = {"planned": planned.slots, "fixed": self.most}.get(self.slot_rule, self.slots)
        self._next = self._settled(slots)

    def _settled(self, slots: int) -> Threshold:
        """The smoothed share as whole slots, and whole prefill steps where those are cheaper."""
        plan = settle(self._share, slots)
        if self.pieces or self._step_tokens == inf:
            return plan
        return whole_steps(plan, self.lengths, self.costs(slots).overhead, self._step_tokens)

    def _planned(self, survival: Survival | None, bounds: SlotBounds) -> Threshold | None:
        return survival and stationary_plan(self.costs(self.slots), self.lengths, survival, bounds)

    def _refilled(self) -> None:
        super()._refilled()
        self.take_over()

    def take_over(self) -> None:
        """Begin at a moment that is not the end of a refill: what was planned comes into force."""
        self._adopt_plan()
        self._slots_known = self.slot_rule != "forecast"

    @property
    def share(self) -> float:
        """Of the slots, how many a refill fills: by the newest plan, in force or not."""
        plan = self._next or self
        return plan.refill / plan.slots

    def _adopt_plan(self) -> None:
        if self._next is not None:
            self.slots, self.refill = self._next.slots, self._next.refill
            self._next = None

    # -- admission

    def look(self, view: View) -> None:
        """Learn the engine's limits, which plans need; for callers that ask `plan` seldom."""
        self._memory = view.kv_total, view.limits.block
        limits = view.limits
        self._step_tokens = float(limits.batch_tokens)
        if limits.tokens_per_step != self._tokens_per_step:
            self._tokens_per_step = limits.tokens_per_step
            self.cost = IterationCost(self._step_cost, limits.tokens_per_step)

    def _next_batch(self, view: View) -> list[int]:
        self.look(view)
        if not self._slots_known and view.decoding:
            held = (view.kv_total - view.kv_free) / len(view.decoding)
            slots = min(self.most, self.slots_that_fit(held, view.kv_total))
            self._next = self._settled(max(1, slots))
            self._adopt_plan()
            self._slots_known = True
        return super()._next_batch(view)

    def slots_that_fit(self, held: float, capacity: float) -> int:
        """How many requests of `held` KV tokens each fit at the peak of the coming phase."""
        fewest = inf
        for expected, deviation in self._crests(held):
            root = (sqrt(deviation**2 + 4 * expected * capacity) - deviation) / (2 * expected)
            fewest = min(fewest, root**2)
        return int(fewest)

    def _that_fit(self, view: View, prompts: Iterable[Request]) -> list[int]:
        decodes = len(view.decoding)
        if self.gate == "fit" or not decodes:
            return super()._that_fit(view, prompts)
        block, held, count = view.limits.block, view.kv_total - view.kv_free, decodes
        batch: list[int] = []
        for request in prompts:
            held += -(-(request.room + 1) // block) * block
            count += 1
            if max(held + decodes, self._peak(held, count)) > view.kv_total:
                break
            batch.append(request.id)
        return batch

    def _peak(self, held: int, count: int) -> float:
        """KV tokens that `count` requests with `held` now will have at their peak in the coming phase."""
        each = held / count
        return max(count * expected + sqrt(count) * deviation for expected, deviation in self._crests(each))

    def _crests(self, each: float) -> list[tuple[float, float]]:
        """What a request with `each` KV tokens will hold at some ages of the phase: mean, and z deviations.

        It grows by a token an iteration and ends with the same chance in each, so after s iterations it holds
        each + s with probability exp(-s/mean), else nothing. The mean is highest at mean - each iterations.
        Requests differ: prompts by their deviation, ages (what is held beyond the prompt) by their own mean.
        """
        ending = 1 / self.lengths.output
        phase = -log1p(-min(self._share, 0.99)) / ending
        unlike = self.lengths.prompt_sd**2 + max(0.0, each - self.lengths.prompt) ** 2
        crests = []
        for age in (min(max(1 / ending - each, 1.0), phase), phase / 8, phase / 4, phase / 2, phase):
            alive = exp(-ending * age)
            spread = sqrt(alive * (1 - alive) * ((each + age) ** 2 + unlike))
            crests.append((alive * (each + age), self._margin * spread))
        return crests
