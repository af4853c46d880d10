"""A virtual engine that is one of many: it can stop short of a span's end, and it hands requests over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from headgate.core.ledger import Entry
from headgate.core.plan import NONE, Decodes
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.kv.prefix import NOTHING, Pieces
from headgate.record.fleet_recorder import EngineRecorder
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import LIMIT, STOPPED, Replica
from headgate.sim.fleet.handover import Handover

AT_ONCE: Final = -inf
CUT_TO: Final = 1  # new output tokens of a request that is sent for its prompt alone


class FleetReplica(Replica):
    """What a fleet needs of an engine beyond what a simulator of one needs.

    A span of decode steps is not run when it begins, because somebody may be sent here before it ends:
    `span_due` says by when it must run, and `run_span` runs as much as is sure by then.
    """

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        lengths: Sequence[int],
        recorder: EngineRecorder,
        leases: bool,
        on_end: Callable[[Entry, End], None],
        on_part: Callable[[Entry], None],
        contents: Sequence[Pieces] | None = None,
    ) -> None:
        self.done: list[Entry] = []  # prompts that the step under way completes
        self._passing: dict[int, tuple[int, int | None]] = {}  # sent for their prompt: true limit and guess
        self._brief: set[int] = set()  # of those, the ones whose first token is their last
        self._parked: dict[int, int] = {}  # request to the KV blocks kept for it until they are copied
        self._span = 0, 0, 0  # decodes, their context and steps of the span that was put off
        self._recorder, self._on_end, self._on_part = recorder, on_end, on_part
        super().__init__(engine, policy, lengths, (recorder,), leases, contents=contents)

    def cached(self, request: Request) -> int:
        """Tokens of its prompt that are here now."""
        if self.cache is None:
            return 0
        return self.cache.find(self._contents[request.id], request.prompt).blocks * self.blocks.size

    # -- parts of `advance` ---------------------------------------------------------------------------

    def start_prompts(self) -> bool:
        """Run a step with prompts if there is one to run."""
        ran = bool(self._prompts) and self._prompt_step()
        if ran:
            self.asked_now = False
        return ran

    def span_due(self) -> float | None:
        """By when the coming span must run: after that nothing can shorten it. None: nothing to decode."""
        ledger, lease, blocks = self.ledger, self.lease, self.blocks
        if lease.ended or self.plan.decode is NONE or not ledger.rolling:
            return None
        tick, count = ledger.tick, ledger.rolling
        if blocks.growers[tick % blocks.size] > blocks.free:
            return AT_ONCE
        steps = self._next_end() - tick
        if lease.steps < steps:
            steps = int(lease.steps)
        if count * (steps // blocks.size + 1) > blocks.free:
            steps = blocks.affordable(tick, steps, count)
        if steps <= 1:
            return AT_ONCE
        context = ledger.context + count
        self._span = count, context, steps
        due = self._pace.nearly_done(count, context, steps, self.now)
        return due if due < lease.time else lease.time

    def run_now(self) -> bool:
        """Run a span that cannot be put off; False: there is no memory for it."""
        ran = self._decode_span(inf)
        if ran:
            self.asked_now = False
        return ran

    def run_span(self, wake: float) -> None:
        """Run the span that was put off, no further than the first step that ends at `wake` or later."""
        count, context, steps = self._span  # nothing has changed here since `span_due`
        now = self.now
        stop = wake if wake < self.lease.time else self.lease.time
        self._run_decodes(now, count, context, steps, stop)
        self.asked_now = False

    # -- requests sent for their prompt alone -----------------------------------------------------------

    def send_for_prompt(self, entry: Entry) -> None:
        """It will leave with its next token, if there is another one; the policy cannot tell beforehand.

        The next token is the first one, unless an engine failed that had made some.
        """
        cut = entry.generated + CUT_TO
        if self._whole(entry) <= cut:
            self._brief.add(entry.id)
        self._passing[entry.id] = entry.limit, entry.guess
        entry.limit = cut
        entry.guess = None if entry.guess is None else cut

    def _complete(self, entry: Entry) -> None:
        super()._complete(entry)
        self.done.append(entry)

    def passes(self, entry: Entry) -> bool:
        """Is it here for its prompt alone?"""
        return entry.id in self._passing

    def _tell_finished(self, entry: Entry, now: float, how: End) -> None:
        passing = self._passing.pop(entry.id, None) if self._passing else None
        if passing is None or entry.id in self._brief or not (how is STOPPED or how is LIMIT):
            if passing is not None:
                entry.limit, entry.guess = passing
            self._brief.discard(entry.id)
            for hook in self.hear.finished:
                hook(entry, now, how)
            self._on_end(entry, how)
            return
        self._recorder.parted(entry)
        self.policy.finished(entry, now, LIMIT)
        entry.limit, entry.guess = passing
        need = self.blocks.of(entry.prompt + entry.generated - 1)
        self._keep(entry, need)  # settling has just given them back
        self._parked[entry.id] = need
        self._on_part(entry)

    def release(self, id: int) -> None:
        """Its KV has been copied, or nobody wants it any more."""
        need = self._parked.pop(id)
        if self.cache is None:
            self.blocks.give(need)
        else:
            self.cache.release(id, 0, need)
        self.lease.ended = True

    def _keep(self, entry: Entry, need: int) -> None:
        """Hold the blocks of its prompt on, found where they were just released."""
        cache = self.cache
        if cache is None:
            self.blocks.take(need)
            return
        pieces = self._contents[entry.id]
        found = cache.find(pieces, entry.prompt + entry.generated)
        cache.hold(entry, pieces, found)
        cache.take(need - found.blocks)

    def lose(self, entry: Entry) -> None:
        """The engine has failed: what it had of the request is gone, and the request goes elsewhere."""
        if self.ledger.find(entry.id) is not None:
            if entry.id not in self.ledger.waiting:
                self.evict(entry)
            self.ledger.leave(entry)
        passing = self._passing.pop(entry.id, None)
        if passing is not None:
            entry.limit, entry.guess = passing
        self._brief.discard(entry.id)
        if self.cache is not None:
            self._siblings.drop(entry.id)
            self.cache.forget()
        self.lease.ended = True

    # -- requests that come with their KV ----------------------------------------------------------------

    def reserve(self, handover: Handover) -> bool:
        """Take the KV it will need, if it is there beside what decodes and prompts of the plan count on.

        A block for every decode, whether it is due now or not: then the answer does not change within a span.
        """
        need = self.blocks.of(handover.tokens)
        spare = self.blocks.free - self.ledger.rolling
        for prompt in self._prompts:
            spare -= self._still_needs(prompt)
        if need > spare:
            return False
        self.blocks.take(need)
        handover.reserved = need
        self.lease.ended = True
        return True

    def _still_needs(self, prompt: Entry) -> int:
        """Blocks that a prompt of the plan has yet to take."""
        if prompt.id in self.ledger.waiting:
            return self.blocks.of(prompt.room)
        if prompt.id not in self.ledger.prefilling:
            return 0
        known = prompt.prompt + prompt.generated
        return self.blocks.of(known) - self.blocks.of(known - prompt.todo)

    def unpark(self, handover: Handover) -> None:
        """It stays where its prompt was: what was kept for it is its own again."""
        handover.reserved = self._parked.pop(handover.entry.id)

    def give_up_reserved(self, handover: Handover) -> None:
        """Nobody comes to use it."""
        if self.cache is not None and self.cache.holds(handover.entry.id):
            self.cache.release(handover.entry.id, 0, handover.reserved)  # it never left this engine
        else:
            self.blocks.give(handover.reserved)
        self.lease.ended = True

    def join(self, entry: Entry) -> bool:
        """One whose KV is here decodes from now on; False: there is no seat."""
        ledger = self.ledger
        promised = 0  # seats the plan counts on
        for prompt in self._prompts:
            if prompt.id in ledger.waiting:
                promised += 1
        if len(ledger.decoding) + len(ledger.prefilling) + promised >= ledger.limits.running:
            return False
        rolls = isinstance(self.plan.decode, Decodes)
        ledger.take_in(entry, rolls)
        entry.cached = entry.prompt
        if self.cache is not None and not self.cache.holds(entry.id):
            self.cache.hold(entry, self._contents[entry.id], NOTHING)
            self.cache.learn(entry.id, entry.held_kv)  # KV from elsewhere can be found here
        if rolls:
            self.blocks.roll(entry.held_kv, ledger.tick)
            self._ends_in(entry, self._whole(entry) - entry.generated)
        self.lease.ended = True
        self._recorder.joined(entry, self.now, rolls)
        policy, now = self.policy, self.now
        policy.arrived(entry, now)
        policy.admitted(entry, now)
        policy.prefilled(entry, now)
        if not rolls:
            self.policy.held(entry, self.now)
        return True

    def take_back(self, entry: Entry) -> None:
        """One whose KV could not come: all its tokens are prefilled again here."""
        self.ledger.take_back(entry)
        if self.cache is not None:
            self._look(entry)
        self.lease.ended = True
        self._recorder.came_without(entry)
        self.policy.arrived(entry, self.now)
