"""What an emulated answer says, token by token; prompts as tokens, and as keys of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headgate.core.errors import InputError
from headgate.kv.prefix import Pieces

WORDS = 4096
BLOCK = Struct("<32H")  # one hash chooses 32 words
SIZE = BLOCK.size // 2
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aeiou"


def syllables() -> list[str]:
    pairs = [first + second for first, second in product(CONSONANTS, VOWELS)][:64]
    return [f" {first}{second}" for first, second in product(pairs, pairs)]


class Vocabulary(NamedTuple):
    words: Sequence[str]
    ids: Sequence[int]
    json: Sequence[bytes]


SYLLABLES = Vocabulary(syllables(), range(WORDS), [word.encode() for word in syllables()])


def json_text(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def fingerprint(ids: bytes) -> int:
    return int.from_bytes(blake2b(ids, digest_size=8).digest(), "little")


def spoiled(mark: int) -> int:
    return mark ^ 0x5555_AAAA_5555_AAAA


class Text:
    """One answer, any part of which can be had at any time; nothing is stored."""

    __slots__ = ("_phase", "_seed", "_words")

    def __init__(self, mark: int, choice: int = 0, words: Vocabulary = SYLLABLES) -> None:
        self._seed = mark.to_bytes(8, "little") + choice.to_bytes(2, "little")
        self._phase = mark % SIZE  # blocks of answers that began together end at different times
        self._words = words

    def ids(self, begin: int, end: int) -> list[int]:
        ids = self._words.ids
        return [ids[place] for place in self._places(begin, end)]

    def pieces(self, begin: int, end: int) -> list[str]:
        words = self._words.words
        return [words[place] for place in self._places(begin, end)]

    def some(self, begin: int) -> list[bytes]:
        words = self._words.json
        return [words[place % WORDS] for place in self._block(begin)]

    def _places(self, begin: int, end: int) -> list[int]:
        found: list[int] = []
        while begin + len(found) < end:
            found += self._block(begin + len(found))
        return [place % WORDS for place in found[: max(0, end - begin)]]

    def _block(self, begin: int) -> tuple[int, ...]:
        number, inside = divmod(begin + self._phase, SIZE)
        mixed = blake2b(self._seed + number.to_bytes(4, "little"), digest_size=BLOCK.size).digest()
        return BLOCK.unpack(mixed)[inside:]

    def text(self, begin: int, end: int) -> str:
        return "".join(self.pieces(begin, end))


class Echo(Text):
    __slots__ = ("_ids", "_json", "_pieces")

    def __init__(self, pieces: Sequence[str], ids: Sequence[int]) -> None:
        self._pieces, self._ids = pieces, ids
        self._json = [json_text(piece) for piece in pieces]

    def ids(self, begin: int, end: int) -> list[int]:
        return list(self._ids[begin:end])

    def pieces(self, begin: int, end: int) -> list[str]:
        return list(self._pieces[begin:end])

    def some(self, begin: int) -> list[bytes]:
        return self._json[begin : begin + SIZE]


BYTES_PER_TOKEN = 4
PER_MESSAGE = 4  # tokens that a chat template adds around a message
LITTLE = np.dtype("<u4")
Ids = np.ndarray[Any, np.dtype[np.uint32]]


class ByteRule:
    """Four bytes of UTF-8 are a token, whose id is the number they spell; an empty text has one token."""

    vocabulary = SYLLABLES

    def encode(self, text: str) -> Ids:
        data = text.encode("utf-8", "surrogatepass") or b"\0"
        return np.frombuffer(data + b"\0" * (-len(data) % BYTES_PER_TOKEN), LITTLE)

    def decode(self, ids: Sequence[int]) -> str:
        return np.array(ids, LITTLE).tobytes().replace(b"\0", b"").decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        data = (np.array([id], LITTLE).tobytes().replace(b"\0", b"") for id in ids)
        return [each.decode("latin-1") for each in data]

    def chat(self, turns: list[tuple[str, str]]) -> Ids:
        marks = np.full(PER_MESSAGE, 1, LITTLE)
        parts = [part for role, text in turns for part in (marks, self.encode(f"{role[:8]}:{text}"))]
        return np.concatenate(parts) if parts else marks


class FileTokenizer:
    """A `tokenizer.json` as models have it. Chats are laid out as `role: text` lines, without a template."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("--tokenizer needs the package tokenizers; pip install tokenizers") from None
        try:
            self._made = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare exceptions
            raise InputError(f"tokenizer {file}: {error}; give a tokenizer.json or its folder") from None
        self.vocabulary = self._plain_words()

    def _plain_words(self) -> Vocabulary:
        """Tokens that are one word behind a space; where there are too few of them, all that print."""
        known = sorted(self._made.get_vocab().values())
        texts = [(id, self._made.decode([id])) for id in known]
        plain = [(id, text) for id, text in texts if text.isascii() and text.isprintable() and text.strip()]
        words = [(id, text) for id, text in plain if text[0] == " " and text[1:].isalpha()]
        chosen = words if len(words) >= WORDS // 4 else plain or texts
        ids, shown = [id for id, _ in chosen], [text for _, text in chosen]
        again = -(-WORDS // len(ids))
        ids, shown = (ids * again)[:WORDS], (shown * again)[:WORDS]
        return Vocabulary(shown, ids, [json_text(text) for text in shown])

    def encode(self, text: str) -> Ids:
        return np.array(self._made.encode(text).ids or [0], LITTLE)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._made.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self._made.decode([id], skip_special_tokens=False)) for id in ids]

    def chat(self, turns: list[tuple[str, str]]) -> Ids:
        return self.encode("".join(f"{role}: {text}\n" for role, text in turns))


Tokens = ByteRule | FileTokenizer


# -- KV blocks, as a prefix cache knows them

KEY = (1 << 62) - 1


def content(prompt: Ids, output: Sequence[int], salt: str | None, block: int) -> Pieces:
    """Blocks of the prompt and of the answer it will get; the salt is in the first one, as in vLLM."""
    data = prompt.tobytes() + np.array(output, LITTLE).tobytes()
    size = block * LITTLE.itemsize
    keys = [hash(data[at : at + size]) & KEY for at in range(0, len(data) - size + 1, size)]
    if keys and salt is not None:
        keys[0] = hash((salt, keys[0])) & KEY
    return [*((key, block) for key in keys), (-1, len(data) % size // LITTLE.itemsize)]  # the last: half-full
