"""Sarathi-Serve: every decode, then prompt chunks up to the budget, first come or shortest first."""

from __future__ import annotations

from headgate.core.errors import unknown
from headgate.core.plan import ALL, Plan
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.mixed.mixed import NONE_WAITS, Mixed
from headgate.methods.orders import PromptOrder, entering, order_of, share

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
        prompts: list[int] = []
        for request in view.prefilling.values():
            if room > 0:
                prompts.append(request.id)
                room -= request.todo
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
