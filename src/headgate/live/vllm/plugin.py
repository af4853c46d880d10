"""The mixin over vLLM's schedulers: what it replaces of them, and what we make them do."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.request import Request, RequestStatus

from headgate.core.ledger import Entry
from headgate.core.view import Limits
from headgate.live.engine.live import Live
from headgate.live.engine.plug_in import PlugIn, Promises
from headgate.live.vllm.hooks import Hooks
from headgate.live.vllm.knobs import Knobs
from headgate.live.vllm.request_map import RequestMap


class Headgate:
    """Stands before `Scheduler` or `AsyncScheduler`. All our attributes begin with `_headgate`, but two that
    are called in every step: `schedule` and `update_from_output` of an instance are those of `Hooks`.

    Nothing of vLLM's own code is repeated. When our part fails it is left out from then on; requests are
    vLLM's throughout, so that none is lost.
    """

    _headgate_plug_in: PlugIn | None = None

    def _headgate_begin(self: Any, plug_in: PlugIn, promises: Promises) -> None:
        self._headgate_plug_in = plug_in
        self._headgate_groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._headgate_blocks = self.cache_config.num_gpu_blocks - 1  # one block is never used
        slots = self._headgate_slots()
        limits = Limits(self.max_num_scheduled_tokens, slots, self.block_size, 1 + self.num_spec_tokens)
        total = self._headgate_blocks * self.block_size // self._headgate_groups  # a share in each group
        self._headgate = Live(
            plug_in.policy,
            limits,
            total,
            plug_in.observers,
            watchdog=plug_in.settings.watchdog,
            evict=self._headgate_evict,
            reject=self._headgate_reject,
            look=lambda entry: self._headgate_books.look(entry),
        )
        self._headgate_books = RequestMap(self, self._headgate, promises)
        live, books = self._headgate, self._headgate_books
        knobs = Knobs(self, live, books, plug_in.renew)
        schedule, update = super().schedule, super().update_from_output  # type: ignore[misc]
        self._headgate_hooks = hooks = Hooks(self, live, books, knobs, schedule, update)
        self.schedule, self.update_from_output = hooks.schedule, hooks.update_from_output

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._headgate_plug_in is not None:
            self._headgate_plug_in.close()

    def add_request(self: Any, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self._headgate_hooks.guarded(self._headgate_books.arrive, request)

    def _preempt_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self._headgate_hooks.guarded(self._headgate_books.evicted, request)

    def _free_request(self: Any, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self._headgate_hooks.freed(request)
        return result

    def _handle_stopped_request(self: Any, request: Request) -> bool:
        tokens = request.num_output_tokens  # a session's are cleared when its next input begins
        finished: bool = super()._handle_stopped_request(request)  # type: ignore[misc]
        if not finished:
            self._headgate_hooks.guarded(self._headgate_books.stopped, request, tokens)
        return finished

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

    def _headgate_slots(self: Any) -> int:
        return int(getattr(self, "max_num_active_reqs", self.max_num_running_reqs))
