"""Who holds KV, how much, and until when: ledger, blocks and true ends, moved together."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter

from headgate.core.build import mypyc_attr
from headgate.core.ledger import NOT_ROLLING, Entry, Ledger
from headgate.core.view import Limits
from headgate.kv.blocks import Blocks
from headgate.kv.prefix import Pieces, PrefixBlocks
from headgate.kv.siblings import Chain, Siblings
from headgate.sim.engine.engine import Engine

SEAT = attrgetter("seat")


@mypyc_attr(allow_interpreted_subclasses=True)
class Residents:
    """The state of a virtual engine. Every change touches one request: O(1), or O(log n) for its end."""

    def __init__(
        self, engine: Engine, lengths: Sequence[int], contents: Sequence[Pieces] | None = None
    ) -> None:
        total = engine.kv_tokens // engine.block
        self.cache: PrefixBlocks | None = None
        if contents is not None and engine.prefix_cache:
            self.blocks: Blocks = (cache := PrefixBlocks(total, engine.block, self._written))
            self.cache, self._contents = cache, contents
            self._siblings = Siblings()
        else:
            self.blocks = Blocks(total, engine.block)
        self._composing = False  # a step with decodes, which write a token each before new prompts enter
        limits = Limits(engine.batch_tokens, engine.running, engine.block)
        self.ledger = Ledger(limits, self.blocks.total * engine.block)
        self.longest = engine.longest
        self._lengths = lengths  # true output lengths, by request number; no policy sees them
        self._ends: list[tuple[int, int, int]] = []  # heap: tick of its last token, rank, request

    @property
    def occupied(self) -> bool:
        ledger = self.ledger
        return bool(ledger.decoding or ledger.waiting or ledger.prefilling)

    def state(self) -> str:
        """Who is where, for error messages."""
        ledger = self.ledger
        return (
            f"{len(ledger.waiting)} waiting, {len(ledger.prefilling)} prefilling, "
            f"{len(ledger.decoding)} decoding ({len(ledger.held)} held), "
            f"{self.blocks.free} of {self.blocks.total} KV blocks free"
        )

    def _whole(self, entry: Entry) -> int:
        """Its true output, cut by its own limit and by the engine's."""
        whole, most = self._lengths[entry.id], self.longest - entry.prompt
        if entry.limit < most:
            most = entry.limit
        return whole if whole < most else most

    def _join(self, entry: Entry, now: float, rolling: bool) -> None:
        """Its prompt is done; from now on it decodes, with the others or held."""
        ledger = self.ledger
        ledger.join(entry, now, rolling)
        generated = entry.generated
        remaining = self._whole(entry) - generated
        if rolling:
            self.blocks.roll(entry.prompt + generated - 1, ledger.tick)
        if rolling or not remaining:
            self._ends_in(entry, remaining)

    def _hold(self, entry: Entry) -> None:
        """It stops rolling; its end is not known any more."""
        self.blocks.roll(entry.held_kv, self.ledger.tick, by=-1)
        self.ledger.hold(entry)
        entry.end = NOT_ROLLING

    def _resume(self, entry: Entry) -> None:
        ledger = self.ledger
        ledger.resume(entry)
        self.blocks.roll(entry.held_kv, ledger.tick)
        self._ends_in(entry, self._whole(entry) - entry.generated)

    def _ends_in(self, entry: Entry, steps: int) -> None:
        """Its last token comes after so many steps. Those that end together leave by number.

        In a cache the order of leaving is that of later evictions: there they leave by seat, as in vLLM.
        """
        entry.end = self.ledger.tick + steps
        rank = entry.id if self.cache is None else entry.seat
        heappush(self._ends, (entry.end, rank, entry.id))

    def _free(self, entry: Entry, leaves: bool = True) -> None:
        """Give its blocks back; call it before the ledger lets it go."""
        blocks, held = self.blocks, entry.held_kv
        if self.cache is None:
            pass
        elif leaves:
            self._siblings.drop(entry.id)
        else:
            self._siblings.unseat(entry.id)
        if self.cache is None or not self.cache.holds(entry.id):
            blocks.give(-(-held // blocks.size))
        else:
            self.cache.release(entry.id, held - self._unseen(entry), -(-held // blocks.size))
        if entry.rolls:
            blocks.roll(held, self.ledger.tick, by=-1)
        entry.end = NOT_ROLLING

    def _drop(self, entry: Entry) -> None:
        """Its KV is given back, and it waits again."""
        self._free(entry, leaves=False)
        self.ledger.evict(entry)
        if self.cache is not None:
            self._look(entry)

    # -- the prefix cache ---------------------------------------------------------------------------

    def _expect(self, entry: Entry) -> None:
        """It arrives: what it would find now, or has in common with one that is before it."""
        assert self.cache is not None
        chain = Chain(self._contents[entry.id], entry.prompt, self.blocks.size)
        shared = self._siblings.add(entry.id, chain.name, chain.blocks) * self.blocks.size
        found = self.cache.find(self._contents[entry.id], entry.todo + entry.hit)
        entry.expect(found.blocks * self.blocks.size, found.loose * self.blocks.size, shared, arrives=True)

    def _look(self, entry: Entry) -> None:
        """What a waiting request would find now, or will when those that run have done their prompts."""
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
        self._siblings.seat(entry.id)
        hit = found.blocks * cache.size
        entry.todo, entry.hit, entry.loose = known - hit, 0, 0
        if entry.evictions:
            entry.wasted = max(0, entry.wasted - hit)  # found again: nothing was lost
        else:
            entry.cached = entry.prompt + entry.generated - entry.todo
        return True

    def _unseen(self, entry: Entry) -> int:
        """Tokens whose KV is there or on its way, and which nobody has seen."""
        return 0

    def _written(self, entry: Entry) -> int:
        """Tokens of a running request that can be found."""
        return entry.held_kv - self._unseen(entry) + (self._composing and entry.rolls)

    def _pop_finished(self) -> Entry | None:
        """Somebody whose last token has come, with the KV given back; None when there is no one left."""
        ends, ledger = self._ends, self.ledger
        while ends and ends[0][0] <= ledger.tick:
            end, _, id = heappop(ends)
            entry = ledger.decoding.get(id)
            if entry is not None and entry.end == end:
                self._free(entry)
                ledger.leave(entry)
                return entry
        return None

    def _next_end(self) -> int:
        """The tick at which somebody's last token comes; at least one decode must roll."""
        ends, decoding = self._ends, self.ledger.decoding
        while True:
            end, _, id = ends[0]
            entry = decoding.get(id)
            if entry is not None and entry.end == end:
                return end
            heappop(ends)

    def _newest(self) -> Entry:
        running = (*self.ledger.prefilling.values(), *self.ledger.decoding.values())
        return max(running, key=SEAT)
