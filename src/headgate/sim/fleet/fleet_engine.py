"""One engine of a fleet: what was sent to it and when it must be looked at next (FleetEngine), its virtual
engine, which can stop short of a span's end (FleetReplica), and requests on their way to it (Handover).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from headgate.core.errors import RunError
from headgate.core.ledger import Entry, Watchdog
from headgate.core.plan import NONE, Decodes
from headgate.core.policy import BatchPolicy, End
from headgate.core.request import Request
from headgate.kv.prefix import NOTHING, Pieces
from headgate.record.recorder import EngineRecorder
from headgate.sim.engine.bursts import Bursts
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import LIMIT, STOPPED, VirtualEngine

if TYPE_CHECKING:
    from headgate.sim.fleet.kv_handover import KvHandover

IDLE: Final = 0
WAITS: Final = 1
PENDING: Final = 2
RUNNING: Final = 3
READY: Final = 4
AT_ONCE: Final = -inf  # when a span that cannot be put off is due
CUT_TO: Final = 1  # new output tokens of a request that is sent for its prompt alone
Timer = tuple[float, int, bool]  # when the patience of which request ends, and whether by hanging up


class FleetEngine:
    """Works as the simulator of one engine does, but only when it is due or something reaches it.

    Whatever is sent to it waits at the door until the step under way has ended: nothing changes inside an
    engine during a step. A span of decode steps is put off until its last step is nearly done, so a request
    that comes earlier ends it where it would have ended in a simulator of one engine. So does a router that
    looks inside: it sees every token of the steps that have begun.
    """

    __slots__ = (
        "_catch_up", "_porter", "_watchdog", "bound", "due", "freed", "id", "landed",
        "news", "owed", "replica", "sent", "state", "stripped", "timers", "unneeded",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        replica: FleetReplica,
        watchdog: float,
        porter: KvHandover,
        catch_up: Callable[[FleetEngine], None],
    ) -> None:
        self.id, self.replica, self._catch_up = id, replica, catch_up
        self.state = IDLE
        self.due = inf  # when it must be looked at although nothing reaches it
        self.sent: deque[Entry] = deque()  # to its queue
        self.timers: list[Timer] = []  # of requests that were here when they went off
        self.bound: deque[Handover] = deque()  # to decode here; no KV is reserved yet
        self.landed: deque[Handover] = deque()  # their KV is here; they want a slot
        self.stripped: list[Handover] = []  # to decode here, but without KV
        self.freed: list[Handover] = []  # their prompt was here; the KV kept for them may go
        self.unneeded: list[Handover] = []  # KV was reserved for them, and they will not come
        self.owed = 0.0  # seconds it will be busy with sending before its next step
        self.news = False  # about KV that comes or goes
        self._porter = porter
        self._watchdog = Watchdog(watchdog)

    def reached(self, now: float) -> bool:
        """Something has just been put at the door; True if it can begin at once."""
        if self.state == PENDING:
            if self.timers or self.news or len(self.sent) >= self.replica.lease.arrivals:  # it ends the lease
                self.run_until(now)
            return False
        if self.state == RUNNING or self.state == READY:
            return False
        self.replica.lease.ended = True
        self.state, self.due = READY, inf
        return True

    def run_until(self, wake: float) -> None:
        self.replica.run_span(wake)
        self.state, self.due = RUNNING, self.replica.now

    def wake(self) -> None:
        if self.state == WAITS:
            self.replica.lease.ended = True
        self.state, self.due = READY, inf

    def settle(self) -> None:
        replica = self.replica
        if self.sent and self.sent[0].queued <= replica.last_start:
            self._receive(replica.last_start)  # they came before the step that lets others go
        replica.settle()

    def begin(self, now: float) -> None:
        replica = self.replica
        replica.now = max(replica.now, now) + self.owed
        self.owed = 0.0
        if self.sent or self.timers:
            self._receive(replica.now)
        if self.news:
            self._let_in()
        lease = replica.lease
        while True:
            if lease.ended:
                if not replica.occupied:
                    self.state, self.due = IDLE, inf
                    return
                replica.ask()
                if self.news:  # a request waits at the door: one step alone
                    lease.steps = 1.0
            if self._start():
                break
            lease.ended = True
            if replica.asked_now and not self._joined_late():
                self._wait()
                break
        dog = self._watchdog
        if replica.now >= dog.next_look and (starving := dog.look(replica.ledger, replica.now)):
            raise RunError(f"{self.one_line()}: {starving}")

    # -- read by routers

    @property
    def waiting(self) -> int:
        return len(self.replica.ledger.waiting)

    @property
    def kv_free(self) -> int:
        self.catch_up()
        return self.replica.blocks.free * self.replica.blocks.size

    def cached(self, request: Request) -> int:
        self.catch_up()
        return self.replica.cached(request)

    def catch_up(self) -> None:
        if self.state == PENDING:
            self._catch_up(self)

    def _start(self) -> bool:
        """A step with prompts at once, or a span of decodes some time; False: nothing can run."""
        replica = self.replica
        if replica.start_prompts():
            self.state, self.due = RUNNING, replica.now
            return True
        due = replica.span_due()
        if due is None or (due == AT_ONCE and not replica.run_now()):
            return False
        if due == AT_ONCE:
            self.state, self.due = RUNNING, replica.now
        else:
            self.state, self.due = PENDING, due
        return True

    def _wait(self) -> None:
        replica = self.replica
        if replica.waits_forever():
            raise RunError(f"{self.one_line()} runs nothing again and again; {replica.plan}")
        self.state, self.due = WAITS, replica.plan.until.time

    @property
    def lacks_memory(self) -> bool:
        blocks, head = self.replica.blocks, next(iter(self.replica.ledger.waiting.values()), None)
        return bool(self.bound) or (head is not None and blocks.of(head.todo + head.hit) > blocks.free)

    def one_line(self) -> str:
        replica = self.replica
        name = type(replica.policy).__name__
        return f"policy {name} on engine {self.id} at {replica.now:.6f} s: {replica.state()}"

    # -- the door

    def _receive(self, now: float) -> None:
        sent, timers = self.sent, self.timers
        while sent and sent[0].queued <= now:
            self.replica.receive(sent.popleft())
        while timers and timers[0][0] <= now:
            when, id, hangs_up = timers.pop(0)
            self.replica.give_up(id, when, hangs_up)

    def _let_in(self) -> None:
        """KV moves by what the policy wants now, not by what it wanted when its lease began.

        Slots and memory are kept for the prompts of the plan, and a plan of a moment ago may name prompts
        that the policy has given up since. While a request still waits at the door the policy is therefore
        asked at every step: the same as without leases. Only a plan that still holds, where no request has a
        prompt to run, keeps nothing and need not be asked for again.
        """
        replica, ledger = self.replica, self.replica.ledger
        stale = replica.lease.ended or bool(ledger.waiting) or bool(ledger.prefilling)
        if stale and (self.bound or self.landed) and replica.occupied:
            replica.ask()
        self._exchange()
        if self.news:
            replica.lease.ended = True

    def _exchange(self) -> None:
        for handover in self.freed:
            self.replica.unkeep(handover.entry.id)
        for handover in self.unneeded:
            self.replica.release(handover.entry.id, handover.reserved)
        for handover in self.stripped:
            if not handover.dropped:
                self._porter.joined(handover)
                self.replica.take_back(handover.entry)
        self.freed.clear()
        self.unneeded.clear()
        self.stripped.clear()
        while self.bound and (self.bound[0].dropped or self._expect(self.bound[0])):
            self.bound.popleft()
        while self.landed and (self.landed[0].dropped or self._join(self.landed[0])):
            self.landed.popleft()
        self.news = bool(self.bound or self.landed)

    def _joined_late(self) -> bool:
        """Nothing can run. Has an eviction left a slot to a request whose KV is here?"""
        before = len(self.landed)
        if before:
            self._exchange()
        return len(self.landed) < before

    def _expect(self, handover: Handover) -> bool:
        """Its KV comes here, or was here all the time; False: there is no room for it."""
        if handover.sender is self:
            self.replica.unpark(handover)
        elif not self.replica.reserve(handover):
            return False
        elif self._porter.copy(handover, self.replica.now):
            return True
        self.landed.append(handover)
        return True

    def _join(self, handover: Handover) -> bool:
        if not self.replica.join(handover.entry):
            return False
        self._porter.joined(handover)
        return True


class FleetReplica(VirtualEngine):
    """What a fleet needs of an engine beyond what a simulator of one needs.

    A span of decode steps is not run when it begins, because a request may be sent here before it ends:
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
        bursts: Bursts | None = None,
    ) -> None:
        self.done: list[Entry] = []  # prompts that the step under way completes
        self._passing: dict[int, tuple[int, int | None]] = {}  # sent for their prompt: true limit and guess
        self._brief: set[int] = set()  # of those, the ones whose first token is their last
        self._parked: dict[int, int] = {}  # request to the KV blocks kept for it until they are copied
        self._span = 0, 0, 0  # decodes, their context and steps of the span that was put off
        self._recorder, self._on_end, self._on_part = recorder, on_end, on_part
        # Blocks that a decode takes in a step
        self._most_at_once = 1 if bursts is None else bursts.slack // engine.block + 1
        super().__init__(engine, policy, lengths, (recorder,), leases, contents=contents, bursts=bursts)

    def cached(self, request: Request) -> int:
        if self.cache is None:
            return 0
        return self.cache.find(self._contents[request.id], request.prompt).blocks * self.blocks.size

    # -- parts of `advance`

    def start_prompts(self) -> bool:
        self._decodes_instead = False
        ran = bool(self._prompts) and self._prompt_step()
        self.asked_now = self.asked_now and not ran
        return ran

    def span_due(self) -> float | None:
        """By when the coming span must run: after that nothing can shorten it. None: nothing to decode."""
        ledger, lease, blocks = self.ledger, self.lease, self.blocks
        held = self.plan.decode is NONE and not self._decodes_instead
        if lease.ended or held or not ledger.rolling:
            return None
        if blocks.growers[(ledger.tick - blocks.past) % blocks.ring] > blocks.free:
            return AT_ONCE
        count, context = ledger.rolling, ledger.context + ledger.rolling
        steps = self._alike_steps(count)
        if steps <= 1:
            return AT_ONCE
        self._span = count, context, steps
        due = self._pace.nearly_done(count, context, steps, self.now)
        return due if due < lease.time else lease.time

    def run_now(self) -> bool:
        ran = self._decode_span(inf)
        self.asked_now = self.asked_now and not ran
        return ran

    def run_span(self, wake: float) -> None:
        """Run the span that was put off, no further than the first step that ends at `wake` or later."""
        count, context, steps = self._span  # nothing has changed here since `span_due`
        stop = wake if wake < self.lease.time else self.lease.time
        self._run_decodes(self.now, count, context, steps, stop)
        self.asked_now = False

    # -- requests sent for their prompt alone

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
        entry.deliveries = None
        need = self.blocks.of(entry.prompt + entry.generated - 1)
        pieces = () if self.cache is None else self._contents[entry.id]
        self.keep(entry, pieces, entry.prompt + entry.generated, need)  # settling has just given them back
        self._parked[entry.id] = need
        self._on_part(entry)

    def unkeep(self, id: int) -> None:
        self.release(id, self._parked.pop(id))

    def lose(self, entry: Entry) -> None:
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

    # -- requests that come with their KV

    def reserve(self, handover: Handover) -> bool:
        """Take the KV it will need, if it is there beside what decodes and prompts of the plan count on.

        A block for every decode, whether it is due now or not: then the answer does not change within a span.
        """
        need = self.blocks.of(handover.tokens)
        spare = self.blocks.free - self.ledger.rolling * self._most_at_once
        if need > spare - sum(map(self._still_needs, self._prompts)):
            return False
        self.blocks.take(need)
        handover.reserved = need
        self.lease.ended = True
        return True

    def _still_needs(self, prompt: Entry) -> int:
        if prompt.id in self.ledger.waiting:
            return self.blocks.of(prompt.room)
        if prompt.id not in self.ledger.prefilling:
            return 0
        known = prompt.prompt + prompt.generated
        return self.blocks.of(known) - self.blocks.of(known - prompt.todo)

    def unpark(self, handover: Handover) -> None:
        """It stays where its prompt was: what was kept for it is its own again."""
        handover.reserved = self._parked.pop(handover.entry.id)

    def join(self, entry: Entry) -> bool:
        """One whose KV is here decodes from now on; False: there is no slot."""
        ledger = self.ledger
        promised = sum(prompt.id in ledger.waiting for prompt in self._prompts)  # slots the plan counts on
        if len(ledger.decoding) + len(ledger.prefilling) + promised >= ledger.limits.running:
            return False
        rolls = isinstance(self.plan.decode, Decodes)
        ledger.take_in(entry, rolls)
        entry.cached = entry.prompt
        if self.cache is not None and not self.cache.holds(entry.id):
            self.cache.hold(entry, self._contents[entry.id], NOTHING)
            self.cache.learn(entry.id, entry.held_kv)  # KV from elsewhere can be found here
        if self._bursts is not None:
            self._bursts.deliver(entry, self._whole(entry) - entry.generated, self.blocks.size)
        if rolls:
            self._ends_in(entry, self._roll(entry))
        self.lease.ended = True
        self._recorder.joined(entry, self.now, rolls)
        policy, now = self.policy, self.now
        policy.arrived(entry, now)
        policy.admitted(entry, now)
        policy.prefilled(entry, now)
        if not rolls:
            policy.held(entry, now)
        return True

    def take_back(self, entry: Entry) -> None:
        """One whose KV could not come: all its tokens are prefilled again here."""
        self.ledger.take_back(entry)
        if self.cache is not None:
            self._look(entry)
        self.lease.ended = True
        self._recorder.came_without(entry)
        self.policy.arrived(entry, self.now)


class Handover:
    """Prompt done at `sender`, which keeps its KV until the copy is complete.

    Without a receiver it waits for the router; then for KV at the receiver, for the copy, and for a slot.
    """

    __slots__ = ("copying", "dropped", "entry", "freed", "receiver", "reserved", "sender", "stripped")

    def __init__(self, entry: Entry, sender: FleetEngine) -> None:
        self.entry, self.sender = entry, sender
        self.receiver: FleetEngine | None = None
        self.reserved = 0  # blocks taken at the receiver
        self.copying = False
        self.dropped = False  # its client hung up
        self.freed = False  # its sender may drop the KV
        self.stripped = False  # its KV is gone and must be computed again

    @property
    def tokens(self) -> int:
        return self.entry.prompt + self.entry.generated - 1
