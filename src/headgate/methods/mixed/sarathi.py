"""Sarathi-Serve: every decode, then prompt chunks up to the budget, first come or shortest first."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.errors import InputError, unknown
from headgate.core.plan import ALL, Plan
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.mixed.mixed import NONE_WAITS, Mixed
from headgate.methods.orders import PromptOrder, begun, entering, order_of, share

KNOWN_ORDERS = ("arrival", "shortest", "priority", "fair", "vtc")


class OrderedPrompts(Mixed):
    order: PromptOrder

    def arrived(self, request: Request, now: float) -> None:
        self.order.add(request)

    def admitted(self, request: Request, now: float) -> None:
        self.order.admitted(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        self.order.finished(request)

    def entering(self, view: View, watermark: float, tokens: int) -> list[int]:
        slots = min(self.slots, view.limits.running) - len(view.decoding) - len(view.prefilling)
        return entering(view, self.order, watermark, slots, tokens)[0]


class Sarathi(OrderedPrompts):
    """Mixed batching with an order for new prompts and a watermark of KV that they may not take.

    Only prompts that have not started are ordered; one that has is never overtaken.

    Parameters: docs/policies/published.md; the papers run 128 slots and a budget of 512. `ageing` is the
    tokens by which a prompt counts as shorter with every second it waits; at 0 nothing bounds its wait.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024) as restated in arXiv 2508.01002, Algorithm 4, without
    its endless loop. We differ: a decode without a block evicts the newest request, half-done
    or not, as vLLM does; the paper's code looks for a half-done prompt first.
    """

    name = "sarathi"

    def __init__(
        self, slots: int, budget: int, order: str = "arrival", ageing: float = 0.0, watermark: float = 0.01
    ) -> None:
        super().__init__(slots, budget)
        if order not in KNOWN_ORDERS:
            raise unknown(f"order of {self.name}", order, KNOWN_ORDERS)
        self.order = order_of(self.name, order, ageing, promise=1.0, pace=0.0)
        self.watermark = share(self.name, "watermark", watermark)

    def plan(self, view: View) -> Plan:
        room = self.budget - len(view.decoding) * view.limits.decode_width
        if room < 0 or not (view.waiting or view.prefilling):
            return super().plan(view)
        prompts, room = begun(view.prefilling.values(), room)
        half_done = len(prompts)
        prompts += self.entering(view, self.watermark, room)
        if not prompts:
            return Plan(ALL, until=self.order.blocked)
        if half_done == len(prompts) and not view.waiting:  # the same until a request arrives
            return Plan(ALL, tuple(prompts), self.budget, until=NONE_WAITS.until)
        return Plan(ALL, tuple(prompts), self.budget)


class ShortestFirst(Sarathi):
    """Sarathi with the shortest prompt first: the baseline "Sarathi (SPF)" of arXiv 2508.01002."""

    def __init__(self, slots: int, budget: int, ageing: float = 0.0, watermark: float = 0.01) -> None:
        super().__init__(slots, budget, "shortest", ageing, watermark)


# -- prompts at a pace: a smaller share of a step under pressure (P-PAS), or every Nth step


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
