"""Lengths and times the router cannot see and has to guess: learned from what passes by."""

from __future__ import annotations

from headgate.live.route.body import Asked

TOKENS_PER_BYTE = 0.25  # before anything was learned
SMOOTHING = 0.05
FIRST_TOKEN = 0.5  # seconds, before any stream of a class was seen
MEAN_OUTPUT = 128.0


class Estimates:
    """Per class: prompt tokens per byte, time to first token, output tokens."""

    def __init__(self) -> None:
        self.error = 0.0  # mean relative error of prompt lengths
        self._ratio: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._output: dict[str, float] = {}

    def prompt(self, kind: str, asked: Asked) -> int:
        """Prompt tokens of a request, at least 1."""
        if asked.prompt_tokens is not None:
            return asked.prompt_tokens
        return max(1, round(asked.prompt_bytes * self._ratio.get(kind, TOKENS_PER_BYTE)))

    def saw_usage(self, kind: str, asked: Asked, prompt: int, output: int) -> None:
        if prompt > 0 and asked.prompt_bytes > 0 and asked.prompt_tokens is None:
            wrong = abs(self.prompt(kind, asked) - prompt) / prompt
            self.error += SMOOTHING * (wrong - self.error)
            _blend(self._ratio, kind, prompt / asked.prompt_bytes)
        if output > 0:
            _blend(self._output, kind, float(output))

    def saw_first_token(self, kind: str, seconds: float) -> None:
        """A stream's first token came so long after it was sent to its engine."""
        _blend(self._first, kind, seconds)

    def first_token(self, kind: str) -> float:
        """Seconds from sending a request to its first token, for answers that do not stream."""
        return self._first.get(kind, FIRST_TOKEN)

    def output(self, kind: str) -> float:
        """Mean output tokens of the class."""
        return self._output.get(kind, MEAN_OUTPUT)


def _blend(table: dict[str, float], kind: str, value: float) -> None:
    old = table.get(kind)
    table[kind] = value if old is None else old + SMOOTHING * (value - old)
