"""What is called in every step: plan, turn the knobs, call vLLM's `schedule` once, read the answer."""

from __future__ import annotations

from collections.abc import Callable
from traceback import extract_tb
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from headgate.core.errors import one_line
from headgate.core.policy import End
from headgate.live.engine.events import ENGINE
from headgate.live.engine.live import Guard, Live
from headgate.live.engine.process import LOG
from headgate.live.vllm import VLLM
from headgate.live.vllm.knobs import NO_REQUESTS, Knobs
from headgate.live.vllm.refusals import tell_refused
from headgate.live.vllm.request_map import RequestMap

CONNECTORS = ("connector", "ec_connector", "aux_output_connector")
COUNTED = "_update_after_schedule"  # where vLLM counts the tokens of a step as computed
UNPAUSED, PAUSED_ALL = PauseState.UNPAUSED, PauseState.PAUSED_ALL
ENDS = {
    RequestStatus.FINISHED_STOPPED: End.STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED: End.LIMIT,
    RequestStatus.FINISHED_REPETITION: End.LIMIT,  # its own limit on repeating itself
    RequestStatus.FINISHED_IGNORED: End.REFUSED,
}


class Hooks(Guard):
    """No part of vLLM's scheduler, so that it can be compiled: its attributes are found without a look-up."""

    def __init__(
        self,
        scheduler: Any,
        live: Live,
        books: RequestMap,
        knobs: Knobs,
        schedule: Callable[..., Any],
        update: Callable[..., Any],
    ) -> None:
        super().__init__(live, VLLM.title, knobs.restore)
        self._scheduler, self._books, self._knobs = scheduler, books, knobs
        self._schedule, self._update = schedule, update  # vLLM's own
        # Steps between two with prompts, by vLLM's own gate; from 0.33 on.
        self._interval: int = getattr(scheduler, "local_prefill_interval", 1)

    def schedule(self, throttle_prefills: Any = False) -> Any:
        state = self._scheduler._pause_state
        if state is not UNPAUSED:
            self.guarded(self._live.paused)
        if self.broken or state is PAUSED_ALL:
            return self._ask(throttle_prefills)
        knobs = self._knobs
        seen: list[Request] = self.guarded(knobs.prepare, bool(throttle_prefills)) or NO_REQUESTS
        try:
            output = self._ask(throttle_prefills)
        except Exception as error:  # any other leaves the knobs turned: it ends the process
            self._undo(error, seen)
            seen = NO_REQUESTS
            output = self._ask(throttle_prefills)
        else:
            knobs.restore()
            if knobs.forgets and (self.broken or self._live.plan is not None):
                knobs.forget_drafts(output.num_scheduled_tokens)
        self.guarded(self._books.ran, output, seen)
        return output

    def _ask(self, throttle_prefills: Any) -> Any:
        """VLLM's own `schedule`; while a plan is in force, its own interval between prompts is not."""
        if self._interval > 1:
            planned = self._live.plan is not None and not self.broken
            self._scheduler.local_prefill_interval = 1 if planned else self._interval
        return self._schedule(throttle_prefills) if throttle_prefills else self._schedule()

    def _undo(self, error: Exception, seen: list[Request]) -> None:
        """VLLM's own `schedule` has failed while a plan limited it: the policy is relieved, and vLLM can be
        asked again. Raises the error where that is not sound, as it does where no plan is in force.

        Not sound: a connector or an encoder's cache has been told of the step, a request that waits held KV
        before it, or the step was complete and tokens were counted as computed.
        """
        live, scheduler = self._live, self._scheduler
        elsewhere = any(getattr(scheduler, name, None) is not None for name in CONNECTORS)
        pictures = any(request.mm_features for request in (*scheduler.running, *seen))
        known = hasattr(scheduler, COUNTED)  # else we cannot tell
        counted = not known or any(frame.name == COUNTED for frame in extract_tb(error.__traceback__))
        if self.broken or live.plan is None or elsewhere or self._books.holding or pictures or counted:
            self._knobs.restore()
            raise error
        LOG.exception("headgate: vLLM's own schedule failed under a plan; all that run are computed again")
        live.fall(f"vLLM's schedule failed under the plan: {one_line(error)}", ENGINE)
        try:
            self._knobs.undo(seen)
        except Exception:
            LOG.exception("headgate: the step could not be undone")
            raise error from None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        books = self._books
        ran = self.guarded(books.done, scheduler_output)
        if ran is not None and books.speculates:
            self.guarded(books.delivered, ran, model_runner_output)
        result = self._update(scheduler_output, model_runner_output)
        if ran is not None and books.speculates:
            self.guarded(books.recount, scheduler_output.num_scheduled_tokens)
        if books.turned_away:
            turned_away, books.turned_away = books.turned_away, []
            tell_refused(turned_away, result)
        return result

    def freed(self, request: Request) -> None:
        self.guarded(self._left, request)

    def _left(self, request: Request) -> None:
        how = ENDS.get(request.status, End.ABORTED)
        self._books.left(request, how, request.num_output_tokens)
