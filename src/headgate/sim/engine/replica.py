"""A virtual engine: runs a policy's plans step by step, or many equal steps at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Final

from headgate.core.build import mypyc_attr, quick
from headgate.core.errors import RunError
from headgate.core.ledger import NOT_ROLLING, Entry, Ledger
from headgate.core.listeners import Listeners
from headgate.core.plan import ALL, EACH_STEP, NONE, Decodes, Lease, Plan, check
from headgate.core.policy import BatchPolicy, End, Observer
from headgate.core.view import Limits
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.kv.blocks import Blocks
from headgate.kv.prefix import Pieces, PrefixBlocks
from headgate.kv.siblings import Chain, Siblings
from headgate.sim.engine.bursts import Bursts, spread
from headgate.sim.engine.engine import SHORTEST, Engine
from headgate.sim.engine.steps import StepClock

STOPPED: Final = End.STOPPED
LIMIT: Final = End.LIMIT
MOST_WAITS: Final = 100_000  # plans in a row that run nothing, each for a little time: it will never stop
EVERYTHING: Final = 2**31 - 1  # `lost`: an evicted request starts from nothing
NO_GAUGES: Mapping[str, float] = {}
ADMISSION = attrgetter("admission")


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualEngine:
    """One engine in virtual time. The simulator's loop calls `ask`, `advance` and `settle`, in this order.

    Nothing is done per running request and step: decodes share the ledger's tick, their ends wait in a heap,
    their KV needs are counted by remainder. A request is touched when it joins, leaves or is held: O(1), or
    O(log n) for its end.

    An evicted decode loses its newest `lost` output tokens, which must be brought again. Engines lose none:
    the step that computes the KV again brings the next token. Analyses assume worse. One lost token is that
    step without a token, as in models where a prompt brings none; EVERYTHING is the restart that arguments
    against first come, first served rest on (WAIT's Proposition 4).
    """

    lost = 0
    ahead = False  # a step is composed while the one before it runs

    def __init__(
        self,
        engine: Engine,
        policy: BatchPolicy,
        lengths: Sequence[int],
        observers: Sequence[Observer] = (),
        leases: bool = True,
        on_leave: Callable[[int, float], None] = lambda id, now: None,
        contents: Sequence[Pieces] | None = None,
        bursts: Bursts | None = None,
    ) -> None:
        """`lengths`, `contents` (where they are known) and `bursts` are those of the requests, by number."""
        total = engine.checked().kv_tokens // engine.block
        self.cache: PrefixBlocks | None = None
        if contents is not None and engine.prefix_cache:
            written_before = None if bursts is None else self._steps_since
            self.blocks: Blocks = (cache := PrefixBlocks(total, engine.block, self._written, written_before))
            self.cache, self._contents = cache, contents
            self._siblings = Siblings()
        else:
            self.blocks = Blocks(total, engine.block)
        self._composing = False  # a step with decodes, which write a token each before new prompts enter
        limits = Limits(engine.batch_tokens, engine.running, engine.block, engine.width, engine.burst)
        limits = limits._replace(ahead=self.ahead)
        self.ledger = Ledger(limits, total * engine.block)
        self._bursts = bursts  # None: every step of a decode brings a token
        self._pace = self._clock(engine.cost)
        if bursts is not None:
            self.blocks.follow()
            self.ledger.growth = []
            self._pace.ledger = self.ledger
        self.longest = engine.longest
        self._shortest = engine.retraction == SHORTEST
        self._lengths = lengths  # true output lengths; no policy sees them
        self._ends: list[tuple[int, int, int]] = []  # heap: tick of its last token, rank, request
        self.lease = Lease()
        self.plan = Plan()
        self.now = 0.0
        self.last_start = 0.0  # when the newest step began
        self.asked_now = False  # the plan was made for what the view shows now
        self._idle_since, self._waits = -inf, 0  # how often the policy was asked since then and ran nothing
        self._observers = self._told(observers)
        self._leases = leases
        self._on_leave = on_leave
        self._prompts: list[Entry] = []  # prompts of the plan that are still to run, next one last
        self._decodes_instead = False  # a prompt of the plan found no KV
        self.take_over(policy)

    def _clock(self, cost: StepCost) -> StepClock:
        return StepClock(cost)

    def _told(self, observers: Sequence[Observer]) -> tuple[Observer, ...]:
        return tuple(observers)

    def take_over(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.hear = Listeners((*self._observers, policy))
        self._has_gauges = type(policy).gauges is not BatchPolicy.gauges
        self.lease.ended = True
        if self.occupied:
            self._refresh_view()
            policy.adopt(self.ledger)

    @property
    def occupied(self) -> bool:
        ledger = self.ledger
        return bool(ledger.decoding or ledger.waiting or ledger.prefilling)

    def state(self) -> str:
        ledger = self.ledger
        return (
            f"{len(ledger.waiting)} waiting, {len(ledger.prefilling)} prefilling, "
            f"{len(ledger.decoding)} decoding ({len(ledger.held)} held), "
            f"{self.blocks.free} of {self.blocks.total} KV blocks free"
        )

    def _whole(self, entry: Entry) -> int:
        """Its true output, cut by its own limit and by the engine's."""
        return min(self._lengths[entry.id], entry.limit, self.longest - entry.prompt)

    def _join(self, entry: Entry, now: float, rolling: bool) -> None:
        ledger = self.ledger
        ledger.join(entry, now, rolling)
        generated = entry.generated
        remaining = self._whole(entry) - generated
        if self._bursts is not None:
            self._bursts.deliver(entry, remaining, self.blocks.size)
        if rolling:
            if self._bursts is None:
                self.blocks.roll(entry.prompt + generated - 1, ledger.tick)
            else:
                remaining = self._roll(entry)
        if rolling or not remaining:
            self._ends_in(entry, remaining)

    def _roll(self, entry: Entry) -> int:
        deliveries = entry.deliveries
        if deliveries is None:
            self.blocks.roll(entry.held_kv, self.ledger.tick)
            return self._whole(entry) - entry.generated
        spread(entry, self.ledger, self.blocks, 1)
        return len(deliveries.sums) - 2 - deliveries.at

    def _unroll(self, entry: Entry) -> None:
        """It will not decode with the others any more; call it before the ledger stops it."""
        if entry.deliveries is None:
            self.blocks.roll(entry.held_kv, self.ledger.tick, by=-1)
        else:
            spread(entry, self.ledger, self.blocks, -1)

    def _hold(self, entry: Entry) -> None:
        self._unroll(entry)
        self.ledger.hold(entry)
        entry.end = NOT_ROLLING

    def _ends_in(self, entry: Entry, steps: int) -> None:
        """Its last token comes after so many steps. Those that end together leave by number.

        In a cache the order of leaving is that of later evictions: there they leave by slot, as in vLLM.
        """
        entry.end = self.ledger.tick + steps
        rank = entry.id if self.cache is None else entry.admission
        heappush(self._ends, (entry.end, rank, entry.id))

    def _free(self, entry: Entry, leaves: bool = True) -> None:
        """Give its blocks back; call it before the ledger lets it go."""
        blocks, held = self.blocks, entry.held_kv
        if self.cache is not None:
            if leaves:
                self._siblings.drop(entry.id)
            else:
                self._siblings.withdraw(entry.id)
        number = -(-held // blocks.size)
        if entry.deliveries is not None:
            number = entry.deliveries.blocks[entry.taken]
        if self.cache is None or not self.cache.holds(entry.id):
            blocks.give(number)
        else:
            self.cache.release(entry.id, held - self._unseen(entry), number)
        if entry.rolls:
            self._unroll(entry)
        entry.end = NOT_ROLLING

    def keep(self, entry: Entry, pieces: Pieces, known: int, need: int) -> None:
        """So many blocks of one that has left stay, for another engine: those of its first `known` tokens."""
        if self.cache is None:
            self.blocks.take(need)
        else:
            found = self.cache.find(pieces, known)
            self.cache.hold(entry, pieces, found)
            self.cache.take(need - found.blocks)

    def release(self, id: int, need: int) -> None:
        """Blocks that were kept, or taken for KV that comes from another engine, are free again."""
        if self.cache is not None and self.cache.holds(id):
            self.cache.release(id, 0, need)
        else:
            self.blocks.give(need)
        self.lease.ended = True

    def _drop(self, entry: Entry) -> None:
        lost = min(self.lost, entry.generated) if self.lost and entry.id in self.ledger.decoding else 0
        self._free(entry, leaves=False)
        self.ledger.evict(entry)
        if lost:
            self.ledger.recount(entry, entry.generated - lost)
            entry.todo -= lost
        if entry.deliveries is not None:
            entry.drawn += entry.deliveries.at
            entry.deliveries = None
        if self._shortest:
            self.ledger.waiting.move_to_end(entry.id)
        if self.cache is not None:
            self._look(entry)

    # -- the prefix cache

    def _expect(self, entry: Entry) -> None:
        assert self.cache is not None
        chain = Chain(self._contents[entry.id], entry.prompt, self.blocks.size)
        shared = self._siblings.add(entry.id, chain.name, chain.blocks) * self.blocks.size
        found = self.cache.find(self._contents[entry.id], entry.todo + entry.hit)
        entry.expect(found.blocks * self.blocks.size, found.loose * self.blocks.size, shared, arrives=True)

    def _look(self, entry: Entry) -> None:
        assert self.cache is not None
        shared = self._siblings.held(entry.id) * self.blocks.size
        found = self.cache.find(self._contents[entry.id], entry.todo + entry.hit)
        entry.expect(found.blocks * self.blocks.size, found.loose * self.blocks.size, shared)

    def _claim(self, entry: Entry) -> bool:
        """A waiting request holds what the cache has of it; False: the rest of it does not fit."""
        cache, pieces = self.cache, self._contents[entry.id]
        assert cache is not None
        known = entry.todo + entry.hit
        found = cache.find(pieces, known)
        if cache.of(known) - found.blocks + found.loose > cache.free:
            return False
        cache.hold(entry, pieces, found)
        self._siblings.admit(entry.id)
        hit = found.blocks * cache.size
        entry.todo, entry.hit, entry.loose = known - hit, 0, 0
        if entry.evictions:
            entry.wasted = max(0, entry.wasted - hit)  # found again: nothing was lost
        else:
            entry.cached = entry.prompt + entry.generated - entry.todo
        return True

    def _unseen(self, entry: Entry) -> int:
        """Tokens whose KV is there or on its way, and which have not been seen."""
        return 0

    def _written(self, entry: Entry) -> int:
        """Tokens of a running request that can be found."""
        return entry.held_kv - self._unseen(entry) + (self._composing and entry.rolls)

    def _steps_since(self, entry: Entry, tokens: int) -> int:
        """How many steps ago so many of its tokens could be found for the first time, below zero."""
        deliveries, now = entry.deliveries, self._written(entry)
        if deliveries is None:
            return tokens - now
        sums, taken = deliveries.sums, entry.taken
        first = entry.prompt + entry.generated - 1 - sums[taken]  # KV tokens before its first step
        step = taken
        while step and first + sums[step - 1] >= tokens:
            step -= 1
        composed = self._composing and entry.rolls
        return step - taken - composed if first + sums[taken] >= tokens else 0

    def _next_end(self) -> int:
        """The tick at which the next last token comes; at least one decode must roll."""
        ends, decoding = self._ends, self.ledger.decoding
        while True:
            end, _, id = ends[0]
            entry = decoding.get(id)
            if entry is not None and entry.end == end:
                return end
            heappop(ends)

    def _victim(self) -> Entry:
        """Whose KV is dropped where some is short: see `Engine.retraction`. Of equals the last one goes."""
        rolling = [entry for entry in self.ledger.decoding.values() if entry.rolls]
        if not self._shortest or not rolling:
            return self._newest()
        return min(reversed(rolling), key=lambda entry: (entry.generated, -entry.prompt))

    def _newest(self) -> Entry:
        running = (*self.ledger.prefilling.values(), *self.ledger.decoding.values())
        return max(running, key=ADMISSION)

    # -- comings and goings

    def receive(self, entry: Entry) -> bool:
        """A request joins the queue; False if it can never fit and is refused."""
        if self.cache is not None:
            self._expect(entry)
        for hook in self.hear.arrived:
            hook(entry, entry.queued)
        self.lease.arrival()
        if entry.prompt >= self.longest:
            self.lease.finish()
            if self.cache is not None:
                self._siblings.drop(entry.id)
            self._tell_finished(entry, entry.queued, End.REFUSED)
            return False
        self.ledger.arrive(entry)
        return True

    def leave(self, entry: Entry, now: float, how: End) -> None:
        """A request leaves before its end: aborted (felt at the end of the step), or out of patience."""
        self._free(entry)
        self.ledger.leave(entry)
        self.lease.ended = True
        self._tell_finished(entry, now, how)

    def give_up(self, id: int, when: float, hangs_up: bool) -> None:
        """Its patience has ended: it leaves the queue if it never had a slot; an abort ends it anywhere."""
        entry = self.ledger.find(id)
        if entry is None:
            return
        if id in self.ledger.waiting and entry.evictions == 0 and not entry.generated:
            self.leave(entry, when, End.ABORTED if hangs_up else End.ABANDONED)
        elif hangs_up:
            self.leave(entry, self.now, End.ABORTED)

    def evict(self, entry: Entry) -> None:
        """Drop its KV; it goes back to the front of the queue. Ends the lease with the next step."""
        self._drop(entry)
        self.lease.steps = min(self.lease.steps, 1)
        self.asked_now = False
        for hook in self.hear.evicted:
            hook(entry, self.now)

    # -- the three calls of the loop

    def ask(self) -> None:
        self._refresh_view()
        ledger = self.ledger
        if self.cache is not None and ledger.waiting:
            self._look(next(iter(ledger.waiting.values())))  # the next in turn sees what is there now
        plan = self.policy.plan(ledger)
        faults = check(plan, ledger) if isinstance(plan, Plan) else [f"{plan!r} is not a Plan"]
        if faults:
            raise RunError(
                f"policy {type(self.policy).__name__} returned an invalid plan at {self.now:.6f} s: "
                f"{'; '.join(faults)}; {self.state()}; {plan}"
            )
        self.plan = plan
        self.asked_now = True
        for id in plan.reject:
            self.leave(ledger.known(id), self.now, End.REFUSED)
        # A step may bring blocks into the cache with which the next in the queue needs less: look at each.
        lasts = self._leases and (self.cache is None or not ledger.waiting)
        self.lease.begin(plan.until if lasts else EACH_STEP)
        for id in plan.evict:
            self.evict(ledger.known(id))
        if plan.decode is not ALL or ledger.held:
            self._choose_decodes()
        self._prompts = [ledger.known(id) for id in reversed(plan.prefill)]
        if plan.reject and not self.occupied:
            self.asked_now = False  # no request is left to run
        gauges = self.policy.gauges() if self._has_gauges else NO_GAUGES
        for hook in self.hear.planned:
            hook(plan, self.now, gauges)

    def advance(self, wake: float = inf) -> bool:
        """Run a step with prompts, or a span of decode steps up to about `wake`. False: nothing could run."""
        self._decodes_instead = False
        ran = bool(self._prompts) and self._prompt_step()
        held = self.plan.decode is NONE and not self._decodes_instead
        if not (ran or self.lease.ended or held) and self.ledger.rolling:
            ran = self._decode_span(wake)
        if ran:
            self.asked_now = False
        else:
            self.lease.ended = True
        return ran

    def settle(self) -> None:
        ends, ledger = self._ends, self.ledger
        while ends and ends[0][0] <= ledger.tick:
            end, _, id = heappop(ends)
            entry = ledger.decoding.get(id)
            if entry is None or entry.end != end:
                continue
            self._free(entry)
            ledger.leave(entry)
            self.lease.finish()
            whole = entry.generated >= self._lengths[entry.id]
            self._tell_finished(entry, self.now, STOPPED if whole else LIMIT)
            if not self.occupied:
                self.lease.ended = True

    def waits_forever(self) -> bool:
        if self.last_start != self._idle_since:
            self._idle_since, self._waits = self.last_start, 0
        self._waits += self.asked_now
        return self._waits > MOST_WAITS

    # -- steps

    def _prompt_step(self) -> bool:
        ledger, blocks = self.ledger, self.blocks
        decodes = 0 if self.plan.decode is NONE else ledger.rolling
        due = blocks.due(ledger.tick) if decodes else 0
        if due > blocks.free:
            return False  # decodes come first; without room for them no prompt enters
        if due:
            blocks.take(due)  # and what they take, no prompt finds
        self._composing = decodes > 0
        chosen = self._chunks(decodes)
        self._composing = False
        if due:
            blocks.give(due)
        if not chosen:
            return False
        prefill = behind = 0
        for _, tokens, done in chosen:
            prefill += tokens
            behind += done
        context = ledger.context + decodes if decodes else 0
        start = self.now
        parts: tuple[Chunk, ...] = ()
        if self._pace.by_chunk:
            parts = tuple([quick(Chunk, (done, new, new == one.todo)) for one, new, done in chosen])
        end = self._pace.prompts_end(start, quick(Shape, (decodes, context, prefill, behind, parts)))
        self._ran_prompts(start, end, decodes, context, prefill, behind)
        for entry, tokens, _ in chosen:
            entry.todo -= tokens
            if not entry.todo:
                self._complete(entry)
        return True

    def _decode_span(self, wake: float) -> bool:
        ledger, lease, blocks = self.ledger, self.lease, self.blocks
        if blocks.growers[(ledger.tick - blocks.past) % blocks.ring] > blocks.free and not self._make_room():
            return False
        count = ledger.rolling
        stop = wake if wake < lease.time else lease.time
        self._run_decodes(self.now, count, ledger.context + count, self._alike_steps(count), stop)
        return True

    def _alike_steps(self, count: int) -> int:
        blocks, tick, lease = self.blocks, self.ledger.tick, self.lease
        steps = self._next_end() - tick
        if lease.steps < steps:
            steps = int(lease.steps)
        tokens = steps
        if self._bursts is not None:
            tokens = steps * self._bursts.width + self._bursts.slack
        if count * (tokens // blocks.size + 1) > blocks.free:
            steps = blocks.affordable(tick, steps, count)
        return steps

    def _run_decodes(self, start: float, decodes: int, context: int, most: int, stop: float) -> None:
        if self.hear.each_end:
            ends = self._pace.decode_ends(decodes, context, most, start, stop)
            last = ends[-1]
            self._moved(len(ends), ends[-2] if len(ends) > 1 else start, last, decodes)
            self.hear.ran(start, ends, decodes, context, 0, 0, self._kv_held())
            return
        count, first, before, last = self._pace.decode_span(decodes, context, most, start, stop)
        self._moved(count, before, last, decodes)
        kv = self._kv_held()
        for counter in self.hear.counting:
            counter.ran(start, first, last, count, decodes, context, 0, 0, kv)

    def _ran_prompts(
        self, start: float, end: float, decodes: int, context: int, prefill: int, behind: int
    ) -> None:
        self._moved(1, start, end, decodes)
        kv = self._kv_held()
        if self.hear.each_end:
            self.hear.ran(start, [end], decodes, context, prefill, behind, kv)
            return
        for counter in self.hear.counting:
            counter.ran(start, end, end, 1, decodes, context, prefill, behind, kv)

    def _moved(self, count: int, last_start: float, end: float, decodes: int) -> None:
        if decodes:
            self.blocks.grow(self.ledger.tick, count, decodes)
            self.ledger.ticks(count, end)
        self.last_start = last_start
        self.now = end
        self.lease.ran(count, end)

    def _kv_held(self) -> int:
        blocks = self.blocks
        return (blocks.total - blocks.free) * blocks.size

    def _chunks(self, decodes: int) -> list[tuple[Entry, int, int]]:
        """Which prompts run in this step, for how many tokens, behind how many; admits those that are new."""
        ledger, blocks, prompts, size = self.ledger, self.blocks, self._prompts, self.blocks.size
        room = self._budget() - decodes * ledger.limits.decode_width
        if self.plan.chunk < room:
            room = int(self.plan.chunk)
        chosen: list[tuple[Entry, int, int]] = []
        while prompts and room > 0:
            entry = prompts[-1]
            if entry.id in ledger.waiting:
                if not self._admit(entry):
                    break
            elif entry.id not in ledger.prefilling:  # it left meanwhile
                prompts.pop()
                continue
            todo = entry.todo
            tokens = todo if todo < room else room
            done = entry.prompt + entry.generated - todo
            need = -(-(done + tokens) // size) - -(-done // size)
            if need > blocks.free:
                need = blocks.free
                room = tokens = (-(-done // size) + need) * size - done
                if not self._shortest or not tokens:  # SGLang runs the piece that has room, and no other
                    self._starved_prompt(chosen)
                    break
            blocks.take(need)
            if self.cache is not None:
                self.cache.learn(entry.id, done + tokens)
            room -= tokens
            chosen.append((entry, tokens, done))
            if tokens == todo:
                prompts.pop()
        return chosen

    def _budget(self) -> int:
        most = self.ledger.limits.batch_tokens
        return most if self.plan.budget >= most else int(self.plan.budget)

    def _admit(self, entry: Entry) -> bool:
        ledger = self.ledger
        if len(ledger.decoding) + len(ledger.prefilling) >= ledger.limits.running:
            return False
        if self.cache is None:
            if self.blocks.of(entry.todo + entry.hit) > self.blocks.free:
                return False
            if entry.hit:  # recorded, not looked up
                self.blocks.take(self.blocks.of(entry.hit))
                entry.hit = entry.loose = 0
        else:
            todo = entry.todo
            if not self._claim(entry):
                expected = entry.room
                self._look(entry)
                if entry.room != expected:  # the policy counted on more than there is
                    self.asked_now = False
                return False
            if entry.todo != todo:  # the plan counted on another
                self.lease.steps = min(self.lease.steps, 1)
        ledger.admit(entry)
        for hook in self.hear.admitted:
            hook(entry, self.now)
        return True

    def _complete(self, entry: Entry) -> None:
        rolling = isinstance(self.plan.decode, Decodes)  # one that names its decodes does not name this one
        self._join(entry, self.now, rolling)
        self.lease.prefill()
        for hook in self.hear.prefilled:
            hook(entry, self.now)
        if not rolling:
            for hook in self.hear.held:
                hook(entry, self.now)

    # -- which requests decode, and what happens when memory runs out

    def _choose_decodes(self) -> None:
        decode, ledger = self.plan.decode, self.ledger
        if decode is NONE:
            return
        chosen = ledger.decoding if isinstance(decode, Decodes) else decode
        for entry in [held for held in ledger.held.values() if held.id in chosen]:
            ledger.resume(entry)
            self._ends_in(entry, self._roll(entry))
            for hook in self.hear.resumed:
                hook(entry, self.now)
        if len(chosen) == ledger.rolling:
            return
        for entry in list(ledger.decoding.values()):
            if entry.rolls and entry.id not in chosen:
                self._hold(entry)
                for hook in self.hear.held:
                    hook(entry, self.now)

    def _make_room(self) -> bool:
        if not self.asked_now:
            return False
        while self.ledger.rolling and self.blocks.due(self.ledger.tick) > self.blocks.free:
            self.evict(self._victim())
        return self.ledger.rolling > 0

    def _starved_prompt(self, chosen: Sequence[object]) -> None:
        """A half-done prompt finds no block: the policy is asked first, then the newest is evicted.

        SGLang lets it wait and decodes, whatever the plan says.
        """
        if chosen:
            return
        if self._shortest and self.ledger.rolling:
            self._decodes_instead = True
            self.lease.steps = min(self.lease.steps, 1)
        elif self.asked_now:
            self.evict(self._victim())
        else:
            self.lease.ended = True

    def _refresh_view(self) -> None:
        self.ledger.now = self.now
        self.ledger.kv_free = self.blocks.free * self.blocks.size
        if self.cache is not None:
            self.ledger.kv_shared = self.cache.shared * self.cache.size

    def _tell_finished(self, entry: Entry, now: float, how: End) -> None:
        for hook in self.hear.finished:
            hook(entry, now, how)
        self._on_leave(entry.id, now)
