"""Which requests begin alike, known before any of it is computed: a tree of the prompts in an engine.

A request that waits finds in the prefix cache what those before it will have computed by then. A look-up can
only say what is there now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

from headgate.kv.prefix import Pieces

# The name of a prompt's n-th block. It stands for all blocks before it, too: equal names, equal beginnings.
Names = Callable[[int], Hashable]


class Stretch:
    """Blocks [start, end) that the same requests have, behind those of the parent."""

    __slots__ = ("children", "end", "members", "names", "parent", "running", "start")

    def __init__(self, parent: Stretch | None, names: Names, start: int, end: int) -> None:
        self.parent, self.names, self.start, self.end = parent, names, start, end
        self.children: dict[Hashable, Stretch] = {}
        self.members = 0  # requests that have these blocks
        self.running = 0  # of those, they have a slot


class Siblings:
    """The prompts of requests that wait or run, by their blocks.

    The cost of a request goes by the places at which others branch off its prompt, and by the logarithm of
    its blocks; how many wait does not count.
    """

    __slots__ = ("_admitted", "_last", "_root")

    def __init__(self) -> None:
        self._root = Stretch(None, lambda block: None, 0, 0)
        self._last: dict[int, Stretch] = {}  # where each prompt ends
        self._admitted: set[int] = set()

    def add(self, id: int, names: Names, blocks: int) -> int:
        """It waits from now on. How many of its blocks has one that came before it, computed or not?"""
        self.drop(id)
        if not blocks:
            return 0
        stretch, depth = self._root, 0
        while depth < blocks:
            child = stretch.children.get(names(depth))
            if child is None:
                break
            depth = _common(child, names, min(child.end, blocks))
            stretch = child if depth == child.end else _split(child, depth)
        shared = depth
        if depth < blocks:
            leaf = Stretch(stretch, names, depth, blocks)
            stretch.children[names(depth)] = stretch = leaf
        self._last[id] = stretch
        while stretch.parent is not None:
            stretch.members += 1
            stretch = stretch.parent
        return shared

    def admit(self, id: int) -> None:
        """It runs from now on: each of its blocks is in the cache, or will be before one behind it enters."""
        if id in self._last and id not in self._admitted:
            self._admitted.add(id)
            self._run(id, 1)

    def withdraw(self, id: int) -> None:
        if id in self._admitted:
            self._admitted.discard(id)
            self._run(id, -1)

    def _run(self, id: int, by: int) -> None:
        stretch = self._last[id]
        while stretch.parent is not None:
            stretch.running += by
            stretch = stretch.parent

    def drop(self, id: int) -> None:
        self.withdraw(id)
        stretch = self._last.pop(id, None)
        if stretch is None:
            return
        while stretch.parent is not None:
            parent = stretch.parent
            stretch.members -= 1
            if not stretch.members:
                del parent.children[stretch.names(stretch.start)]
            elif len(stretch.children) == 1:
                _merge(stretch)
            stretch = parent

    def held(self, id: int) -> int:
        stretch = self._last.get(id)
        while stretch is not None and stretch.parent is not None:
            if stretch.running:
                return stretch.end
            stretch = stretch.parent
        return 0


class Chain:
    """Names of the blocks of a content in pieces, up to the first private one."""

    __slots__ = ("_ends", "_links", "_size", "blocks")

    def __init__(self, pieces: Pieces, tokens: int, size: int) -> None:
        self._ends: list[int] = []
        self._links: list[int] = []
        self._size = size
        start = link = 0
        for key, length in pieces:
            if key < 0 or start >= tokens:
                break
            link = hash((link, start, key))
            start += length
            self._ends.append(start)
            self._links.append(link)
        self.blocks = min(start, tokens) // size

    def name(self, block: int) -> Hashable:
        """A block belongs to the piece of its last token."""
        return self._links[bisect_left(self._ends, (block + 1) * self._size)], block


def _common(stretch: Stretch, names: Names, end: int) -> int:
    """Where the two part, at `end` at the latest; the first block is the same."""
    theirs, low, high = stretch.names, stretch.start + 1, end
    if theirs(end - 1) == names(end - 1):
        return end
    while low < high:
        middle = (low + high + 1) // 2
        if theirs(middle - 1) == names(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def _split(stretch: Stretch, at: int) -> Stretch:
    """Its blocks up to `at` become a stretch of their own, before it."""
    parent = stretch.parent
    assert parent is not None
    first = Stretch(parent, stretch.names, stretch.start, at)
    first.members, first.running = stretch.members, stretch.running
    parent.children[stretch.names(stretch.start)] = first
    first.children[stretch.names(at)] = stretch
    stretch.parent, stretch.start = first, at
    return first


def _merge(stretch: Stretch) -> None:
    """If no prompt ends here any more, it and its only child are one."""
    parent = stretch.parent
    for child in stretch.children.values():
        if parent is not None and child.members == stretch.members:
            child.parent, child.start = parent, stretch.start
            parent.children[child.names(child.start)] = child
