"""RAD: one prompt at a time, alone and in whole tiles; decodes in whole tiles while none may start."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import inf

from headgate.core.errors import InputError
from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.core.view import View
from headgate.estimators.averages import WindowMean
from headgate.methods.mixed.mixed import NO_PLACE_LEFT, NONE_WAITS

REMEMBERED = 500  # completions from which the expected output comes


class Rad(BatchPolicy):
    """Prefill prompts one after the other until the decodes fill their tiles, then decode them all.

    A chosen prompt runs alone and to its end; decodes keep their KV meanwhile and get nothing. When a decode
    has left and a request waits, the next prompt runs. After `cycle` prompts none starts until all decodes
    have left. So every step but a prompt's last and the end of a cycle fills whole tiles of the GPU.

    Parameters: docs/policies/published.md. The paper's `slots` are one tile, and so is its `chunk`.

    Source: arXiv 2508.01002, Algorithm 1. We differ: (a) steps of one tile wait for the weights on real GPUs
    and lose a quarter of the throughput, so `chunk` is four tiles; (b) a prompt starts only if
    the KV of all expected outputs fits: the paper assumes KV for a tile of the longest requests;
    (c) `slots` may hold several tiles; (d) a cycle's count starts again whenever no request decodes.
    """

    def __init__(
        self, slots: int, tile: int = 128, chunk: int = 512, cycle: int | None = None, output: float = 256.0
    ) -> None:
        if min(slots, tile) < 1:
            raise InputError(f"rad: slots={slots}, tile={tile}; both must be at least 1")
        if chunk < tile or chunk % tile:
            raise InputError(f"rad: chunk={chunk} is not a multiple of tile={tile}; choose whole tiles")
        self.slots = slots // tile * tile or slots
        if cycle is not None and cycle < self.slots:
            raise InputError(f"rad: cycle={cycle} is below the {self.slots} slots; raise it or drop it")
        if not output > 0:
            raise InputError(f"rad: output={output} tokens; it must be above 0")
        self.chunk = chunk
        self.cycle = inf if cycle is None else cycle
        self._started = 0  # prompts completed in this cycle
        self._outputs = WindowMean(REMEMBERED)
        self._expected = output
        self._kept: dict[int, int] = {}  # tokens that each request with a slot is expected to have in the end
        self._all_kept = 0

    def admitted(self, request: Request, now: float) -> None:
        self._forget(request)
        self._kept[request.id] = whole = self._whole(request)
        self._all_kept += whole

    def prefilled(self, request: Request, now: float) -> None:
        self._started += 1

    def evicted(self, request: Request, now: float) -> None:
        self._forget(request)

    def finished(self, request: Request, now: float, how: End) -> None:
        self._forget(request)
        if how in (End.STOPPED, End.LIMIT):
            self._outputs.update(request.generated)
            self._expected = self._outputs.value or self._expected

    def gauges(self) -> Mapping[str, float]:
        return {"started": self._started, "output": self._expected}

    def plan(self, view: View) -> Plan:
        if view.prefilling:
            return self._alone(next(iter(view.prefilling)))
        if not view.decoding:
            self._started = 0
        slots, decodes = min(self.slots, view.limits.running), len(view.decoding)
        if self._started >= self.cycle:
            return Plan(ALL, until=Until(finishes=decodes))
        if decodes >= slots:
            return Plan(ALL, until=Until(finishes=decodes - slots + 1))
        if not view.waiting:
            return NONE_WAITS
        if decodes and not self.fits(view):
            return NO_PLACE_LEFT
        return self._alone(next(iter(view.waiting)))

    def _alone(self, id: int) -> Plan:
        return Plan(NONE, (id,), chunk=self.chunk, until=Until(prefills=1))

    def fits(self, view: View) -> bool:
        """Is there KV for the next prompt now, and for all with the output they are expected to have?"""
        block = view.limits.block
        head = next(iter(view.waiting.values()))
        if -(-head.room // block) * block > view.kv_free:
            return False
        each = block // 2  # of the last block of a request, on average, is empty
        requests = len(self._kept) + 1
        return self._all_kept + self._whole(head) + requests * each <= view.kv_total

    def _whole(self, request: Request) -> int:
        expected = round(self._expected) if request.guess is None else request.guess
        return request.prompt + max(min(expected, request.limit), request.generated)

    def _forget(self, request: Request) -> None:
        self._all_kept -= self._kept.pop(request.id, 0)


class TwoPhaseRad(Rad):
    """Prefill up to `cycle` prompts one after the other; then decode them, so many at a time, to the end.

    While prompts run no request decodes, and no prompt interrupts decodes: tokens come at the pace of
    decode steps. The price is the first one: a request that comes in a decode phase waits for its end.

    Parameters:
        slots, tile, chunk, output: as in `rad`; `slots` bounds the decodes at once.
        cycle: prompts of a prefill phase; they all hold KV. None: as many as fit.
        hold_first_token: leave the last token of every prompt to the step in which its request begins to
            decode, so that its first token comes with the others. False: it comes when the prompt is done,
            and the second one only in the decode phase, after a gap as long as the rest of the prefill phase.

    Source: arXiv 2508.01002, Algorithm 2, which promises the first token for the decode phase against its own
    definition 1. We differ: (a) as `rad` does; (b) the paper would have to make the first token
    and keep it back, we make it later; (c) a prefill phase also ends when the next prompt's KV does not fit.
    """

    def __init__(
        self,
        slots: int,
        tile: int = 128,
        chunk: int = 512,
        cycle: int | None = None,
        output: float = 256.0,
        hold_first_token: bool = True,
    ) -> None:
        super().__init__(slots, tile, chunk, cycle, output)
        self._held_back = 1 if hold_first_token else 0  # tokens of a prompt that wait for the decode phase
        self._decode_phase = False

    def plan(self, view: View) -> Plan:
        half_done = next((r for r in view.prefilling.values() if r.todo > self._held_back), None)
        if half_done:
            return self._piece(half_done)
        if not (view.decoding or view.prefilling):
            self._started, self._decode_phase = 0, False
        running = len(view.decoding) + len(view.prefilling)
        another = view.waiting and running < view.limits.running
        another = another and self._started + len(view.prefilling) < self.cycle
        if not self._decode_phase and another and (not running or self.fits(view)):
            return self._piece(next(iter(view.waiting.values())))
        self._decode_phase = True
        decodes, slots = len(view.decoding), min(self.slots, view.limits.running)
        if decodes > slots:
            return Plan(frozenset(islice(view.decoding, slots)), until=Until(finishes=1))
        entering = tuple(islice(view.prefilling, slots - decodes))
        if entering:
            return Plan(ALL, entering)
        return Plan(ALL, until=Until(finishes=1 if view.prefilling else max(1, decodes)))

    def _piece(self, request: Request) -> Plan:
        return Plan(NONE, (request.id,), chunk=min(self.chunk, max(1, request.todo - self._held_back)))
