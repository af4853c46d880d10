"""What the emulator says: text that follows from the prompt alone, so that a client can check every token.

A prompt is reduced to a fingerprint of its token ids. Token `i` of the answer is a word of a vocabulary,
chosen by a hash of the fingerprint, the number of the choice and `i`. Whoever knows the prompt can compute
the answer (`expected.answer`), so a lost, doubled or swapped token shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import product
from struct import Struct

WORDS = 4096
BLOCK = Struct("<32H")  # one hash chooses 32 words
SIZE = BLOCK.size // 2
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

    __slots__ = ("_phase", "_seed", "_words")

    def __init__(self, mark: int, choice: int = 0, words: Vocabulary = SYLLABLES) -> None:
        self._seed = mark.to_bytes(8, "little") + choice.to_bytes(2, "little")
        self._phase = mark % SIZE  # blocks of answers that began together end at different times
        self._words = words

    def ids(self, begin: int, end: int) -> list[int]:
        """Token ids of the positions from `begin` up to `end`."""
        ids = self._words.ids
        return [ids[place] for place in self._places(begin, end)]

    def pieces(self, begin: int, end: int) -> list[str]:
        """Text of each of these positions."""
        words = self._words.words
        return [words[place] for place in self._places(begin, end)]

    def some(self, begin: int) -> list[bytes]:
        """Text of some positions from `begin` on, each as it stands inside a JSON string."""
        words = self._words.json
        return [words[place % WORDS] for place in self._block(begin)]

    def _places(self, begin: int, end: int) -> list[int]:
        """Numbers of the words from `begin` up to `end`."""
        found: list[int] = []
        while begin + len(found) < end:
            found += self._block(begin + len(found))
        return [place % WORDS for place in found[: max(0, end - begin)]]

    def _block(self, begin: int) -> tuple[int, ...]:
        """What chooses the words from `begin` to the end of its block."""
        number, inside = divmod(begin + self._phase, SIZE)
        mixed = blake2b(self._seed + number.to_bytes(4, "little"), digest_size=BLOCK.size).digest()
        return BLOCK.unpack(mixed)[inside:]

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

    def some(self, begin: int) -> list[bytes]:
        return self._json[begin : begin + SIZE]
