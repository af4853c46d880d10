"""Paged KV memory in which every read and every write is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from language import Truth, beginning, heard

NEVER = -1


class Wrong(AssertionError):  # noqa: N818
    """The engine did what no engine may do."""


class Memory:
    """Blocks of states. `holders` says how many requests hold a block by the scheduler's own books."""

    def __init__(self, blocks: int, size: int, holders: Callable[[int], int]) -> None:
        self.size = size
        self.tables: dict[str, tuple[Truth, list[int]]] = {}  # of everybody who holds KV
        self._blocks = [[NEVER] * size for _ in range(blocks + 1)]
        self._holders = holders

    def forward(
        self, name: str, truth: Truth, table: Sequence[int], first: int, tokens: Sequence[int]
    ) -> int:
        """Run these tokens of a request at positions from `first` on; the state after the last of them."""
        if first + len(tokens) > len(table) * self.size:
            raise Wrong(f"{name}: {first}+{len(tokens)} tokens do not fit its {len(table)} blocks")
        self.read(name, truth, table, first)
        state = self._at(table, first - 1) if first else beginning(truth.adapter)
        for position, token in enumerate(tokens, first):
            state = heard(state, token)
            self._write(name, table, position, state)
        return state

    def read(self, name: str, truth: Truth, table: Sequence[int], count: int) -> None:
        """Attention reads the first `count` positions: each must hold what its own history left."""
        if count:
            truth.state(count - 1)
        size, states = self.size, truth.states
        for index in range(0, count, size):
            here = min(size, count - index)
            found = self._blocks[table[index // size]]
            if found[:here] != states[index : index + here]:
                wrong = next(i for i in range(here) if found[i] != states[index + i])
                what = "never written" if found[wrong] == NEVER else "written by another history"
                raise Wrong(f"{name}: reads position {index + wrong} in block {table[index // size]}, {what}")

    def load(self, truth: Truth, table: Sequence[int], first: int, count: int) -> None:
        """KV that came from elsewhere."""
        for position in range(first, first + count):
            self._blocks[table[position // self.size]][position % self.size] = truth.state(position)

    def copy(self, source: int, target: int) -> None:
        """Copy on write."""
        self._blocks[target][:] = self._blocks[source]

    def _at(self, table: Sequence[int], position: int) -> int:
        return self._blocks[table[position // self.size]][position % self.size]

    def _write(self, name: str, table: Sequence[int], position: int, state: int) -> None:
        """Prefix caching lets others share a block even before it is written, if they want the same in it."""
        index, place = divmod(position, self.size)
        block = table[index]
        if block == 0:
            raise Wrong(f"{name}: writes position {position} into the null block")
        holders = self._holders(block)
        if holders < 1:
            raise Wrong(f"{name}: writes position {position} into block {block}, which is free")
        if holders > 1:
            for other, (truth, blocks) in self.tables.items():
                if index < len(blocks) and blocks[index] == block and truth.state(position) != state:
                    raise Wrong(f"{name}: writes position {position} into block {block} of {other}")
        self._blocks[block][place] = state
