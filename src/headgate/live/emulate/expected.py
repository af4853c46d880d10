"""The answer an emulator will give, computed by whoever wants to check it."""

from __future__ import annotations

from typing import Any

import numpy as np

from headgate.live.emulate.bodies import turns_of
from headgate.live.emulate.text import Text, fingerprint
from headgate.live.emulate.tokens import LITTLE, ByteRule, Tokens

RULE = ByteRule()


def answer(prompt: str | list[int], count: int, choice: int = 0, tokens: Tokens = RULE) -> str:
    """The first `count` tokens of the answer to a prompt; `choice` counts the `n` of the prompt."""
    ids = tokens.encode(prompt) if isinstance(prompt, str) else np.array(prompt, LITTLE)
    return Text(fingerprint(ids.tobytes()), choice, tokens.vocabulary).text(0, count)


def chat_answer(messages: list[dict[str, Any]], count: int, choice: int = 0, tokens: Tokens = RULE) -> str:
    """The same for a chat."""
    ids = tokens.chat(turns_of(messages))
    return Text(fingerprint(ids.tobytes()), choice, tokens.vocabulary).text(0, count)
