"""The price of handing KV from one engine to another."""

from __future__ import annotations

from typing import NamedTuple

from headgate.core.errors import InputError


class Transfer(NamedTuple):
    """How long it takes to copy the KV of a request to another engine.

    Every copy has the link for itself: copies that share one are not slowed down. The engine that sends may
    be busy with it: `busy` seconds per request in which it runs no step.
    """

    fixed: float = 0.0  # seconds, whatever the size
    per_token: float = 0.0  # seconds: bytes of KV per token over the bandwidth
    busy: float = 0.0  # seconds of the sender, for each request, between two of its steps

    def checked(self) -> Transfer:
        for name, value in self._asdict().items():
            if not 0 <= value < float("inf"):
                raise InputError(f"transfer: {name} is {value} s; give 0 or more")
        return self

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens
