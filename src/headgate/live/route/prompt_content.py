"""What a prompt begins with, as keys of its first parts: enough to send it where its prefix is cached."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from headgate.kv.prefix import Pieces
from headgate.live.route.body import Asked

BYTES = 4  # of a token, in text; a token id is four bytes, too
FIRST = 128  # tokens of the first parts
ALIKE = 16  # parts of one length; the next ones are twice as long
PARTS = 6 * ALIKE  # at most: 129,024 tokens
MOST_BYTES = BYTES * FIRST * ALIKE * (2 ** (PARTS // ALIKE) - 1)
DIGITS = 12  # characters of a token id in JSON, with what separates it from the next
LONGEST_SESSION = 256  # bytes
KEY = (1 << 62) - 1

_numbers = count(1)
_ids = msgspec.json.Decoder(list[int])


class Content(NamedTuple):
    """A prompt for a prefix index: its pieces, and its tokens in their measure, four bytes each."""

    pieces: Pieces
    tokens: int
    session: bytes | None


def content_of(asked: Asked) -> Content:
    """Keys of a prompt's parts. A match is a sixteenth too short at most, for parts grow with their place.

    Token ids are taken as such; text and messages as the bytes of their JSON, in which a longer conversation
    begins with a shorter one. Model (which names an adapter, too), cache salt and tools are in the first key.
    At most PARTS parts and MOST_BYTES bytes are looked at, whatever a client sends; the rest counts as new.
    """
    data, tokens = _measured(asked)
    pieces: list[tuple[int, int]] = []
    start, length = 0, FIRST * BYTES
    first: object = (asked.model, *(bytes(memoryview(each)[:MOST_BYTES]) for each in asked.salt))
    while start < len(data):
        part = data[start : start + length]
        pieces.append((hash((first, part)) & KEY, max(1, len(part) // BYTES)))
        start, first = start + length, None
        if len(pieces) % ALIKE == 0:
            length *= 2
    rest = max(0, tokens - sum(size for _, size in pieces))
    pieces.append((-next(_numbers), rest))  # what it puts out, and what was not looked at
    session = bytes(memoryview(asked.session)[:LONGEST_SESSION])
    return Content(pieces, sum(size for _, size in pieces), session or None)


def _measured(asked: Asked) -> tuple[bytes, int]:
    """The beginning of the prompt in bytes, and the length of all of it in tokens of four bytes."""
    whole = memoryview(asked.text)
    if asked.prompt_tokens is None:  # without the bracket at the end
        return bytes(whole[: min(MOST_BYTES, len(whole) - 1)]), len(whole) // BYTES
    most = MOST_BYTES // BYTES * DIGITS
    text = bytes(whole[:most])
    if len(whole) > most:
        text = text.rpartition(b",")[0] + b"]"
    try:
        ids = np.array(_ids.decode(text), dtype=np.uint32).tobytes()
    except (msgspec.DecodeError, OverflowError, ValueError):  # the engine will say what is wrong with it
        return b"", asked.prompt_tokens
    return ids[:MOST_BYTES], asked.prompt_tokens
