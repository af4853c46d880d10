"""What a replica in Ray Serve tells the gate of its deployment: its seats, and whose prompt is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.context import _get_serve_request_context

from headgate.live.route.ray import NAMESPACE, SEATS, gate_name

Item = TypeVar("Item")
GATHER = 0.005  # seconds in which first tokens are gathered for one call
FOUND = 5.0  # seconds for which a gate actor that was found is used


class Reports:
    """Mixin for the class of a deployment with HeadgateRouter.

    Set `seats` to what the engine takes at once, and pass every answer through `reported`: policies that
    keep prompts and decodes apart (gate-and-route, density-first with `prompts_at_once`) need to know when
    a prompt is done.
    """

    seats: int = 0  # 0: as many as Ray's max_ongoing_requests
    _done: list[str]
    _gate: Any = None
    _found_until = 0.0

    def record_routing_stats(self) -> dict[str, Any]:
        """Ray asks for it every `request_routing_stats_period_s` and shows it to all routers."""
        return {SEATS: self.seats} if self.seats else {}

    async def reported(self, stream: AsyncIterator[Item]) -> AsyncIterator[Item]:
        """The same stream; the gate hears of its first item."""
        told = False
        async for item in stream:
            if not told:
                told = True
                self._first_token(_get_serve_request_context()._internal_request_id)
            yield item

    def _first_token(self, request: str) -> None:
        if not getattr(self, "_done", None):
            self._done = []
            asyncio.get_running_loop().call_later(GATHER, self._tell)
        self._done.append(request)

    def _tell(self) -> None:
        done, self._done = self._done, []
        asyncio.get_running_loop().run_in_executor(None, self._send, done)  # Ray's look-up may block

    def _send(self, done: list[str]) -> None:
        if time.monotonic() > self._found_until:
            context = serve.get_replica_context()
            try:
                self._gate = ray.get_actor(gate_name(context.app_name, context.deployment), NAMESPACE)
            except ValueError:  # no shared gate just now: the gates of the routers do without
                return
            self._found_until = time.monotonic() + FOUND
        self._gate.first_tokens.remote(done)
