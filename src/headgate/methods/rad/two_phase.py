"""RAD in two phases: all prompts first, then decodes, so that tokens come evenly and the first one late."""

from __future__ import annotations

from itertools import islice

from headgate.core.plan import ALL, NONE, Plan, Until
from headgate.core.request import Request
from headgate.core.view import View
from headgate.methods.rad.rad import Rad


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
        """The next piece of a prompt, or the decodes whose turn it is and those that take free seats."""
        half_done = next((r for r in view.prefilling.values() if r.todo > self._held_back), None)
        if half_done:
            return self._piece(half_done)
        if not (view.decoding or view.prefilling):
            self._started, self._decode_phase = 0, False
        if not self._decode_phase and self._another(view):
            return self._piece(next(iter(view.waiting.values())))
        self._decode_phase = True
        return self._decode(view, min(self.seats, view.limits.running))

    def _another(self, view: View) -> bool:
        """Does the prefill phase go on?"""
        running = len(view.decoding) + len(view.prefilling)
        if not view.waiting or self._started + len(view.prefilling) >= self.cycle:
            return False
        return running < view.limits.running and (not running or self.fits(view))

    def _piece(self, request: Request) -> Plan:
        return Plan(NONE, (request.id,), chunk=min(self.chunk, max(1, request.todo - self._held_back)))

    def _decode(self, view: View, seats: int) -> Plan:
        decodes = len(view.decoding)
        if decodes > seats:
            return Plan(frozenset(islice(view.decoding, seats)), until=Until(finishes=1))
        entering = tuple(islice(view.prefilling, seats - decodes))
        if entering:
            return Plan(ALL, entering)
        return Plan(ALL, until=Until(finishes=1 if view.prefilling else max(1, decodes)))
