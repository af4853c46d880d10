"""What a router knows of prefixes: contents of requests, and what each engine has probably computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from headgate.core.ledger import Entry, Ledger
from headgate.core.request import Request
from headgate.core.view import Limits
from headgate.cost.model import StepCost
from headgate.kv.prefix import Pieces, PrefixBlocks


class Sharing(NamedTuple):
    content: Callable[[Request], Pieces | None]  # None: nothing is known of it
    cost: StepCost | None  # None: every token costs the same
    kv_tokens: int  # of one engine
    block: int
    slots: int = 256  # of one engine
    session: Callable[[Request], Hashable | None] = lambda request: None
    measure: Callable[[Request], int] = lambda request: request.prompt  # tokens of its prompt in its pieces


UNKNOWN = Sharing(lambda request: None, None, 1, 1)


class PrefixIndex:
    """What an engine probably has: the last prompts sent to it, as many as its KV holds.

    The engine's own cache differs by outputs, by the order in which requests end, and by what it computes
    twice. The memory of an index is bounded by the engine's blocks. What was not used for `ttl` seconds is
    forgotten; 0: nothing is, unless memory ends.
    """

    def __init__(self, kv_tokens: int, block: int, ttl: float = 0.0) -> None:
        self._pool = PrefixBlocks(max(1, kv_tokens // block), block, lambda entry: 0)
        self._ledger = Ledger(Limits(1, 1, block), 0)
        self._ttl = ttl

    def cached(self, pieces: Pieces, prompt: int, now: float = 0.0) -> int:
        if self._ttl:
            self._pool.forget(now - self._ttl)
        return self._pool.find(pieces, prompt).blocks * self._pool.size

    def sent(self, pieces: Pieces, prompt: int, now: float = 0.0) -> None:
        pool, held = self._pool, self._pool.of(prompt)
        if held > pool.total:
            return
        found = pool.find(pieces, prompt)
        pool.hold(Entry(self._ledger, 0, 0.0, prompt, 1), pieces, found)
        pool.take(held - found.blocks)
        pool.learn(0, prompt)
        pool.stamp(0, now)
        pool.release(0, prompt, held)
