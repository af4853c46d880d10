"""Look-ahead: mixed batching that admits a prompt only if no request will run out of memory later."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.estimators.averages import WindowMean
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.orders import share

REMEMBERED = 500  # completions from which the expected output comes


class LookAhead(Mixed):
    """Run every decode; admit prompts in order while the KV of all requests, grown to its end, fits.

    Of each request the output is predicted. Going through the steps at which requests are expected to end,
    the KV of requests that are then still here is added up; the first in the queue enters if the sum stays
    below the memory at all of them. So no request is evicted if predictions hold. Requests that start
    together also grow together, and the memory for their common end stays empty until then: that is
    what WAIT's staggered cohorts avoid.

    Parameters: docs/policies/published.md. The `watermark` is for predictions that are too short. `output` is
    that of a request without a prediction, until outputs have been seen; then their mean, never above its own
    limit.

    Source: the baseline "look-ahead" that WAIT is compared with: first come, first served, lengths known.
    """

    name = "look-ahead"

    def __init__(self, slots: int, budget: int, watermark: float = 0.0, output: float = 256.0) -> None:
        super().__init__(slots, budget)
        if not output >= 1:
            raise InputError(f"{self.name}: output={output} tokens; expect at least 1")
        self.watermark = share(self.name, "watermark", watermark)
        self._expected = output
        self._outputs = WindowMean(REMEMBERED)

    def finished(self, request: Request, now: float, how: End) -> None:
        if how in (End.STOPPED, End.LIMIT):
            self._outputs.update(request.generated)
            self._expected = self._outputs.value or self._expected

    def gauges(self) -> Mapping[str, float]:
        return {"output": self._expected}

    def plan(self, view: View) -> Plan:
        halves, tokens = view.prefilling, len(view.decoding) * view.limits.decode_width
        slots = min(self.slots, view.limits.running) - len(view.decoding) - len(halves)
        if not view.waiting or slots <= 0 or tokens >= self.budget:  # no request can enter, as there
            return super().plan(view)
        entering, blocked = self._entering(view, slots, min(self.budget, view.limits.batch_tokens) - tokens)
        if not entering and not halves:
            return Plan(ALL, until=blocked)
        return Plan(ALL, (*halves, *entering), self.budget)

    def _entering(self, view: View, slots: int, room: int) -> tuple[list[int], Until]:
        """Prompts run one behind the other, so the later ones have their first token some steps later.

        Each that is done turns into a decode and takes its token from the room of the next step.
        """
        memory = (1 - self.watermark) * view.kv_total
        stays = [self._stay(request, view) for request in view.decoding.values()]
        entering: list[int] = []
        tokens, later = 0, room
        for request in chain(view.prefilling.values(), view.waiting.values()):
            new = request.id in view.waiting
            if new and (len(entering) == slots or tokens >= room):
                break
            tokens += request.todo
            late = -(-max(0, tokens - room) // max(1, later))
            later -= view.limits.decode_width
            stays.append(self._stay(request, view, late))
            blocked = _blocked(stays, memory) if new else 0
            if blocked and len(stays) > 1:  # an empty engine takes any
                wait = max(1, int(blocked / view.limits.tokens_per_step))  # stays are in tokens
                return entering, Until(steps=wait, finishes=1)
            if new:
                entering.append(request.id)
        return entering, Until(finishes=1)

    def _stay(self, request: Request, view: View, late: int = 0) -> tuple[int, int]:
        """For how many steps it brings tokens, and the KV it holds now, in whole blocks."""
        output = min(request.limit, round(self._expected) if request.guess is None else request.guess)
        known = request.prompt + request.generated
        return max(1, output - request.generated) + late, known + view.limits.block - 2


def _blocked(stays: list[tuple[int, int]], memory: float) -> int:
    """For how many steps, at least, they would not all fit; 0 where they do.

    A request that enters a step later is a token shorter then, so an excess lasts as long as it is large,
    or until the moment itself has passed.
    """
    steps, held = np.array(stays, np.int64).T
    order = np.argsort(-steps, kind="stable")  # the longest stay first: the others are gone by then
    ends = steps[order]
    excess = np.cumsum(held[order]) + np.arange(1, len(ends) + 1) * ends - memory
    return int(np.max(np.where(excess > 0, np.minimum(np.ceil(excess), ends), 0)))
