"""Look-ahead: mixed batching that admits a prompt only if no request will run out of memory later."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from headgate.core.errors import InputError
from headgate.core.plan import ALL, Plan, Until
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.estimators.averages import WindowMean
from headgate.methods.mixed.mixed import Mixed
from headgate.methods.orders import share

REMEMBERED = 500  # completions from which the expected output comes

Counts = NDArray[np.int64]


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
        memory = (1 - self.watermark) * view.kv_total
        steps, held = self._stays(view.decoding.values(), view)
        line = _Line(room, view.limits.decode_width)
        for half in view.prefilling.values():
            steps, held = self._joined(steps, held, half, line, view)
        entering: list[int] = []
        for request in view.waiting.values():
            if len(entering) == slots or line.full:
                break
            steps, held = self._joined(steps, held, request, line, view)
            blocked = _blocked(steps, held, memory)
            if blocked and len(steps) > 1:  # an empty engine takes any
                wait = max(1, int(blocked / view.limits.tokens_per_step))  # stays are in tokens
                return entering, Until(steps=wait, finishes=1)
            entering.append(request.id)
        return entering, Until(finishes=1)

    def _joined(
        self, steps: Counts, held: Counts, request: Request, line: _Line, view: View
    ) -> tuple[Counts, Counts]:
        its_steps, its_held = self._stays([request], view)
        return np.append(steps, its_steps + line.delay(request.todo)), np.append(held, its_held)

    def _stays(self, requests: Collection[Request], view: View) -> tuple[Counts, Counts]:
        """For how many steps each brings tokens, and the KV it holds now, in whole blocks."""
        unknown = round(self._expected)
        rows = [
            (r.prompt + r.generated, r.generated, min(r.limit, unknown if r.guess is None else r.guess))
            for r in requests
        ]
        known, generated, output = np.array(rows, np.int64).reshape(-1, 3).T
        return np.maximum(1, output - generated), known + view.limits.block - 2


class _Line:
    """Prompts one behind the other: how many steps later than at once each has its first token, at most.

    Each that is done turns into a decode and takes its token from the room of the next step.
    """

    def __init__(self, room: int, width: int) -> None:
        self._room, self._later, self._width = room, room, width
        self._tokens = 0

    @property
    def full(self) -> bool:
        return self._tokens >= self._room

    def delay(self, todo: int) -> int:
        self._tokens += todo
        late = -(-max(0, self._tokens - self._room) // max(1, self._later))
        self._later -= self._width
        return late


def _blocked(steps: Counts, held: Counts, memory: float) -> int:
    """For how many steps, at least, they would not all fit; 0 where they do.

    A request that enters a step later is a token shorter then, so an excess lasts as long as it is large,
    or until the moment itself has passed.
    """
    order = np.argsort(-steps, kind="stable")  # the longest stay first: the others are gone by then
    ends = steps[order]
    excess = np.cumsum(held[order]) + np.arange(1, len(ends) + 1) * ends - memory
    return int(np.max(np.where(excess > 0, np.minimum(np.ceil(excess), ends), 0)))
