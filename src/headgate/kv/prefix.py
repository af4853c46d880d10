"""vLLM's prefix cache, exact: which blocks of a prompt are there already, and which are evicted for others.

The rules are those of vLLM 0.32 for one group of full-attention layers (`docs/prefix-caching.md` lists them).
Blocks are kept as runs, so a request costs by the pieces of its content and not by its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from headgate.core.ledger import Entry
from headgate.kv.blocks import Blocks

# A request's content: (key, tokens) pieces in order; equal keys behind equal pieces mean equal tokens. The
# last piece goes on as the request's output. A key below zero is private: only the request itself has it.
Pieces = Sequence[tuple[int, int]]


class BlockRun:
    """Blocks [lo, hi) of a request's content, all held by the same requests, or all free."""

    __slots__ = ("after", "before", "hi", "lo", "node", "refs", "rest", "used")

    def __init__(self, node: Node, lo: int, hi: int, refs: int) -> None:
        self.node, self.lo, self.hi, self.refs = node, lo, hi, refs
        self.rest: BlockRun | None = None  # what was cut off while requests held both parts
        self.used = 0.0  # when it was last used, where `stamp` is called
        self.before = self.after = self  # neighbours in the free queue; itself: not in it


class CachedPrefix(NamedTuple):
    """A look-up's answer: parts (run, first block, end), their blocks, and how many no request holds."""

    parts: list[tuple[BlockRun, int, int]]
    blocks: int
    loose: int


class Node:
    """One piece of content behind that of its parent. Its blocks are known under its place in the tree.

    A block belongs to the piece that holds its last token, so a block that straddles two pieces differs when
    the second one differs. `copies` are runs in the order in which their blocks became known: engines do not
    merge equal blocks, and a look-up takes the block that became known first.
    """

    __slots__ = ("children", "copies", "name", "parent")

    def __init__(self, parent: Node | None, name: tuple[int, int]) -> None:
        self.parent = parent
        self.name = name  # (token at which the piece begins, key), unique within the parent
        self.children: dict[tuple[int, int], Node] = {}
        self.copies: list[BlockRun] = []

    def prune(self) -> None:
        """Forget this node, and parents, where neither blocks nor children are left."""
        node = self
        while node.parent is not None and not node.copies and not node.children:
            del node.parent.children[node.name]
            node = node.parent


NOTHING = CachedPrefix([], 0, 0)


class Holder:
    __slots__ = ("entry", "held", "known", "pieces")

    def __init__(self, entry: Entry, pieces: Pieces) -> None:
        self.entry = entry
        self.pieces = pieces
        self.held: list[tuple[BlockRun, int]] = []  # from its first block on, each with its end
        self.known = 0  # blocks that can be found

    def runs(self) -> list[BlockRun]:
        runs: list[BlockRun] = []
        for run, end in self.held:
            runs.append(run)
            while run.hi < end:
                assert run.rest is not None
                run = run.rest
                runs.append(run)
        return runs


class PrefixBlocks(Blocks):
    """A pool whose free blocks are blank or cached: blank ones are taken first, cached ones by age.

    Outputs become known block by block while they decode. Most are not looked for before the request
    leaves, so they are entered then, or when another looks for their key (`identified` says how far an
    entry's tokens have an identity).
    """

    __slots__ = (
        "_holders", "_queue", "_root", "_since", "_streams", "blank", "evicted", "identified", "shared",
    )  # fmt: skip

    def __init__(
        self,
        total: int,
        size: int,
        identified: Callable[[Entry], int],
        since: Callable[[Entry, int], int] | None = None,
    ) -> None:
        super().__init__(total, size)
        self.blank = total
        self.evicted = 0  # cached blocks that were taken for other content
        self.shared = 0  # blocks that requests hold beyond the first that holds them
        self.identified = identified
        self._since = since  # when an entry had so many tokens; None: it got one in each step
        self._queue = FreeQueue()
        self._root = Node(None, (0, 0))
        self._holders: dict[int, Holder] = {}
        self._streams: dict[int, list[Holder]] = {}  # requests that write on under a key, by the key

    # -- blocks without a name

    def take(self, count: int) -> None:
        """Blank blocks first, then the cached ones that were released first."""
        self.free -= count
        if count <= self.blank:
            self.blank -= count
            return
        count -= self.blank
        self.blank = 0
        self.evicted += count
        self._queue.evict(count)

    def give(self, count: int) -> None:
        self.free += count
        self.blank += count

    def forget(self, before: float = inf) -> None:
        """Free blocks lose their content, if they were last used before that (see `stamp`)."""
        count = self._queue.unused_since(before)
        self._queue.evict(count)
        self.blank += count

    def stamp(self, id: int, now: float) -> None:
        for run in self._holders[id].runs():
            run.used = now

    # -- look-ups

    def find(self, pieces: Pieces, known: int) -> CachedPrefix:
        """The longest known beginning of `known` tokens; at least the last token is left to compute."""
        node, start, block = self._root, 0, 0
        most, last = (known - 1) // self.size, len(pieces) - 1
        parts: list[tuple[BlockRun, int, int]] = []
        if self._streams:
            for key, _ in pieces:
                if key in self._streams:
                    self._catch_up(key)
        for place, (key, tokens) in enumerate(pieces):
            below = node.children.get((start, key))
            if below is None:
                break
            node = below
            start += tokens
            end = most if place == last else min(start // self.size, most)
            while block < end:
                run, stop = _first(node.copies, block, end)
                if run is None:
                    return _found(parts, block)
                parts.append((run, block, stop))
                block = stop
            if block == most:
                break
        return _found(parts, block)

    def hold(self, entry: Entry, pieces: Pieces, found: CachedPrefix) -> None:
        holder = self._holders[entry.id] = Holder(entry, pieces)
        holder.known = found.blocks
        queue = self._queue
        for run, start, end in found.parts:
            while run.hi <= start:  # an earlier part cut it
                assert run.rest is not None
                run = run.rest
            if start > run.lo:
                run = queue.cut(run, start)
            if end < run.hi:
                queue.cut(run, end)
            if not run.refs:
                queue.remove(run)
            run.refs += 1
            holder.held.append((run, end))
        self.free -= found.loose
        self.shared += found.blocks - found.loose
        key = pieces[-1][0]
        if key >= 0:
            if key in self._streams:
                self._catch_up(key)  # what was written before it came is older than anything it writes
            self._streams.setdefault(key, []).append(holder)

    def learn(self, id: int, tokens: int) -> None:
        """Its first `tokens` tokens are computed, or will be by the step that is composed."""
        self._learn(self._holders[id], tokens // self.size)

    def release(self, id: int, tokens: int, held: int) -> None:
        """The request leaves: `tokens` of its tokens can be found, `held` blocks come free."""
        holder = self._holders[id]
        key = holder.pieces[-1][0]
        if key >= 0 and len(self._streams[key]) > 1:
            self._catch_up(key)  # others wrote the same, and may have been first
        self._learn(holder, tokens // self.size)
        del self._holders[id]
        if key >= 0:
            writers = self._streams[key]
            writers.remove(holder)
            if not writers:
                del self._streams[key]
        self.give(held - holder.known)
        queue = self._queue
        for run in reversed(holder.runs()):
            run.refs -= 1
            if run.refs:
                self.shared -= run.hi - run.lo
            else:
                run.rest = None
                queue.append(run)
                self.free += run.hi - run.lo

    def holds(self, id: int) -> bool:
        return id in self._holders

    # -- how blocks become known

    def _learn(self, holder: Holder, blocks: int) -> None:
        if blocks <= holder.known:
            return
        node, start, block = self._root, 0, holder.known
        last = len(holder.pieces) - 1
        for place, (key, tokens) in enumerate(holder.pieces):
            name = (start, key)
            below = node.children.get(name)
            if below is None:
                below = node.children[name] = Node(node, name)
            node = below
            start += tokens
            end = blocks if place == last else min(start // self.size, blocks)
            if block < end:
                self._enter(holder, node, block, end)
                block = end
            if block == blocks:
                break
        holder.known = blocks

    def _enter(self, holder: Holder, node: Node, lo: int, hi: int) -> None:
        """These blocks can be found from now on, behind all copies that are known already."""
        copies = node.copies
        if holder.held and copies:
            run, end = holder.held[-1]
            if run is copies[-1] and run.refs == 1 and run.hi == end == lo:
                run.hi = hi
                holder.held[-1] = run, hi
                return
        run = BlockRun(node, lo, hi, refs=1)
        copies.append(run)
        holder.held.append((run, hi))

    def _catch_up(self, key: int) -> None:
        """Outputs under this key that have been written meanwhile become known, in the order of writing."""
        writers = self._streams[key]
        if len(writers) == 1:
            self._learn(writers[0], self.identified(writers[0].entry) // self.size)
            return
        pending = []
        for holder in writers:
            tokens = self.identified(holder.entry)
            for block in range(holder.known + 1, tokens // self.size + 1):
                since = block * self.size - tokens
                if self._since is not None:
                    since = self._since(holder.entry, block * self.size)
                pending.append((since, holder.entry.admission, block, holder))
        for _, _, block, holder in sorted(pending, key=lambda row: row[:3]):
            self._learn(holder, block)


def _first(copies: list[BlockRun], block: int, end: int) -> tuple[BlockRun | None, int]:
    """The copy of this block that became known first, and the block up to which that holds."""
    for run in copies:
        if run.lo > block:
            end = min(end, run.lo)
        elif run.hi > block:
            return run, min(end, run.hi)
    return None, block


def _found(parts: list[tuple[BlockRun, int, int]], blocks: int) -> CachedPrefix:
    if not blocks:
        return NOTHING
    return CachedPrefix(parts, blocks, sum(end - start for run, start, end in parts if not run.refs))


class FreeQueue:
    """Free runs, the next to be evicted first. A ring around a sentinel."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring = BlockRun(Node(None, (0, 0)), 0, 0, 0)

    def append(self, run: BlockRun) -> None:
        self._insert(run, self._ring)

    def remove(self, run: BlockRun) -> None:
        run.before.after, run.after.before = run.after, run.before
        run.before = run.after = run

    def cut(self, run: BlockRun, at: int) -> BlockRun:
        """The blocks from `at` on become a run of their own, evicted before the rest."""
        tail = BlockRun(run.node, at, run.hi, run.refs)
        tail.rest, run.rest, tail.used = run.rest, tail, run.used
        copies = run.node.copies
        copies.insert(copies.index(run) + 1, tail)
        run.hi = at
        if run.before is not run:  # it is in the queue
            self._insert(tail, run)
        return tail

    def evict(self, count: int) -> None:
        while count:
            run = self._ring.after
            length = run.hi - run.lo
            if length > count:
                run.hi -= count
                return
            count -= length
            self.remove(run)
            run.node.copies.remove(run)
            run.node.prune()

    def unused_since(self, time: float) -> int:
        count, run = 0, self._ring.after
        while run is not self._ring and run.used < time:
            count += run.hi - run.lo
            run = run.after
        return count

    def _insert(self, run: BlockRun, behind: BlockRun) -> None:
        run.before, run.after = behind.before, behind
        run.before.after = run.after.before = run
