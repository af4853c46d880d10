"""A plan becomes the few values that SGLang's own code reads, for one step."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, PrefillAdder

from headgate.core.ledger import Ledger
from headgate.core.plan import NONE, Decodes, Plan


class Turn(NamedTuple):
    visible: list[Any]  # waiting requests that may enter, in this order
    mixed: bool  # decodes run beside prompts
    tokens: int  # of prompts; 0: none runs
    decodes: bool  # decodes run where no prompt does
    evict: list[Any]  # they lose their KV first


class TurnMaker:
    """Plans as SGLang can run them: decodes all or none, one prompt half done, which always goes on first.

    `bent`: the newest plan asked for something else, and got the nearest.
    """

    def __init__(self, ledger: Ledger, requests: dict[int, Any], most: int, least: int, mixed: bool) -> None:
        self.bent = False
        self._ledger, self._requests = ledger, requests
        self._most = most  # tokens of a step
        self._least = least  # tokens of a prompt below which SGLang would run none of it
        self._mixed = mixed  # SGLang can run decodes beside prompts

    def make(self, plan: Plan, evict: list[Any]) -> Turn:
        ledger, waiting = self._ledger, self._ledger.waiting
        visible = [self._requests[id] for id in plan.prefill if id in waiting]
        half_done = not ledger.prefilling.keys().isdisjoint(plan.prefill)
        wanted = bool(visible) or half_done
        decoding = plan.decode is not NONE and (isinstance(plan.decode, Decodes) or bool(plan.decode))
        mixed = wanted and decoding and bool(ledger.decoding)
        self.bent = self._bends(plan, visible, mixed)
        mixed = mixed and self._mixed
        beside = ledger.rolling - len(evict) if mixed else 0
        tokens = int(min(plan.budget, self._most, beside + plan.chunk)) - beside
        if 0 < tokens < self._least and plan.chunk < inf:
            tokens = self._least
        tokens = max(0, tokens) if wanted else 0
        return Turn(visible, mixed, tokens, decoding or wanted, evict)

    def _bends(self, plan: Plan, visible: list[Any], mixed: bool) -> bool:
        ledger = self._ledger
        if mixed and not self._mixed:
            return True
        if visible and not ledger.prefilling.keys() <= {*plan.prefill}:
            return True  # the half-done prompt goes first all the same
        if isinstance(plan.decode, Decodes):
            return False
        return bool(plan.decode) and not ledger.decoding.keys() <= plan.decode


class PlanAdder(PrefillAdder):
    """Admits what the plan names if all of its prompt fits into free KV now, as vLLM does: the policy has
    allowed for outputs, and SGLang's `new_token_ratio` would do so twice.

    A piece fills the step to the token, and takes the pages that it takes: SGLang cuts a first piece down to
    a page, which makes steps of another size than planned, and keeps a page more for each request.
    """

    def __init__(self, *args: Any, due: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exact_chunk_fill = True
        budget = self.memory_budget
        budget.total_offset = budget.current_offset = due  # tokens of the pages that decodes beside it take

    def _get_running_request_total_token_offset(self, req: Any) -> int:
        return 0

    def _select_prefill_admission(self, req: Any, *, total_tokens: int, **more: Any) -> Any:
        """SGLang asks for less than what is free, of what it has rounded up and added: take that back."""
        extend = len(req.full_untruncated_fill_ids) - req.prefix_len
        most = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
        added = most + self.per_req_token_overhead + extend
        need = total_tokens - added + self.ceil_paged_tokens(extend)
        return super()._select_prefill_admission(req, total_tokens=need - 1, **more)

    def add_one_req(self, req: Any, *args: Any, **more: Any) -> Any:
        before, count = self._offsets(), len(self.can_run_list)
        result = super().add_one_req(req, *args, **more)
        if len(self.can_run_list) == count:
            return result
        self._charge(req, before)
        return self.budget_state()

    def add_chunked_req(self, req: Any) -> Any:
        """Where no KV is free it waits: SGLang would try all the same, and fail for want of memory."""
        before, count, budget = self._offsets(), len(self.can_run_list), self.memory_budget
        # free in the page that it has begun
        budget.total_offset -= self.ceil_paged_tokens(req.prefix_len) - req.prefix_len
        if budget.remaining_total <= 0:
            budget.total_offset = before[0]
            return req
        result = super().add_chunked_req(req)
        if len(self.can_run_list) > count:
            self._charge(req, before)
        return result

    def _offsets(self) -> tuple[int, int]:
        return self.memory_budget.total_offset, self.memory_budget.current_offset

    def _charge(self, req: Any, before: tuple[int, int]) -> None:
        """The pages between what it has and where its piece ends, and what else SGLang keeps for its row."""
        pages = self.ceil_paged_tokens(req.extend_end) - self.ceil_paged_tokens(req.prefix_len)
        pages += self._request_slot_reserve_for_req(req, extend_input_len=req.extend_len)
        budget = self.memory_budget
        budget.total_offset, budget.current_offset = before[0] + pages, before[1] + pages


class PlanOrder:
    """Stands for SGLang's `SchedulePolicy` while a plan is in force: the order is the plan's."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def calc_priority(self, waiting_queue: Any, *args: Any, **more: Any) -> None:
        """Sorts nothing."""

    def shortest_prefill_chunk_limit(self, *args: Any, **more: Any) -> None:
        """None: a half-done prompt is cut by the step's tokens alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
