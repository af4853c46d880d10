"""One port: its engines, what they share, and how many requests may be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from aiohttp import web

from headgate.core.policy import Observer
from headgate.live.emulate.clock import Clock
from headgate.live.emulate.engine import EmulatedEngine
from headgate.live.emulate.faults import Fault, Faults
from headgate.live.emulate.kv import Exports
from headgate.live.emulate.made import Made
from headgate.live.emulate.peers import Peers
from headgate.live.emulate.problems import busy
from headgate.live.emulate.tokens import Tokens

WAITING_WEIGHT = 4  # a waiting request counts as four running ones when vLLM chooses a rank


class Place:
    """What the handlers of one port know."""

    def __init__(
        self, made: Made, clock: Clock, tokens: Tokens, peers: Peers, observers: Sequence[Sequence[Observer]]
    ) -> None:
        """With an engine for each of the `observers`, which hear what happens in it."""
        options = made.options
        self.made, self.clock, self.tokens, self.peers = made, clock, tokens, peers
        self.engines = [
            EmulatedEngine(
                made.engine, made.policy(), clock, asynchronous=made.asynchronous, observers=tuple(hear)
            )
            for hear in observers
        ]
        for engine in self.engines:
            engine.memory.fixed = options.transfer_delay
            engine.memory.per_token = options.transfer_per_token
            if options.crash_after is not None:
                engine.crash_at = options.crash_after
        self.exports = [Exports(engine, options.kv_lease) for engine in self.engines]
        self.faults = Faults(options.fail_rate, options.fault)
        self.faults.by_header = options.fault_header
        if options.stall_at is not None:
            self.faults.always = Fault("stall", options.stall_at)
        self.port = 0
        self.inside = 0  # requests being answered
        self.bytes = 0  # of bodies being read
        self.draining = False
        self.fingerprint = f"vllm-0.32.0-{sha256(made.model.encode()).hexdigest()[:8]}"
        self._held = options.hold or 0
        if self._held:
            for engine in self.engines:
                engine.hold()
        self._turn = itertools.count()

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """While a body is read and understood; what it yields counts the bytes, and refuses too many."""
        mine = 0

        def count(more: int) -> None:
            nonlocal mine
            mine += more
            self.bytes += more
            if self.bytes > self.made.options.max_bytes:
                raise busy()

        try:
            yield count
        finally:
            self.bytes -= mine

    def choose(self, wanted: int | None) -> int:
        """The rank of a request: the one it names, else the least loaded as vLLM counts it."""
        if wanted is not None and 0 <= wanted < len(self.engines):
            return wanted
        if len(self.engines) == 1:
            return 0
        start = next(self._turn)
        order = [(start + step) % len(self.engines) for step in range(len(self.engines))]
        return min(order, key=lambda rank: self._load(self.engines[rank]))

    def check_room(self, engine: EmulatedEngine, more: int, tokens: int) -> None:
        """503 where the queue is full, as vLLM answers."""
        options, rejected = self.made.options, engine.tally.rejected
        spare = self.made.engine.running - engine.running
        waiting = engine.waiting + more - max(0, spare)
        if options.max_queued is not None and waiting > options.max_queued:
            rejected["max_num_queued_reqs"] += 1
            raise busy()
        if options.max_queued_tokens is not None:
            queued = sum(entry.prompt for entry in engine.replica.ledger.waiting.values())
            if queued + tokens > options.max_queued_tokens:
                rejected["max_num_queued_tokens"] += 1
                raise busy()

    def arrived(self) -> None:
        """A request is in; a held clock begins when enough of them are."""
        if self._held:
            self._held -= 1
            if not self._held:
                self.go()

    def go(self) -> None:
        """Let a held clock run."""
        self._held = 0
        for engine in self.engines:
            engine.go()

    @staticmethod
    def _load(engine: EmulatedEngine) -> int:
        return engine.waiting * WAITING_WEIGHT + engine.running


PLACE: web.AppKey[Place] = web.AppKey("place", Place)
