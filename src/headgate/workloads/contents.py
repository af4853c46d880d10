"""What requests share: each one's content as pieces, so that a prefix cache can find what it has computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.core.errors import InputError
from headgate.workloads.columns import Whole

PRIVATE = -1  # key of content that no other request has
Piece = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Contents:
    """A ragged table: row i has the pieces offsets[i] to offsets[i + 1], each with a key and its tokens.

    Equal keys behind equal pieces mean equal tokens. The last piece goes on as the request's output; where
    nobody can ask for that output again, it is a PRIVATE piece, of no tokens if the prompt ends before it.
    """

    offsets: Whole
    keys: Whole
    tokens: Whole

    @classmethod
    def of(cls, rows: Iterable[Sequence[Piece]]) -> Contents:
        """From one list of (key, tokens) per request."""
        offsets, keys, tokens = [0], [], []
        for row in rows:
            for key, count in row:
                keys.append(key)
                tokens.append(count)
            offsets.append(len(keys))
        return cls(*(np.array(each, dtype=np.int64) for each in (offsets, keys, tokens)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> list[list[Piece]]:
        """The pieces of every request."""
        pairs = list(zip(self.keys.tolist(), self.tokens.tolist(), strict=True))
        ends = self.offsets.tolist()
        return [pairs[start:end] for start, end in pairwise(ends)]

    def pieces(self) -> list[tuple[Piece, ...]]:
        """The same with a key of its own for each private piece, for an engine."""
        return [
            tuple((key if key >= 0 else -1 - number, count) for key, count in row)
            for number, row in enumerate(self.rows())
        ]

    def check(self, prompt: Whole) -> None:
        """Every request has all tokens of its prompt in pieces; pieces beyond it are its output."""
        if len(self) != len(prompt):
            raise InputError(f"contents has {len(self)} rows, prompt has {len(prompt)}; give one per request")
        empty = np.diff(self.offsets) < 1
        if empty.any():
            raise InputError(f"contents of row {int(np.argmax(empty))} has no piece; give at least one")
        if (self.keys < PRIVATE).any() or (self.tokens < 0).any():
            raise InputError("contents has a key below -1 or a piece of fewer than 0 tokens; fix the pieces")
        sums = np.add.reduceat(self.tokens, self.offsets[:-1])
        wrong = sums < prompt
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(f"contents of row {row} has {sums[row]} tokens, its prompt {prompt[row]}")

    def subset(self, rows: slice | npt.NDArray[Any]) -> Contents:
        """Of these requests alone."""
        every = self.rows()
        return Contents.of(every[row] for row in np.arange(len(self))[rows].tolist())

    def cut(self, most: int) -> Contents:
        """Prompts cut to at most so many tokens."""
        return Contents.of(_cut(row, most) for row in self.rows())

    def behind(self, others: Sequence[Contents]) -> Contents:
        """All of them one after the other; keys of one table mean nothing in another."""
        rows, shift = [], 0
        for each in (self, *others):
            rows += [[(key if key < 0 else key + shift, n) for key, n in row] for row in each.rows()]
            shift += int(each.keys.max(initial=-1)) + 1
        return Contents.of(rows)

    def same(self, other: Contents | None) -> bool:
        mine = (self.offsets, self.keys, self.tokens)
        return other is not None and all(
            np.array_equal(a, b) for a, b in zip(mine, (other.offsets, other.keys, other.tokens), strict=True)
        )


def private(prompts: Whole) -> Contents:
    """Requests that share nothing."""
    return Contents.of([(PRIVATE, tokens)] for tokens in prompts.tolist())


def _cut(row: Sequence[Piece], most: int) -> list[Piece]:
    kept: list[Piece] = []
    left = most
    for key, tokens in row:
        if tokens > left:
            return [*kept, (key, left), (PRIVATE, 0)] if left else [*kept, (PRIVATE, 0)]
        kept.append((key, tokens))
        left -= tokens
    return kept


def of_hashes(ids: Sequence[Sequence[object]], spans: Sequence[int], block: int) -> Contents:
    """From the hash ids of published traces: one for each `block` tokens of a span, the last one shorter.

    What comes after the span is private. Ids that always occur together become one piece.
    """
    rows = []
    for chain, span in zip(_joined(ids), spans, strict=True):
        row, left = [], span
        for key, blocks in chain:
            if left:
                row.append((key, min(left, blocks * block)))
                left -= row[-1][1]
        rows.append([*row, (PRIVATE, left)])
    return Contents.of(rows)


def _joined(ids: Sequence[Sequence[object]]) -> list[list[Piece]]:
    """Chains of (key, number of ids): an id that is followed by one and the same id wherever it occurs, and
    that only ever follows that one, is joined with it.
    """
    end, several = object(), object()
    follows: dict[object, object] = {}
    behind: dict[object, object] = {}
    for row in ids:
        before: object = end
        for id in row:
            behind[id] = before if behind.get(id, before) == before else several
            if before is not end:
                follows[before] = id if follows.get(before, id) == id else several
            before = id
        if before is not end:
            follows[before] = several
    numbers: dict[object, int] = {}
    chains = []
    for row in ids:
        chain: list[Piece] = []
        before = end
        for id in row:
            if before is not end and follows[before] == id and behind[id] == before:
                key, count = chain[-1]
                chain[-1] = key, count + 1
            else:
                chain.append((numbers.setdefault(id, len(numbers)), 1))
            before = id
        chains.append(chain)
    return chains
