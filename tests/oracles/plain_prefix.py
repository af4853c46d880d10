"""vLLM's prefix cache written block by block: every block an object, the free queue a list."""

from __future__ import annotations

from collections.abc import Iterator


class Block:
    """One block of KV memory."""

    def __init__(self) -> None:
        self.identity: tuple | None = None
        self.refs = 0


class PlainCache:
    """All rules in the order in which vLLM's block pool applies them; O(blocks) everywhere."""

    def __init__(self, total: int, size: int) -> None:
        self.size = size
        self.queue = [Block() for _ in range(total)]
        self.known: dict[tuple, list[Block]] = {}
        self.evicted = 0

    def find(self, tokens: list) -> list[Block]:
        """Blocks of these tokens from the first on, the last token left out."""
        found = []
        for identity in self.identities(tokens[:-1]):
            if identity not in self.known:
                break
            found.append(self.known[identity][0])
        return found

    def identities(self, tokens: list) -> Iterator[tuple]:
        for end in range(self.size, len(tokens) + 1, self.size):
            yield tuple(tokens[:end])

    def fits(self, found: list[Block], tokens: int) -> bool:
        need = -(-tokens // self.size) - len(found) + sum(not block.refs for block in found)
        return need <= len(self.queue)

    def touch(self, found: list[Block]) -> None:
        for block in found:
            if not block.refs:
                self.queue.remove(block)
            block.refs += 1

    def take(self, count: int) -> list[Block]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self._forget(block)
            block.refs = 1
        return taken

    def learn(self, tokens: list, blocks: list[Block]) -> None:
        """Full blocks that have no identity yet get theirs."""
        for identity, block in zip(self.identities(tokens), blocks, strict=False):
            if block.identity is None:
                block.identity = identity
                self.known.setdefault(identity, []).append(block)

    def release(self, blocks: list[Block]) -> None:
        """From the last to the first: those with an identity to the end, the others to the front."""
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                if block.identity is None:
                    self.queue.insert(0, block)
                else:
                    self.queue.append(block)

    def _forget(self, block: Block) -> None:
        if block.identity is None:
            return
        self.evicted += 1
        copies = self.known[block.identity]
        copies.remove(block)
        if not copies:
            del self.known[block.identity]
        block.identity = None
