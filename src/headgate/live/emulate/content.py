"""What a request's KV blocks hold, as an engine's prefix cache knows them: a key for each full block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.kv.prefix import Pieces
from headgate.live.emulate.tokens import LITTLE, Ids

KEY = (1 << 62) - 1


def content(prompt: Ids, output: Sequence[int], salt: str | None, block: int) -> Pieces:
    """Blocks of the prompt and of the answer it will get; the salt is in the first one, as in vLLM."""
    data = prompt.tobytes() + np.array(output, LITTLE).tobytes()
    size = block * LITTLE.itemsize
    keys = [hash(data[at : at + size]) & KEY for at in range(0, len(data) - size + 1, size)]
    if keys and salt is not None:
        keys[0] = hash((salt, keys[0])) & KEY
    return [*((key, block) for key in keys), (-1, len(data) % size // LITTLE.itemsize)]  # the last: half-full
