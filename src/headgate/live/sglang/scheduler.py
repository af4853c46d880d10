"""SGLang's `Scheduler` with a policy in charge. Nothing of SGLang's own code is repeated.

Before each step the plan becomes the few values that SGLang's code reads (`Turn`); they go back after it.
When the policy is relieved there is no turn, none of them is touched, and SGLang's own scheduling goes on
from that step. With tensor parallelism every rank schedules: rank 0 alone has the policy and its books and
sends each turn to the others.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.utils import broadcast_pyobj

from headgate.core.errors import InputError
from headgate.core.ledger import Entry
from headgate.core.policy import BatchPolicy, End
from headgate.core.view import Limits
from headgate.live.engine.live import Guard, Live
from headgate.live.engine.plug_in import EngineFacts, PlugIn, admit, likeness
from headgate.live.engine.policy import build_policy
from headgate.live.engine.process import LOG
from headgate.live.engine.requests import RequestTerms
from headgate.live.engine.settings import Settings, read_settings
from headgate.live.sglang import LOADED, SGLANG
from headgate.live.sglang.fit import check_arguments, check_engine, check_fit, read_arguments
from headgate.live.sglang.request_map import RequestMap
from headgate.live.sglang.seams import RELEASES, installed, problem
from headgate.live.sglang.turn import PlanAdder, PlanOrder, Turn, TurnMaker

LOG.logger = logging.getLogger("sglang.headgate")
UNTIL_0_5_22 = not hasattr(Scheduler, "send_abort_output")
LATE = "the first token could not come within the promised time; try again or elsewhere"


class HeadgateScheduler(Scheduler):
    """All our attributes begin with `_headgate`. They are there before SGLang's own constructor runs."""

    _headgate: Live | None = None  # on rank 0, once all is made
    _headgate_books: RequestMap
    _headgate_turn: Turn | None = None
    _headgate_held_row = False  # a prompt was half done when the turn began
    _headgate_plug_in: PlugIn | None = None

    def __init__(self, server_args: Any, port_args: Any) -> None:
        try:
            settings = read_settings()
            admit(problem(), RELEASES.doubt(installed() or ""), settings.force)
            check_arguments(read_arguments(server_args))
            check_fit(settings.named()[0], bool(server_args.enable_mixed_chunk))
            super().__init__(server_args, port_args)
            check_engine(self)
            self._headgate_begin(settings)
        except InputError as error:
            LOG.error("headgate: %s", error)
            raise

    def _headgate_begin(self, settings: Settings) -> None:
        self._headgate_own_order = PlanOrder(self.policy)
        self._headgate_refuse = settings.refuse or 503
        self._headgate_evicting: list[Any] = []
        self._headgate_rejected: list[str] = []
        self._headgate_mixes = bool(self.is_mixed_chunk)
        shared = self.tp_size > 1
        self._headgate_follows = shared and bool(self.tp_group.rank_in_group)
        self._headgate_group: Any = self.tp_group if shared else None
        if self._headgate_follows:
            return  # no policy, no books: it runs rank 0's turns
        plug_in = PlugIn(settings, _facts(self), lambda settings: _policy(settings, self))
        plug_in.follow(read_settings)
        live = Live(
            plug_in.policy,
            Limits(_budget(self), _slots(self), self.page_size),
            self.max_total_num_tokens,
            plug_in.observers,
            watchdog=settings.watchdog,
            evict=lambda entry: self._headgate_evicting.append(self._headgate_books.requests[entry.id]),
            reject=self._headgate_reject,
            look=lambda entry: self._headgate_books.look(entry),
        )

        def terms(request: Any) -> RequestTerms:
            given = request.sampling_params.custom_params
            return plug_in.promises(given if isinstance(given, dict) else None)

        self._headgate_books = books = RequestMap(self, live, terms)
        least, most = max(1, self.truncation_align_size or 1), _budget(self)
        self._headgate_turns = TurnMaker(live.ledger, books.requests, most, least, self._headgate_mixes)
        self._headgate_guard = Guard(live, SGLANG.title, lambda: setattr(self, "_headgate_turn", None))
        self._headgate, self._headgate_plug_in = live, plug_in
        plug_in.begin(live)
        if file := os.environ.get(LOADED):
            Path(file).touch()

    def _headgate_do(self, part: Any, *args: Any) -> None:
        if self._headgate is not None:
            self._headgate_guard.guarded(part, *args)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        if self._headgate is not None and self.waiting_queue and self.waiting_queue[-1] is req:
            self._headgate_guard.guarded(self._headgate_books.arrive, req)

    def _release_aborted_request(self, req: Any) -> None:
        super()._release_aborted_request(req)
        if self._headgate is not None:
            self._headgate_guard.guarded(self._headgate_books.left, req, End.ABORTED)

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        if self._headgate is not None:
            self._headgate_books.look_for_lost = True

    def continue_generation(self, recv_req: Any) -> Any:
        answer = super().continue_generation(recv_req)
        if self._headgate is not None:
            self._headgate_guard.guarded(self._headgate.paused)
        return answer

    def _headgate_reject(self, entry: Entry) -> None:
        """Not by `abort_request`, which takes every request whose name begins alike."""
        request = self._headgate_books.requests[entry.id]
        reason = {"type": "abort", "status_code": self._headgate_refuse, "message": LATE}
        abort = _make_abort_req(request, finished_reason=reason)
        self._headgate_books.left(request, End.REFUSED)
        self._headgate_rejected.append(request.rid)
        self._headgate_drop(request)
        if UNTIL_0_5_22:
            self.ipc_channels.send_to_tokenizer.send_output(abort, request)
        else:
            self.send_abort_output(abort, request)

    def _headgate_drop(self, request: Any) -> None:
        """Out of the queue, as SGLang's own abort does it."""
        self.waiting_queue.remove(request)
        self._release_aborted_request(request)
        self.beam_coordinator.retire_group(request)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        self._headgate_turn = None
        self._headgate_do(self._headgate_prepare, running_batch, last_batch)
        if self._headgate_group is not None:
            self._headgate_share(running_batch, last_batch)
        answer = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        turn, self._headgate_turn = self._headgate_turn, None
        self._headgate_do(self._headgate_ran, answer.batch_to_run, turn)
        return answer

    def _headgate_prepare(self, running_batch: Any, last_batch: Any) -> None:
        live, books = self._headgate, self._headgate_books
        assert live is not None and self._headgate_plug_in is not None
        ledger = live.ledger
        if books.look_for_lost:
            books.find_lost((running_batch, last_batch))
        if live.lease.ended or live.plan is None:
            renewal = self._headgate_plug_in.renew()
            if renewal is not None:
                self._headgate_refuse = renewal.settings.refuse or 503
                live.take_over(renewal.policy)
        if not live.occupied:
            return
        books.tidy()
        free = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        short = free < ledger.rolling * self.page_size
        if short:
            books.look_for_lost = True  # SGLang may retract, and drop one that can never fit
        self._headgate_evicting.clear()
        plan = live.begin(free, short)
        if plan is None:
            return
        if short and not free and self.chunked_req is not None:
            self._headgate_keep_last(live, running_batch)
        self._headgate_turn = self._headgate_turns.make(plan, [*self._headgate_evicting])
        if self._headgate_turns.bent:
            live.news.beside("bent", live.now)

    def _headgate_keep_last(self, live: Live, running_batch: Any) -> None:
        """The only decode finds no KV beside a half-done prompt: SGLang would abort it. It waits instead."""
        decodes = [entry for entry in live.ledger.decoding.values() if entry.rolls]
        if len(decodes) == 1 and not (
            decodes[0].held_kv % self.page_size or self._reqs_finishing_inflight(running_batch)
        ):
            self._headgate_evicting.append(self._headgate_books.requests[decodes[0].id])

    def _headgate_ran(self, batch: Any, turn: Turn | None) -> None:
        """What SGLang composed is the truth, planned or not."""
        live = self._headgate
        assert live is not None
        self._headgate_books.ran(batch, turn is not None)
        if turn is not None and turn.tokens and (batch is None or not batch.forward_mode.is_extend()):
            live.lease.ended = True  # every prompt was refused, and SGLang decodes instead: ask again

    def _should_defer_prefill(self, *args: Any) -> bool:
        turn = self._headgate_turn
        if turn is None:
            return bool(super()._should_defer_prefill(*args))
        if turn.tokens:
            return False
        if self.grammar_manager.has_waiting_grammars():  # SGLang looks only where it looks for prompts
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)
        return True

    def get_prefill_adder_class(self) -> Any:
        turn = self._headgate_turn
        return PrefillAdder if turn is None else partial(PlanAdder, due=self._headgate_due)

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """SGLang's own, which sees the plan's prompts and tokens; then all is as before, but for those that
        entered.
        """
        turn = self._headgate_turn
        if turn is None:
            return super().get_new_batch_prefill(running_batch)
        self._headgate_evict(running_batch, turn)
        if self._headgate is None or self._headgate_group is not None:
            own = self._headgate_change(running_batch, turn)  # a rank that goes its own way hangs the others
        else:
            own = self._headgate_guard.guarded(self._headgate_change, running_batch, turn)
        if own is None:
            return super().get_new_batch_prefill(running_batch)
        try:
            return super().get_new_batch_prefill(running_batch)
        finally:
            seen, left = {*turn.visible}, {*self.waiting_queue}
            came = [request for request in self.waiting_queue if request not in seen]  # grammars are ready
            queue = [request for request in own["waiting_queue"] if request not in seen or request in left]
            for name, value in {**own, "waiting_queue": queue + came}.items():
                setattr(self, name, value)

    def _headgate_change(self, running_batch: Any, turn: Turn) -> dict[str, Any]:
        if UNTIL_0_5_22:
            running_batch.filter_batch()  # later ones let finished requests go in each step
        self._headgate_due = 0
        if turn.mixed:  # pages that its decodes need in this step; some end with the one in flight
            ending = {*self._reqs_finishing_inflight(running_batch)}
            places = [place for place, request in enumerate(running_batch.reqs) if request not in ending]
            self._headgate_due = int(running_batch.new_tokens_required_next_decode(places))
        self._headgate_held_row = self.chunked_req is not None
        changed = {
            "waiting_queue": list(turn.visible),
            "policy": self._headgate_own_order,
            "is_mixed_chunk": turn.mixed,
            "chunked_prefill_size": turn.tokens + (len(running_batch.reqs) if turn.mixed else 0),
            "enable_priority_preemption": False,
            "prefill_delayer": None,  # it would fight the policy, as would the next
            "min_free_slots_delayer": None,
        }
        own = {name: getattr(self, name) for name in changed}
        for name, value in changed.items():
            setattr(self, name, value)
        running_batch.batch_is_full = False  # it remembers that another prompt did not fit
        return own

    def get_num_allocatable_reqs(self, running_bs: int, *args: Any, **more: Any) -> int:
        """SGLang 0.5.22 counts the row of a half-done prompt as taken by another."""
        count = int(super().get_num_allocatable_reqs(running_bs, *args, **more))
        if UNTIL_0_5_22 and self._headgate_turn is not None and self._headgate_held_row:
            return min(count + 1, self.max_running_requests - running_bs)
        return count

    def update_running_batch(self, batch: Any) -> Any:
        turn = self._headgate_turn
        if turn is not None:
            self._headgate_evict(batch, turn)
            if not turn.decodes:
                return None  # the plan holds all of them
        return super().update_running_batch(batch)

    def _headgate_evict(self, batch: Any, turn: Turn) -> None:
        """As SGLang preempts for a higher priority. Only decodes: a half-done prompt goes on."""
        gone = {request for request in turn.evict if not request.finished()}
        turn.evict.clear()
        kept = []
        for place, request in enumerate(batch.reqs):
            if request in gone:
                batch.release_req(place, len(batch.reqs) - len(gone))
            else:
                kept.append(place)
        if len(kept) == len(batch.reqs):
            return
        evicted = [request for request in batch.reqs if request in gone]
        batch.filter_batch(keep_indices=kept)
        for request in evicted:
            self._add_request_to_queue(request)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        if self._headgate is not None:
            self._headgate_guard.guarded(self._headgate_books.done, batch)

    def _headgate_share(self, running_batch: Any, last_batch: Any) -> None:
        """Rank 0's turn becomes that of all ranks, at each step; also that there is none. Each rank has the
        same requests in the same places, because SGLang sends it the same messages.
        """
        group, turn = self._headgate_group, self._headgate_turn
        said = None
        if turn is not None:
            visible, evict = ([request.rid for request in some] for some in (turn.visible, turn.evict))
            said = visible, turn.mixed, turn.tokens, turn.decodes, evict
        rejected, self._headgate_rejected = self._headgate_rejected, []
        said, rejected = broadcast_pyobj([said, rejected], group.rank, self.tp_cpu_group, src=group.ranks[0])
        if not self._headgate_follows:
            return
        queue = {request.rid: request for request in self.waiting_queue}
        for rid in rejected:
            self._headgate_drop(queue.pop(rid))
        if said is not None:
            visible, mixed, tokens, decodes, evict = said
            batches = [batch for batch in (running_batch, last_batch) if batch is not None]
            running = {request.rid: request for batch in batches for request in batch.reqs} if evict else {}
            self._headgate_turn = Turn(
                [queue[rid] for rid in visible], mixed, tokens, decodes, [running[rid] for rid in evict]
            )

    def release_host_resources(self) -> None:
        if self._headgate_plug_in is not None:
            self._headgate_plug_in.close()
        super().release_host_resources()


def _budget(scheduler: Any) -> int:
    return int(min(scheduler.chunked_prefill_size, scheduler.max_prefill_tokens))


def _slots(scheduler: Any) -> int:
    """A step must hold a token for each decode beside a prompt."""
    return int(min(scheduler.max_running_requests, _budget(scheduler)))


def _policy(settings: Settings, scheduler: Any) -> tuple[BatchPolicy, dict[str, Any]]:
    check_fit(settings.named()[0], scheduler._headgate_mixes)
    if settings.card:
        LOG.warning("headgate: built-in cards were measured in vLLM; SGLang's steps may take other times")
    return build_policy(
        settings,
        SGLANG,
        kv_tokens=scheduler.max_total_num_tokens,
        block=scheduler.page_size,
        max_model_len=scheduler.model_config.context_len,
        batch_tokens=_budget(scheduler),
        running=_slots(scheduler),
        like=likeness(scheduler.model_config, scheduler.tp_size, scheduler.enable_overlap, _gpu),
    )


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def _facts(scheduler: Any) -> EngineFacts:
    if scheduler.max_running_requests > _slots(scheduler):
        LOG.warning(
            "headgate: %d of SGLang's %d slots are used: a step has no more tokens (--chunked-prefill-size)",
            _slots(scheduler),
            scheduler.max_running_requests,
        )
    limits = {
        SGLANG.slots: _slots(scheduler),
        SGLANG.budget: _budget(scheduler),
        SGLANG.longest: scheduler.model_config.context_len,
        "page_size": scheduler.page_size,
    }
    return EngineFacts(
        names=SGLANG,
        version=installed() or "unknown",
        model=str(scheduler.server_args.model_path),
        kv_tokens=scheduler.max_total_num_tokens,
        limits=limits,
        engine=int(getattr(scheduler.server_args, "dp_rank", None) or 0),
        asynchronous=bool(scheduler.enable_overlap),
        priorities=bool(scheduler.enable_priority_scheduling),
    )
