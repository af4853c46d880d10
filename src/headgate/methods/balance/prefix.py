"""Routers that know what each engine has cached: the least cost, where a cached prefix costs nothing."""

from __future__ import annotations

from collections import defaultdict

from headgate.core.errors import InputError
from headgate.core.fleet import ENDLESS, Fleet, Move, Replica, RoutePolicy, Routing
from headgate.core.policy import End
from headgate.core.request import Request
from headgate.cost.model import Chunk, Shape
from headgate.kv.prefix import Pieces
from headgate.methods.balance.balance import Balance
from headgate.methods.balance.prefix_index import UNKNOWN, PrefixIndex, Sharing
from headgate.methods.fluid.gates import Draw


class KnowsPrefixes(Balance):
    """The engine with the least `cost`; of equals, one at random.

    The index is approximate: what was sent to an engine, forgotten after `ttl` seconds without use (0: only
    where memory ends). `exact` asks the engines' own caches, which only simulated engines can answer.
    An engine is chosen when the router is asked, because costs may depend on what engines report.
    """

    reads_contents = True

    def __init__(
        self, engines: int, draw: Draw, sharing: Sharing | None = None, ttl: float = 0.0, exact: bool = False
    ) -> None:
        super().__init__(engines)
        if not ttl >= 0:
            raise InputError(f"router: ttl={ttl:g} s is below 0; give 0 to forget nothing")
        self.draw, self.sharing = draw, sharing or UNKNOWN
        self.ttl, self.exact = ttl, exact
        self.now = 0.0
        self.backlogs: defaultdict[int, Backlog] = defaultdict(Backlog)
        self._indices: dict[int, PrefixIndex] = {}
        self._new: dict[int, tuple[Request, bool]] = {}  # no engine yet; whether it goes before others
        self._fleet: Fleet | None = None

    def cost(self, request: Request, engine: int, cached: int) -> float:
        raise NotImplementedError

    def work(self, request: Request, cached: int) -> float:
        return float(request.prompt - cached)

    def choose(self, request: Request) -> int:
        pieces = self.sharing.content(request)
        costs = [(self.cost(request, at, self.cached(request, pieces, at)), at) for at in self.open]
        least = min(costs)[0]
        best = [engine for cost, engine in costs if cost == least]
        return best[int(self.draw() * len(best))]

    def cached(self, request: Request, pieces: Pieces | None, engine: int) -> int:
        if pieces is None:
            return 0
        if self.exact and self._fleet is not None:
            return self._fleet.replicas[engine].cached(request)
        index = self._indices.get(engine)
        if index is None:
            return 0
        tokens = self.sharing.measure(request)
        return index.cached(pieces, tokens, self.now) * request.prompt // max(1, tokens)

    def arrived(self, request: Request, now: float) -> None:
        self.now = now
        self._new[request.id] = request, False

    def returned(self, request: Request, now: float) -> None:
        self.now = now
        self.lift(request)
        self._lines.drop(request.id)
        self._new[request.id] = request, True

    def route(self, fleet: Fleet) -> Routing:
        self._fleet, self.now = fleet, fleet.now
        if self._new:
            new, self._new = self._new, {}
            for request, first in new.values():
                self._give(request, self.choose(request), first)
        return super().route(fleet)

    def moved(self, request: Request, move: Move, now: float) -> None:
        self.now = now
        self._new.pop(request.id, None)
        super().moved(request, move, now)

    def prefilled(self, request: Request, replica: int, now: float) -> None:
        self.backlogs[replica].done(request.id, now)
        super().prefilled(request, replica, now)

    def finished(self, request: Request, replica: int, now: float) -> None:
        self.now = now
        super().finished(request, replica, now)

    def left(self, request: Request, now: float, how: End) -> None:
        self.now = now
        self._new.pop(request.id, None)
        super().left(request, now, how)

    def lift(self, request: Request) -> int | None:
        engine = super().lift(request)
        if engine is not None:
            self._forget(request, engine)
        return engine

    def adopt(self, fleet: Fleet, before: RoutePolicy | None = None) -> None:
        self._fleet, self.now = fleet, fleet.now
        super().adopt(fleet, before)

    def engines_changed(self, fleet: Fleet) -> None:
        """An engine that is closed may come back without its KV."""
        super().engines_changed(fleet)
        self._indices = {engine: index for engine, index in self._indices.items() if engine in self.open}

    # -- state of engines

    def _weigh(self, request: Request, engine: int) -> None:
        super()._weigh(request, engine)
        self._expect(request, engine)

    def _expect(self, request: Request, engine: int) -> None:
        pieces, backlog = self.sharing.content(request), self.backlogs[engine]
        backlog.add(request.id, self.work(request, self.cached(request, pieces, engine)), self.now)
        backlog.context += request.prompt
        if pieces is not None and not self.exact:
            if engine not in self._indices:
                sharing = self.sharing
                self._indices[engine] = PrefixIndex(sharing.kv_tokens, sharing.block, self.ttl)
            self._indices[engine].sent(pieces, self.sharing.measure(request), self.now)

    def _forget(self, request: Request, engine: int) -> None:
        backlog = self.backlogs[engine]
        if request.id in backlog.prompts:
            backlog.done(request.id, self.now)
        backlog.context -= request.prompt


class PrefixAware(KnowsPrefixes):
    """The engine on which the request adds the least delay, to itself and to the requests that are there.

    With n requests there, a prompt that takes P seconds behind its cached prefix, and an output of L tokens,

        prompts that wait there + (1 + n) P + L ((n + 1) s(n + 1) - n s(n))

    where s(n) is a decode step of n. The first two are its own time to the first token; n P is what its
    prefill stalls the others; the last is its own decode and what that slows theirs. All are the card's
    seconds, so there is no weight to set. L is the mean output of its class so far, or its guess. Without a
    card tokens of prefill stand for seconds, and decodes count by what a prompt stalls them.
    """

    def __init__(
        self, engines: int, draw: Draw, sharing: Sharing | None = None, ttl: float = 0.0, exact: bool = False
    ) -> None:
        super().__init__(engines, draw, sharing, ttl, exact)
        self._outputs: dict[str, tuple[int, int]] = {}  # of each class: tokens and requests that finished

    def cost(self, request: Request, engine: int, cached: int) -> float:
        backlog, own = self.backlogs[engine], self.work(request, cached)
        output = self._output(request)
        others = self._decoding(backlog, self.loads.load[engine] + self.background.load[engine], output)
        if self.sharing.cost is None:
            return backlog.waits + (1 + others) * own
        context = backlog.context + others * output / 2
        alone = others * self._step(others, context)
        together = (others + 1) * self._step(others + 1, context + request.prompt + output / 2)
        return backlog.left(self.now) + (1 + others) * own + output * (together - alone)

    def work(self, request: Request, cached: int) -> float:
        tokens = request.prompt - cached
        if self.sharing.cost is None:
            return float(tokens)
        return self.sharing.cost.seconds(Shape(0, 0, tokens, cached, (Chunk(cached, tokens, True),)))

    def finished(self, request: Request, replica: int, now: float) -> None:
        tokens, requests = self._outputs.get(request.kind, (0, 0))
        self._outputs[request.kind] = tokens + request.generated, requests + 1
        super().finished(request, replica, now)

    def _decoding(self, backlog: Backlog, there: int, output: float) -> int:
        """Requests that its prefill would stall: those there, as far as slots and KV let them run at once."""
        if not there:
            return 0
        each = backlog.context / there + output / 2
        return min(there, self.sharing.slots - 1, int(self.sharing.kv_tokens / max(each, 1.0)))

    def _output(self, request: Request) -> float:
        if request.guess is not None:
            return float(request.guess)
        tokens, requests = self._outputs.get(request.kind, (0, 0))
        return tokens / requests if requests else 0.0

    def _step(self, decodes: int, context: float) -> float:
        cost = self.sharing.cost
        if cost is None or not decodes:
            return 0.0
        fixed, per_context = cost.decode_line(decodes)
        return max(fixed + per_context * context, cost.decode_floor(decodes))


class Overlap(KnowsPrefixes):
    """Dynamo's rule: the least of `weight` times the prompt blocks to compute, and the blocks in use.

    Both count what is there and what the request adds; prompts count in full until their first token. We
    differ: equal blocks of two requests in use count twice, and blocks are those of the index, not of events.
    """

    def __init__(
        self,
        engines: int,
        draw: Draw,
        sharing: Sharing | None = None,
        weight: float = 1.0,
        ttl: float = 0.0,
        exact: bool = False,
    ) -> None:
        super().__init__(engines, draw, sharing, ttl, exact)
        if not weight >= 0:
            raise InputError(f"router overlap: weight={weight:g} is below 0")
        self.weight = weight

    def cost(self, request: Request, engine: int, cached: int) -> float:
        backlog = self.backlogs[engine]
        prefill = backlog.waits + self.work(request, cached)
        return (self.weight * prefill + backlog.context + request.prompt) / self.sharing.block


WEIGHTS = (3.0, 2.0, 2.0)  # of cached prompts, free KV and short queues
LONGEST = 16_384  # tokens of a prompt that are looked at


class Scored(KnowsPrefixes):
    """llm-d's rule: the highest weighted sum of three scores from 0 to 1, of equals one at random.

    They are the share of the prompt that is cached there, of its first `LONGEST` tokens; the share of the KV
    that is free; and how short its queue is, between the longest (0) and the shortest (1) of all. The weights
    are those that llm-d recommends. What engines report is true now here, and some milliseconds old there.
    Where the driver reports nothing, prompts without a first token and the tokens of all prompts there count.
    """

    _queues = 0, 0  # shortest and longest

    def choose(self, request: Request) -> int:
        waiting = [self._waiting(engine) for engine in self.open]
        self._queues = min(waiting), max(waiting)
        return super().choose(request)

    def cost(self, request: Request, engine: int, cached: int) -> float:
        shortest, longest = self._queues
        matched = min(cached, LONGEST) / max(1, min(request.prompt, LONGEST))
        short = (longest - self._waiting(engine)) / (longest - shortest) if longest > shortest else 1.0
        prefix, kv, queue = WEIGHTS
        return -(prefix * matched + kv * self._free(engine) + queue * short)

    def _waiting(self, engine: int) -> int:
        replica = self._replica(engine)
        return len(self.backlogs[engine].prompts) if replica is None else replica.waiting

    def _free(self, engine: int) -> float:
        replica, whole = self._replica(engine), self.sharing.kv_tokens
        free = whole - self.backlogs[engine].context if replica is None else replica.kv_free
        return min(1.0, max(0.0, free / whole))

    def _replica(self, engine: int) -> Replica | None:
        """The engine, if it reports what it has; endless memory says that it was not asked."""
        replica = None if self._fleet is None else self._fleet.replicas[engine]
        return None if replica is None or replica.kv_free >= ENDLESS else replica


class Backlog:
    """What one engine was sent and has not done: prompts in their order, and the KV of all requests there."""

    __slots__ = ("context", "prompts", "since", "waits")

    def __init__(self) -> None:
        self.prompts: dict[int, float] = {}  # of each prompt, what there is to compute
        self.waits = 0.0  # their sum
        self.since = 0.0  # when the first of them began, as far as one can tell
        self.context = 0  # prompt tokens of all requests there

    def add(self, id: int, work: float, now: float) -> None:
        if not self.prompts:
            self.since = now
        self.prompts[id] = work
        self.waits += work

    def done(self, id: int, now: float) -> None:
        self.waits -= self.prompts.pop(id, 0.0)
        self.since = now
        if not self.prompts:
            self.waits = 0.0  # no rounding errors are left

    def left(self, now: float) -> float:
        """What waits, without what was done of the first prompt meanwhile; where work is in seconds."""
        for first in self.prompts.values():
            return self.waits - min(first, now - self.since)
        return 0.0
