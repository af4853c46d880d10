"""The mixin over vLLM's schedulers: plan, turn the knobs, call its `schedule` once, read the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from headgate.core.build import mypyc_attr
from headgate.core.errors import one_line
from headgate.core.ledger import Entry
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.core.view import Limits
from headgate.live.engine.events import LOG
from headgate.live.engine.live import Live
from headgate.live.vllm.knobs import Knobs
from headgate.live.vllm.refusals import tell_refused
from headgate.live.vllm.request_map import Promises, RequestMap

ENDS = {
    RequestStatus.FINISHED_STOPPED: End.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: End.LIMIT,
    RequestStatus.FINISHED_REPETITION: End.LIMIT,  # its own limit on repeating itself
    RequestStatus.FINISHED_IGNORED: End.REFUSED,
}
UNPAUSED, PAUSED_ALL = PauseState.UNPAUSED, PauseState.PAUSED_ALL


class Renewal(NamedTuple):
    """Who decides from now on, because the settings have changed."""

    policy: BatchPolicy | None


class Duties(NamedTuple):
    """What the factory hands over."""

    policy: BatchPolicy | None  # None: vLLM decides, we only watch
    observers: tuple[Observer, ...]
    watchdog: float
    promises: Promises
    renew: Callable[[], Renewal | None]  # asked between two plans


@mypyc_attr(native_class=False)  # vLLM's classes, which are interpreted, stand behind it
class Headgate:
    """Stands before `Scheduler` or `AsyncScheduler`. All our attributes begin with `_headgate`.

    Nothing of vLLM's own code is repeated. When our part fails it is left out from then on; requests are
    vLLM's throughout, so that nobody's is lost.
    """

    def _headgate_begin(self: Any, duties: Duties) -> None:
        """Called once, when vLLM's own constructor has run."""
        self._headgate_broken = False
        self._headgate_groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._headgate_blocks = self.cache_config.num_gpu_blocks - 1  # one block is never used
        seats = self._headgate_seats()
        limits = Limits(self.max_num_scheduled_tokens, seats, self.block_size, 1 + self.num_spec_tokens)
        total = (
            self._headgate_blocks * self.block_size // self._headgate_groups
        )  # a block's share in each group
        self._headgate = Live(
            duties.policy,
            limits,
            total,
            duties.observers,
            watchdog=duties.watchdog,
            evict=self._headgate_evict,
            reject=self._headgate_reject,
            look=self._headgate_look,
        )
        self._headgate_books = RequestMap(self, self._headgate, duties.promises)
        self._headgate_knobs = Knobs(self, self._headgate, self._headgate_books, duties.renew)

    # -- what vLLM calls ----------------------------------------------------------------------------

    def add_request(self: Any, request: Request) -> None:
        """A request arrives, or the next input of a session we know."""
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self._headgate_guarded(self._headgate_books.arrive, request)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._pause_state
        if state is not UNPAUSED:
            self._headgate_guarded(self._headgate.paused)
        if self._headgate_broken or state is PAUSED_ALL:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        knobs: Knobs = self._headgate_knobs
        seen: list[Request] = []
        try:
            seen = knobs.prepare(bool(args[0] if args else kwargs and kwargs.get("throttle_prefills", False)))
        except Exception as error:
            self._headgate_failed(error)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            knobs.restore()
        if not self._headgate_broken:
            books: RequestMap = self._headgate_books
            try:
                books.ran(output, seen)
            except Exception as error:
                self._headgate_failed(error)
        return output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The tokens of a step are known."""
        books: RequestMap = self._headgate_books
        ran = False
        if not self._headgate_broken:
            try:
                ran = books.done(scheduler_output)
            except Exception as error:
                self._headgate_failed(error)
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if ran and books.speculates:
            self._headgate_guarded(books.recount, scheduler_output.num_scheduled_tokens)
        if books.turned_away:
            turned_away, books.turned_away = books.turned_away, []
            tell_refused(turned_away, result)
        return result

    def _preempt_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._headgate_guarded(self._headgate_books.evicted, request)

    def _free_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        how = ENDS.get(request.status, End.ABORTED)
        self._headgate_guarded(self._headgate_books.left, request, how, request.num_output_tokens)
        return result

    def _handle_stopped_request(self: Any, request: Request) -> bool:
        tokens = request.num_output_tokens  # a session's are cleared when its next input begins
        finished: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not finished:
            self._headgate_guarded(self._headgate_books.stopped, request, tokens)
        return finished

    # -- our part -----------------------------------------------------------------------------------

    def _headgate_guarded(self: Any, part: Callable[..., Any], *args: Any) -> Any:
        """Do our part; if it fails, never again."""
        if self._headgate_broken:
            return None
        try:
            return part(*args)
        except Exception as error:
            self._headgate_failed(error)
            return None

    def _headgate_failed(self: Any, error: Exception) -> None:
        """Called where it was caught. The hooks of every step catch by themselves: a call less each."""
        self._headgate_broken = True
        with suppress(Exception):
            LOG.exception("headgate failed; vLLM goes on without it")
            self._headgate.fall(f"internal error: {one_line(error)}")
        self._headgate_knobs.restore()

    def _headgate_evict(self: Any, entry: Entry) -> None:
        """The plan drops its KV: vLLM preempts it, and `_preempt_request` tells the books."""
        request = self._headgate_books.requests[entry.id]
        self.running.remove(request)
        drops = {"drop_stale_output": True} if getattr(self, "requires_kv_delivery", False) else {}
        self._preempt_request(request, time.monotonic(), **drops)

    def _headgate_reject(self: Any, entry: Entry) -> None:
        """The policy turns it away: vLLM forgets it, and its client hears so with the next tokens."""
        request = self._headgate_books.requests[entry.id]
        self._headgate_books.turned_away.append(request)
        self.finish_requests([request.request_id], RequestStatus.FINISHED_IGNORED)

    def _headgate_look(self: Any, entry: Entry) -> None:
        self._headgate_books.look(entry)

    def _headgate_seats(self: Any) -> int:
        return int(getattr(self, "max_num_active_reqs", self.max_num_running_reqs))
