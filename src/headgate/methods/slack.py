"""Steps as long as the slack of decodes allows: FairBatching and QoServe.

Token j of a request, from 0, is due at its arrival + TTFT + j * T (an envelope): a token that came early
leaves slack to those after it. `keep` and `slai` plan every gap instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Plan
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.methods.keep.step import largest
from headgate.methods.mixed.sarathi import OrderedPrompts
from headgate.methods.orders import DeadlineAndLength, begun, first_due, order_of

LEAST = 64  # prompt tokens of a step where no chunk fits, so that prompts move on
NEAR = 32  # tokens: how exactly the largest chunk is found
SAMPLE = 2048  # prompt tokens from which the pace of prompts is taken


class SlackPolicy(OrderedPrompts):
    """What both share: when tokens are due, what a step costs and the largest chunk that fits into a time."""

    def __init__(
        self, slots: int, budget: int, cost: StepCost, ttft: float, tbt: float, trust: float, ahead: bool
    ) -> None:
        super().__init__(slots, budget)
        if not (ttft > 0 and tbt > 0 and 0 < trust <= 1):
            raise InputError(
                f"{self.name}: ttft={ttft}, tbt={tbt}, trust={trust}; times must be above 0, trust at most 1"
            )
        self.ttft, self.tbt, self.trust, self.ahead = ttft, tbt, trust, ahead
        self._seconds = (cost.unhosted() if cost.host else cost).seconds
        self._pace = self._seconds(Shape(prefill=SAMPLE, chunks=(Chunk(0, SAMPLE),))) / SAMPLE
        self._step = 0.0  # seconds of the newest plan, where it holds prompts
        self._in_flight = 0.0  # the same once it was taken

    def plan(self, view: View) -> Plan:
        budget = min(self.budget, view.limits.batch_tokens)
        decodes = len(view.decoding) * view.limits.decode_width
        if decodes > budget or not (view.waiting or view.prefilling):
            return super().plan(view)
        return self.fill(view, budget)

    @abstractmethod
    def fill(self, view: View, budget: int) -> Plan:
        """A step of at most so many tokens, which has prompts to run and room for every decode."""

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        self._in_flight = self._step if plan.prefill else 0.0

    def between(self, request: Request) -> float:
        own = request.slo.between_tokens
        return self.tbt if own is None else own

    def next_due(self, request: Request) -> float:
        return first_due(request, self.ttft) + request.generated * self.between(request)

    def begins(self, view: View, alone: float) -> float:
        """When a step composed now begins: after the one in flight, where steps are composed ahead."""
        return view.now + ((self._in_flight or alone) if self.ahead and view.decoding else 0.0)

    def prompts_for(self, view: View, room: int) -> list[Request]:
        prompts = list(view.prefilling.values())
        entered = self.entering(view, 0.0, room - sum(half.todo for half in prompts))
        return prompts + [view.waiting[id] for id in entered]

    def price(self, decodes: int, context: int, prompts: Sequence[Request] = (), tokens: int = 0) -> float:
        chunks, behind, room = [], 0, tokens
        for request in prompts:
            if room <= 0:
                break
            there, taken = request.prompt + request.generated - request.todo, min(request.todo, room)
            chunks.append(Chunk(there, taken, taken == request.todo))
            behind, room = behind + there, room - taken
        taken = tokens - max(room, 0)
        return self._seconds(Shape(decodes, context + decodes, taken, behind, tuple(chunks)))

    def chunk_within(
        self, time: float, decodes: int, context: int, prompts: Sequence[Request], most: int
    ) -> int:
        fits = 0
        if time > 0:  # late already: no step is short enough
            fits = largest(lambda x: self.price(decodes, context, prompts, x) <= time, 0, most, NEAR)
        return fits or min(LEAST, most)

    def taking(self, prompts: Sequence[Request], chunk: int, budget: int) -> Plan:
        return Plan(ALL, tuple(begun(prompts, chunk)[0]), budget, chunk)


class FairBatching(SlackPolicy):
    """A step may last as long as the decode that is due first allows, and at least `tbt`.

    It takes the decodes that could not wait for another step, then prompts, then the other decodes while time
    is left: decodes that are early yield to prompts.

    `ttft` and `tbt` are for requests without promises of their own. `trust` is the share of the time that is
    planned with. With `ahead` steps are composed while one runs (vLLM's default): this one begins after it.

    Source: arXiv 2510.14392, known to us by its abstract and summaries: the envelope, a budget of time, early
    decodes that yield. Guesses: the floor of `tbt`, when a decode is urgent, `LEAST`, `trust`, the order of
    arrival. We differ: a step costs what the card says; the paper fits a line in new tokens and context.
    """

    name = "fairbatching"

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost,
        ttft: float = 0.5,
        tbt: float = 0.1,
        trust: float = 0.9,
        hold: bool = True,
        ahead: bool = True,
        order: str = "arrival",
    ) -> None:
        super().__init__(slots, budget, cost, ttft, tbt, trust, ahead)
        self.hold = hold
        self.order = order_of(self.name, order, ageing=0.0, promise=ttft, pace=self._pace)

    def fill(self, view: View, budget: int) -> Plan:
        width = view.limits.decode_width
        prompts = self.prompts_for(view, budget)
        if not prompts:
            return Plan(ALL)
        if not view.decoding:
            self._step = self.price(0, 0, prompts, budget)
            return Plan(ALL, tuple(request.id for request in prompts), budget)
        decodes = sorted((self.next_due(r), r.id, r.prompt + r.generated) for r in view.decoding.values())
        context = [0]  # of the first n decodes
        for _, _, length in decodes:
            context.append(context[-1] + length)
        alone = self.price(len(decodes), context[-1])
        start = self.begins(view, alone)
        tightest = min(self.between(request) for request in view.decoding.values())
        time = self.trust * max(decodes[0][0] - start, min(tightest, self.tbt))
        urgent = len(decodes)
        if self.hold:  # the others would be in time after this step and one of decodes alone
            urgent = sum(due <= start + time + alone for due, _, _ in decodes)
        most = min(sum(request.todo for request in prompts), budget - urgent * width)
        chunk = self.chunk_within(time, urgent, context[urgent], prompts, most)
        if chunk <= 0:
            return Plan(ALL)
        taken = urgent + max(0, min(len(decodes) - urgent, (budget - chunk) // width - urgent))
        while taken > urgent and self.price(taken, context[taken], prompts, chunk) > time:
            taken = urgent + (taken - urgent) * 3 // 4  # the ones that are due first stay
        self._step = self.price(taken, context[taken], prompts, chunk)
        plan = self.taking(prompts, chunk, budget)
        if taken == len(decodes):
            return plan
        return plan._replace(decode=frozenset(id for _, id, _ in decodes[:taken]))


class QoServe(SlackPolicy):
    """Every decode in every step, beside the most prompt tokens with which no decode is late.

    Prompts go by the time their first token is due plus `alpha` seconds for each token to do; those that
    would be late anyway stand behind all others (relegation).

    `alpha` seconds are the paper's 8 ms, or 1 ms at low load; at 0 the earliest deadline is first. `trust` is
    the share of the slack that is planned with (the paper trains its predictor to err short).

    Source: QoServe, first called Niyama (arXiv 2503.22562, ASPLOS 2026): Algorithm 1 and section 3.6. We
    differ: a half-done prompt is not overtaken (a plan names those first), there is no class with a promise
    for its last token and no free tier to relegate first, the card prices steps instead of a random forest,
    and where nothing fits a step takes `LEAST` tokens (a guess, as `trust` is).
    """

    name = "qoserve"

    def __init__(
        self,
        slots: int,
        budget: int,
        cost: StepCost,
        ttft: float = 0.5,
        tbt: float = 0.1,
        alpha: float = 0.008,
        relegate: bool = True,
        trust: float = 0.9,
        ahead: bool = True,
    ) -> None:
        super().__init__(slots, budget, cost, ttft, tbt, trust, ahead)
        if not 0 <= alpha < 1:
            raise InputError(f"qoserve: alpha={alpha} seconds per token; it must be from 0 to below 1")
        self.order = DeadlineAndLength(ttft, self._pace if relegate else 0.0, alpha)

    def fill(self, view: View, budget: int) -> Plan:
        decodes = len(view.decoding)
        room = budget - decodes * view.limits.decode_width
        prompts = self.prompts_for(view, room)
        chunk = most = min(sum(request.todo for request in prompts), room)
        if chunk <= 0:
            return Plan(ALL)
        context = sum(request.prompt + request.generated for request in view.decoding.values())
        if decodes:
            start = self.begins(view, self.price(decodes, context))
            slack = self.trust * (min(map(self.next_due, view.decoding.values())) - start)
            chunk = self.chunk_within(slack, decodes, context, prompts, most)
        self._step = self.price(decodes, context, prompts, chunk)
        return self.taking(prompts, chunk, budget)
