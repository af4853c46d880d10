"""Cached KV as runs of blocks: a tree by content, and the free queue in which runs wait to be reused.

A request's blocks are released from the last to the first, so a tail is always evicted before its head: what
is left of a run of blocks is a run. Every operation below therefore costs the same for one block and for a
thousand.
"""

from __future__ import annotations


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
        self.copies: list[Run] = []

    def prune(self) -> None:
        """Forget this node, and parents, where neither blocks nor children are left."""
        node = self
        while node.parent is not None and not node.copies and not node.children:
            del node.parent.children[node.name]
            node = node.parent


class Run:
    """Blocks [lo, hi) of a request's content, all held by the same requests, or all free."""

    __slots__ = ("after", "before", "hi", "lo", "node", "refs", "rest", "used")

    def __init__(self, node: Node, lo: int, hi: int, refs: int) -> None:
        self.node, self.lo, self.hi, self.refs = node, lo, hi, refs
        self.rest: Run | None = None  # what was cut off while requests held both parts
        self.used = 0.0  # when it was last used, where somebody says so
        self.before = self.after = self  # neighbours in the free queue; itself: not in it


class FreeQueue:
    """Free runs, the next to be evicted first. A ring around a sentinel."""

    __slots__ = ("_ring", "blocks")

    def __init__(self) -> None:
        self._ring = Run(Node(None, (0, 0)), 0, 0, 0)
        self.blocks = 0

    def append(self, run: Run) -> None:
        """At the end: it was used last."""
        self._insert(run, self._ring)

    def remove(self, run: Run) -> None:
        run.before.after, run.after.before = run.after, run.before
        run.before = run.after = run
        self.blocks -= run.hi - run.lo

    def cut(self, run: Run, at: int) -> Run:
        """The blocks from `at` on become a run of their own, evicted before the rest."""
        tail = Run(run.node, at, run.hi, run.refs)
        tail.rest, run.rest, tail.used = run.rest, tail, run.used
        copies = run.node.copies
        copies.insert(copies.index(run) + 1, tail)
        queued = run.before is not run
        if queued:
            self.blocks -= tail.hi - at
        run.hi = at
        if queued:
            self._insert(tail, run)
        return tail

    def evict(self, count: int) -> None:
        """Forget so many blocks from the front."""
        self.blocks -= count
        while count:
            run = self._ring.after
            length = run.hi - run.lo
            if length > count:
                run.hi -= count
                return
            count -= length
            run.before.after, run.after.before = run.after, run.before
            run.before = run.after = run
            run.node.copies.remove(run)
            run.node.prune()

    def unused_since(self, time: float) -> int:
        """Blocks at the front whose last use lies before that."""
        count, run = 0, self._ring.after
        while run is not self._ring and run.used < time:
            count += run.hi - run.lo
            run = run.after
        return count

    def runs(self) -> list[Run]:
        """All of them, from the front; for tests and error messages."""
        found, run = [], self._ring.after
        while run is not self._ring:
            found.append(run)
            run = run.after
        return found

    def _insert(self, run: Run, behind: Run) -> None:
        """Just before `behind`."""
        run.before, run.after = behind.before, behind
        run.before.after = run.after.before = run
        self.blocks += run.hi - run.lo
