"""Routers that know what each engine has computed: an index per engine, fed with what was sent there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headgate.core.errors import InputError
from headgate.core.ledger import Entry, Ledger
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.core.view import Limits
from headgate.cost.model import Chunk, Shape, StepCost
from headgate.kv.prefix import Pieces, PrefixBlocks
from headgate.methods.balance.balance import Balance
from headgate.methods.fluid.placement import Draw


class Sharing(NamedTuple):
    """What a router needs to know of prefixes."""

    content: Callable[[Request], Pieces | None]  # None: nothing is known of it
    cost: StepCost | None  # None: every token costs the same
    kv_tokens: int  # of one engine
    block: int


UNKNOWN = Sharing(lambda request: None, None, 1, 1)


class PrefixIndex:
    """What an engine probably has: the last prompts sent to it, as many as its KV holds.

    The engine's own cache differs by outputs, by the order in which requests end, and by what it computes
    twice. The memory of an index is bounded by the engine's blocks.
    """

    def __init__(self, kv_tokens: int, block: int) -> None:
        self._pool = PrefixBlocks(max(1, kv_tokens // block), block, lambda entry: 0)
        self._ledger = Ledger(Limits(1, 1, block), 0)

    def cached(self, pieces: Pieces, prompt: int) -> int:
        """Prompt tokens it would find."""
        return self._pool.find(pieces, prompt).blocks * self._pool.size

    def sent(self, pieces: Pieces, prompt: int) -> None:
        """The engine computes this prompt, or what is missing of it."""
        pool, held = self._pool, self._pool.of(prompt)
        if held > pool.total:
            return
        found = pool.find(pieces, prompt)
        pool.hold(Entry(self._ledger, 0, 0.0, prompt, 1), pieces, found)
        pool.take(held - found.blocks)
        pool.learn(0, prompt)
        pool.release(0, prompt, held)


class PrefixAware(Balance):
    """The engine on which a request's prompt is done first: seconds of prefill that wait there, and those of
    what that engine has not cached of it. Of equals, one at random.

    Both are prices of the card, so there is no weight to set: a cached prefix is worth a longer queue by the
    seconds it saves. Dynamo's rule counts blocks instead, with a weight. Where nothing is known of contents
    or prices, it is the engine with the fewest prompt tokens to prefill.
    """

    def __init__(self, engines: int, draw: Draw, sharing: Sharing | None = None) -> None:
        super().__init__(engines)
        self.draw, self.sharing = draw, sharing or UNKNOWN
        self._indices: dict[int, PrefixIndex] = {}
        self._waits = dict.fromkeys(
            range(engines), 0.0
        )  # what is sent to an engine and not done, as it is priced
        self._shares: dict[int, tuple[int, float]] = {}  # of each request: its engine and its part of that

    def choose(self, request: Request) -> int:
        """The least of waiting and computing."""
        pieces = self.sharing.content(request)
        costs = [(self._waits.get(each, 0.0) + self.price(request, pieces, each), each) for each in self.open]
        least = min(costs)[0]
        best = [engine for cost, engine in costs if cost == least]
        return best[int(self.draw() * len(best))]

    def price(self, request: Request, pieces: Pieces | None, engine: int) -> float:
        """Seconds its prompt takes on that engine, alone in one step."""
        cached = self.cached(request, pieces, engine)
        tokens = request.prompt - cached
        if self.sharing.cost is None:
            return float(tokens)
        chunk = Chunk(cached, tokens, True)
        return self.sharing.cost.seconds(Shape(0, 0, tokens, cached, (chunk,)))

    def cached(self, request: Request, pieces: Pieces | None, engine: int) -> int:
        """Tokens of its prompt that the engine probably has."""
        index = self._indices.get(engine)
        return index.cached(pieces, request.prompt) if pieces and index else 0

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its prompt waits no more."""
        self._done(request)
        super().prefilled(request, replica, now)

    def lift(self, request: Request) -> int | None:
        self._done(request)
        return super().lift(request)

    def left(self, request: Request, now: float, how: End) -> None:
        self._done(request)
        super().left(request, now, how)

    def _weigh(self, request: Request, engine: int) -> None:
        super()._weigh(request, engine)
        pieces = self.sharing.content(request)
        seconds = self.price(request, pieces, engine)
        self._shares[request.id] = engine, seconds
        self._waits[engine] = self._waits.get(engine, 0.0) + seconds
        if pieces:
            if engine not in self._indices:
                self._indices[engine] = PrefixIndex(self.sharing.kv_tokens, self.sharing.block)
            self._indices[engine].sent(pieces, request.prompt)

    def _done(self, request: Request) -> None:
        engine, seconds = self._shares.pop(request.id, (-1, 0.0))
        if engine >= 0:
            self._waits[engine] -= seconds


class Overlap(PrefixAware):
    """Dynamo's rule: the least of `weight` times the prompt blocks to compute, and the blocks in use.

    Blocks in use are those of all requests at the engine, as far as the router knows them. We differ: ties
    are broken at random, as with Dynamo's temperature 0, and blocks are those of the index, not of events.
    """

    def __init__(self, engines: int, draw: Draw, sharing: Sharing | None = None, weight: float = 1.0) -> None:
        super().__init__(engines, draw, sharing)
        if not weight >= 0:
            raise InputError(f"router overlap: weight={weight:g} is below 0")
        self.weight = weight

    def price(self, request: Request, pieces: Pieces | None, engine: int) -> float:
        """In blocks."""
        tokens = request.prompt - self.cached(request, pieces, engine)
        return self.weight * tokens / self.sharing.block + request.prompt / self.sharing.block

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        """Its blocks stay in use; those of its prompt are computed."""
        engine, blocks = self._shares.get(request.id, (-1, 0.0))
        held = request.prompt / self.sharing.block
        if engine >= 0 and blocks > held:
            self._waits[engine] -= blocks - held
            self._shares[request.id] = engine, held
        Balance.prefilled(self, request, replica, now)
