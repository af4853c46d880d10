"""EB(k): decode until enough slots are idle, then prefill prompts into them, never both at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError
from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.cost.model import StepCost
from headgate.methods.eb.refill import Pieces, refill_due
from headgate.methods.mixed.mixed import NO_PLACE_LEFT, NONE_WAITS

ONE_STEP = Plan(ALL, until=Until(steps=1))


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class Exclusive(BatchPolicy):
    """Decode until `refill` of `slots` could be filled at once; then prefill that many prompts.

    While prompts run, decodes keep their KV and get nothing; while decodes run, no prompt does. With a long
    queue a refill begins when `refill` slots are idle. With a short one the same *share* decides: a refill
    begins when the prompts that could enter are at least refill/slots of the batch they would make (`fillable
    * (slots - refill) >= decoding * refill`, integers only). Where nothing has arrived since the last refill
    began and all that wait have a slot, waiting for more idle slots gains nothing: they enter.

    Parameters:
        slots: N, requests that may hold KV at once.
        refill: k, from 1 (prefill as soon as a request can enter: vLLM v0) to `slots` (let the batch run
            empty: request-level batching).
        max_gap: seconds a refill may keep any decode waiting. A longer refill is cut into pieces with a
            decode step between; needs `cost` to know how long a piece takes. None: no bound.
        cost: what steps cost, for `max_gap`.

    Source: "Threshold-Based Exclusive Batching for LLM Inference" (arXiv 2606.00516), section 3, with a
    fixed k. We differ: (a) the switch is also tested right after a refill, so that k=1 is vLLM v0 at every
    load; (b) a prompt enters only if its whole KV is free, and one token for each decode beside it (the
    paper's code can leave half-done prompts stuck); (c) the prompts of a refill are fixed when it begins;
    (d) `max_gap` and the rule for a queue that drains are ours.

    Examples:
        >>> import headgate
        >>> policy = headgate.Exclusive(slots=64, refill=16)
        >>> engine = headgate.card_engine("cal-h200-qwen3-8b", slots=64)
        >>> run = headgate.simulate(engine, policy, headgate.Workload.of([512] * 200, [64] * 200))
        >>> bool(((run.steps["decodes"] > 0) & (run.steps["prefill"] > 0)).any())  # never both in one step
        False
    """

    def __init__(
        self, slots: int, refill: int, max_gap: float | None = None, cost: StepCost | None = None
    ) -> None:
        if slots < 1:
            raise InputError(f"eb: slots={slots}; at least one request must be able to run")
        if not 1 <= refill <= slots:
            raise InputError(f"eb: refill={refill} is outside 1..{slots}; choose at most as many as slots")
        self.slots = slots
        self.refill = refill
        self.pieces = Pieces(max_gap, cost) if max_gap is not None else None
        self._batch: dict[int, None] = {}  # prompts of the refill under way, in order
        self._grows = True  # has a request joined the queue since the last refill began?

    @property
    def refilling(self) -> bool:
        return bool(self._batch)

    def arrived(self, request: Request, now: float) -> None:
        """The queue grows: more may come, and a refill may wait for them."""
        self._grows = True

    def prefilled(self, request: Request, now: float) -> None:
        self._drop(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        self._drop(request)

    def evicted(self, request: Request, now: float) -> None:
        self._grows = True
        self._drop(request)

    def planned(self, plan: Plan, now: float, gauges: Mapping[str, float]) -> None:
        if self.pieces:
            self.pieces.composed(plan)

    def start_over(self) -> None:
        """Another policy has decided meanwhile: the prompts of an old refill mean nothing."""
        self._batch = {}

    def gauges(self) -> Mapping[str, float]:
        return {"refill": self.refill, "slots": self.slots, "refilling": len(self._batch)}

    def plan(self, view: View) -> Plan:
        """The prompts of the refill under way, or every decode until the next one is due."""
        if self.pieces and self.pieces.decodes_are_due and view.decoding:
            return ONE_STEP
        if self.pieces and self._batch and view.decoding and not view.prefilling:
            # Decodes between two pieces took KV that the rest of the refill was meant to have.
            rest = [view.waiting[id] for id in self._batch]
            kept = self._that_fit(view, rest)
            if not kept:
                self._batch = {}
                self._refilled()
                return ONE_STEP
            if len(kept) < len(rest):
                self._batch = dict.fromkeys(kept)
        if self._batch and view.decoding and not view.prefilling:
            # On one engine the next prompt has a slot and its KV; in a fleet others may have come meanwhile.
            block, need = view.limits.block, view.waiting[next(iter(self._batch))].room
            if len(view.decoding) >= view.limits.running or -(-need // block) * block > view.kv_free:
                self._batch = {}
                self._refilled()
        if not self._batch:
            self._batch = dict.fromkeys(self._next_batch(view))
            self._grows = self._grows and not self._batch
        if self._batch:
            return self._prefill(view)
        if not view.waiting:
            return NONE_WAITS
        return self._decode(view)

    def _prefill(self, view: View) -> Plan:
        prompts = tuple(self._batch)
        if view.prefilling and prompts[0] not in view.prefilling:  # a real engine may pass one over
            prompts = tuple(sorted(prompts, key=lambda id: id not in view.prefilling))
        if self.pieces is None:
            return Plan(NONE, prompts, until=Until(prefills=len(prompts)))
        if not view.decoding:  # no decode waits until the first prompt is done
            return Plan(NONE, prompts, until=Until(prefills=1))
        tokens, _ = self.pieces.next_piece(view, prompts)
        return Plan(NONE, prompts, tokens)  # a step at a time: pieces are counted when they are composed

    def _next_batch(self, view: View) -> list[int]:
        if view.prefilling:  # taken over half-way, or the engine refused a part
            return list(view.prefilling)
        slots, refill = self._threshold(view)
        decodes = len(view.decoding)
        waiting = len(view.waiting)
        rest = self._drains(slots, refill) and 0 < waiting <= slots - decodes
        if not (rest or refill_due(slots, refill, decodes, waiting)):
            return []
        return self._that_fit(view, islice(view.waiting.values(), slots - decodes))

    def _that_fit(self, view: View, prompts: Iterable[Request]) -> list[int]:
        """The first of them whose KV is free, with a token for each decode beside them."""
        block, decodes = view.limits.block, len(view.decoding)
        room = view.kv_free - decodes
        batch: list[int] = []
        for request in prompts:
            room -= -(-(request.room + 1) // block) * block
            if room < 0 and (batch or decodes):
                break
            batch.append(request.id)
        return batch

    def _decode(self, view: View) -> Plan:
        """Every decode, until enough have left (or come) for the switch to be worth another look."""
        slots, refill = self._threshold(view)
        decodes = len(view.decoding)
        by_slots = refill - (slots - decodes)
        if self._drains(slots, refill) and len(view.waiting) < refill:
            by_slots = min(by_slots, len(view.waiting) - (slots - decodes))
            return Plan(ALL, until=Until(finishes=max(1, by_slots), arrivals=1))
        by_queue = -(-(decodes * refill - len(view.waiting) * (slots - refill)) // refill)
        if by_queue > by_slots:  # the queue is too short: an arrival may bring the switch forward
            return Plan(ALL, until=Until(finishes=max(1, by_queue), arrivals=1))
        if by_slots > 1:
            return Plan(ALL, until=Until(finishes=by_slots))
        return NO_PLACE_LEFT  # slots are there, memory is not

    def _threshold(self, view: View) -> tuple[int, int]:
        slots = min(self.slots, view.limits.running)
        return slots, min(self.refill, slots)

    def _drains(self, slots: int, refill: int) -> bool:
        """Is there nothing to wait for? Not asked of request-level batching, which runs its batch empty."""
        return not self._grows and refill < slots

    def _drop(self, request: Request) -> None:
        if self._batch.pop(request.id, self) is None and not self._batch:
            self._refilled()

    def _refilled(self) -> None:
        if self.pieces:
            self.pieces.end()


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class PrefillFirst(Exclusive):
    """vLLM v0: whenever a prompt can enter, prefill it before any decode runs. EB with k = 1."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, refill=1)


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class RequestLevel(Exclusive):
    """Request-level batching: fill all slots, run the batch until it is empty. EB with k = N."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots, refill=slots)
