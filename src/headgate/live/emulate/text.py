"""What the emulator says: text that follows from the prompt alone, so that a client can check every token.

A prompt is reduced to a fingerprint of its token ids. Token `i` of the answer is a word of a vocabulary,
chosen by the fingerprint, the number of the choice and `i`. Whoever knows the prompt can compute the answer
(`expected.answer`), so a lost, doubled or swapped token shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import product

WORDS = 4096
MASK = (1 << 64) - 1
STEP, SPREAD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd constants that mix bits
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"


def syllables() -> list[str]:
    """The vocabulary without a tokenizer: 4,096 words of four letters, each behind a space."""
    pairs = [first + second for first, second in product(CONSONANTS, VOWELS)][:64]
    return [f" {first}{second}" for first, second in product(pairs, pairs)]


class Vocabulary:
    """The words answers are made of, their token ids, and their bytes inside a JSON string."""

    def __init__(self, words: Sequence[str], ids: Sequence[int], json: Sequence[bytes]) -> None:
        self.words, self.ids, self.json = words, ids, json


SYLLABLES = Vocabulary(syllables(), range(WORDS), [word.encode() for word in syllables()])


def fingerprint(ids: bytes) -> int:
    """64 bits of a prompt, from its token ids as little-endian 32-bit numbers."""
    return int.from_bytes(blake2b(ids, digest_size=8).digest(), "little")


def spoiled(mark: int) -> int:
    """The fingerprint of KV that is not what the request believes it to be."""
    return mark ^ 0x5555_AAAA_5555_AAAA


class Text:
    """One answer, any part of which can be had at any time; nothing is stored."""

    __slots__ = ("_seed", "_words", "length")

    def __init__(self, mark: int, choice: int = 0, words: Vocabulary = SYLLABLES) -> None:
        self._seed = (mark + choice * SPREAD) & MASK
        self._words = words

    def place(self, i: int) -> int:
        """The number of the word at position i."""
        mixed = (self._seed + i * STEP) & MASK
        return (((mixed ^ (mixed >> 29)) * SPREAD) & MASK) >> 52

    def ids(self, begin: int, end: int) -> list[int]:
        """Token ids of the positions from `begin` up to `end`."""
        ids, place = self._words.ids, self.place
        return [ids[place(i)] for i in range(begin, end)]

    def pieces(self, begin: int, end: int) -> list[str]:
        """Text of each of these positions."""
        words, place = self._words.words, self.place
        return [words[place(i)] for i in range(begin, end)]

    def json(self, begin: int, end: int) -> bytes:
        """Text of these positions as it stands inside a JSON string."""
        words, place = self._words.json, self.place
        if end - begin == 1:
            return words[place(begin)]
        return b"".join([words[place(i)] for i in range(begin, end)])

    def text(self, begin: int, end: int) -> str:
        return "".join(self.pieces(begin, end))


class Echo(Text):
    """A given text, token by token: the prompt said back, or an answer that was cut."""

    __slots__ = ("_ids", "_json", "_pieces")

    def __init__(self, pieces: Sequence[str], ids: Sequence[int], json: Iterable[bytes]) -> None:
        self._pieces, self._ids, self._json = pieces, ids, list(json)

    def ids(self, begin: int, end: int) -> list[int]:
        return list(self._ids[begin:end])

    def pieces(self, begin: int, end: int) -> list[str]:
        return list(self._pieces[begin:end])

    def json(self, begin: int, end: int) -> bytes:
        return b"".join(self._json[begin:end])
