"""A language model without arithmetic: every token follows from all tokens before it, and from nothing else.

The *state* after a token is a number that depends on the whole history. KV holds states; whoever reads one
wrong state says another token from then on, so that no mix-up of memory goes unnoticed.
"""

from __future__ import annotations

WORDS = 997  # tokens there are; a prime, as is the modulus
MODULUS = (1 << 61) - 1


def beginning(adapter: int = 0) -> int:
    """The state before the first token; each LoRA adapter is a model of its own."""
    return 12345 + adapter


def heard(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * 1_000_003 + token + 1) % MODULUS


def said(state: int) -> int:
    """The token that follows."""
    return (state >> 11) % WORDS


class Truth:
    """What one request must read and say, worked out without any engine."""

    def __init__(
        self,
        prompt: list[int],
        limit: int,
        stops: tuple[int, ...] = (),
        adapter: int = 0,
        longest: int = 1 << 30,
    ) -> None:
        self.prompt = len(prompt)
        self.adapter = adapter
        self.tokens: list[int] = []
        self.states: list[int] = []
        for token in prompt:
            self._hear(token)
        self.answer: list[int] = []
        while len(self.answer) < limit and len(prompt) + len(self.answer) < longest:
            self.answer.append(self.token(len(prompt) + len(self.answer)))
            if self.answer[-1] in stops:
                break

    def token(self, position: int) -> int:
        """The token at that position; beyond the answer too, because engines may run ahead."""
        while len(self.tokens) <= position:
            self._hear(said(self.states[-1]))
        return self.tokens[position]

    def state(self, position: int) -> int:
        """The state after the token at that position."""
        self.token(position)
        return self.states[position]

    def _hear(self, token: int) -> None:
        before = self.states[-1] if self.states else beginning(self.adapter)
        self.tokens.append(token)
        self.states.append(heard(before, token))
