"""Mixed batching that paces prompts: a smaller share of a step under pressure (P-PAS), or every Nth step."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Plan
from headgate.core.view import View
from headgate.methods.mixed.sarathi import Sarathi


class Ppas(Sarathi):
    """Mixed batching; under pressure a step holds at most `cap` prompt tokens, else up to the budget.

    Pressure: at least `prompts` requests wait or are half-way through their prompt, and at least one decodes.

    `cap` and `prompts` are the paper's B_cap and N_th; its B_max, the budget, is 16,384.

    Source: P-PAS, arXiv 2608.15171, from its code (TimoSaemann/ppas-vllm, a patch of vLLM 0.22.1), which goes
    by arrival. We had neither the text of the paper nor P-PAS+, which is not in that code.
    """

    name = "ppas"

    def __init__(
        self, slots: int, budget: int, cap: int = 2048, prompts: int = 2, order: str = "arrival"
    ) -> None:
        super().__init__(slots, budget, order, watermark=0.0)
        if cap < 1 or prompts < 1:
            raise InputError(f"ppas: cap={cap}, prompts={prompts}; both must be at least 1")
        self.cap, self.prompts = cap, prompts

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        if not plan.prefill:
            return plan
        pressure = view.decoding and len(view.waiting) + len(view.prefilling) >= self.prompts
        return Plan(plan.decode, plan.prefill, plan.budget, self.cap if pressure else plan.chunk)


class PrefillInterval(Sarathi):
    """Mixed batching, but after a step with prompts the next `interval` - 1 steps run decodes alone.

    Prompts are not put off while no request can decode in their place. `interval=1` is plain mixed batching.

    Source: vLLM pull request 54627 (open when this was written), of which we had the description, not the
    code. `sglang:prefill_decode_interval=N` is the same rhythm with steps that hold prompts or decodes only.
    """

    name = "prefill-interval"

    def __init__(self, slots: int, budget: int, interval: int = 4, order: str = "arrival") -> None:
        super().__init__(slots, budget, order, watermark=0.0)
        if interval < 1:
            raise InputError(f"prefill-interval: interval={interval}; it must be at least 1")
        self.interval = interval
        self._since = interval  # steps from the last one with prompts to the next, at least

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        """A step is composed, or decodes until a request arrives: those need no count, see `plan`."""
        self._since = 1 if plan.prefill else self._since + 1

    def plan(self, view: View) -> Plan:
        fits = len(view.decoding) * view.limits.decode_width <= self.budget
        if view.decoding and self._since < self.interval and fits:
            return Plan(ALL)  # one step at a time, so that each is counted
        plan = super().plan(view)
        return Plan(plan.decode, plan.prefill, plan.budget) if plan.prefill else plan
