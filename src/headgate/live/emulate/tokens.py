"""Prompts become tokens: by a stated rule, or by a real tokenizer where one is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headgate.core.errors import InputError
from headgate.live.emulate.text import SYLLABLES, WORDS, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES_PER_TOKEN = 4
PER_MESSAGE = 4  # tokens that a chat template adds around a message
LITTLE = np.dtype("<u4")
Ids = np.ndarray[Any, np.dtype[np.uint32]]


class ByteRule:
    """Four bytes of UTF-8 are a token, whose id is the number they spell; an empty text has one token."""

    vocabulary = SYLLABLES

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        data = text.encode("utf-8", "surrogatepass") or b"\0"
        return np.frombuffer(data + b"\0" * (-len(data) % BYTES_PER_TOKEN), LITTLE)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, the inverse of `encode`."""
        return np.array(ids, LITTLE).tobytes().replace(b"\0", b"").decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        data = (np.array([id], LITTLE).tobytes().replace(b"\0", b"") for id in ids)
        return [each.decode("latin-1") for each in data]

    def chat(self, turns: list[tuple[str, str]]) -> Ids:
        """A conversation: each message costs four tokens more than its text."""
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
        return Vocabulary(shown, ids, [msgspec.json.encode(text)[1:-1] for text in shown])

    def encode(self, text: str) -> Ids:
        """The ids of a text; an empty one has token 0."""
        return np.array(self._made.encode(text).ids or [0], LITTLE)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._made.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self._made.decode([id], skip_special_tokens=False)) for id in ids]

    def chat(self, turns: list[tuple[str, str]]) -> Ids:
        """A conversation, one line a message."""
        return self.encode("".join(f"{role}: {text}\n" for role, text in turns))


Tokens = ByteRule | FileTokenizer


def tokens_by(path: str | None) -> Tokens:
    """The rule, or the tokenizer at a path."""
    return ByteRule() if path is None else FileTokenizer(path)
