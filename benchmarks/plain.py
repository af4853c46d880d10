"""The same engine written the plain way: every running request is touched at every step.

It exists to be obviously right and to be raced against. It shares with the package the policies, the cost and
the nouns, and nothing of the ledger, the tick, the heap or the block counting. A test says that it gives
the same schedule to the last bit; a benchmark says how much slower it is. The compiled check of
plans reads a ledger only, so both need plain Python.
"""

from __future__ import annotations

from math import inf
from typing import cast

from headgate.core.ledger import Ledger
from headgate.core.plan import ALL, NONE, Plan, check
from headgate.core.policy import BatchPolicy, End, Observer, Steps
from headgate.core.request import Identity
from headgate.core.view import Limits
from headgate.cost.model import Chunk, Shape
from headgate.sim.engine.engine import Engine
from headgate.workloads.workload import Workload


class PlainRequest(Identity):
    """One request with its own counters."""

    def __init__(self, workload: Workload, row: int, arrival: float) -> None:
        kind = workload.kinds[workload.kind[row]]
        guess = int(workload.guess[row]) if workload.guess[row] >= 0 else None
        prompt, limit, priority = (
            int(each[row]) for each in (workload.prompt, workload.limit, workload.priority)
        )
        super().__init__(row, arrival, prompt, limit, kind.name, guess, priority, kind.slo)
        self.queued = arrival
        self.todo = self.prompt
        self.generated = 0
        self.last_token: float | None = None
        self.evictions = 0
        self.wasted = 0
        self.cached = 0
        self.kv = 0
        self.slot = 0
        self.true_output = int(workload.output[row])

    @property
    def room(self) -> int:
        """This engine has no prefix cache."""
        return self.todo


class PlainEngine:
    """One engine, one policy, one workload; asks the policy at every step. Is its own view."""

    def __init__(
        self, engine: Engine, policy: BatchPolicy, workload: Workload, observers: tuple[Observer, ...] = ()
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.workload = workload
        self.observers = (*observers, policy)
        self.now = 0.0
        self.waiting: dict[int, PlainRequest] = {}
        self.prefilling: dict[int, PlainRequest] = {}
        self.decoding: dict[int, PlainRequest] = {}
        self.limits = Limits(engine.batch_tokens, engine.running, engine.block)
        self.kv_total = engine.kv_tokens // engine.block * engine.block
        self.kv_shared = 0  # no cache
        self.longest = engine.longest
        self.asked_now = False
        self.admitted = 0
        self.next_row = 0
        self.outstanding = 0

    @property
    def running(self) -> list[PlainRequest]:
        """Everybody who holds KV."""
        return [*self.decoding.values(), *self.prefilling.values()]

    @property
    def oldest_token(self) -> float:
        """Of those that decode."""
        return min((request.last_token or 0.0 for request in self.decoding.values()), default=inf)

    @property
    def kv_free(self) -> int:
        """Tokens, whole free blocks only; counted afresh at every call."""
        return self.kv_total - sum(self._blocks(request.kv) for request in self.running) * self.engine.block

    def run(self) -> None:
        """Serve everybody."""
        while self.next_row < len(self.workload) or self.waiting or self.running:
            self._receive()
            if not (self.waiting or self.running):
                self.now = max(self.now, self._next_arrival())
                continue
            plan = self.policy.plan(self)
            faults = check(plan, cast(Ledger, self))  # plain Python takes any view
            assert not faults, faults
            for observer in self.observers:
                observer.planned(plan, self.now, self.policy.gauges())
            for id in plan.evict:
                self._evict(self.decoding.get(id) or self.prefilling[id])
            self.asked_now = not plan.evict  # after an eviction the plan is no longer for what there is
            if not self._step(plan) and self.asked_now:
                self.now = max(self.now, min(self._next_arrival(), plan.until.time))

    def _next_arrival(self) -> float:
        if self.workload.closed or self.next_row == len(self.workload):
            return inf
        return float(self.workload.arrival[self.next_row])

    def _may_arrive(self) -> bool:
        if self.next_row == len(self.workload):
            return False
        if self.workload.closed:
            return self.outstanding < int(self.workload.clients[self.next_row])
        return float(self.workload.arrival[self.next_row]) <= self.now

    def _receive(self) -> None:
        while self._may_arrive():
            row = self.next_row
            arrival = self.now if self.workload.closed else float(self.workload.arrival[row])
            request = PlainRequest(self.workload, row, arrival)
            self.next_row += 1
            self.outstanding += 1
            self._tell("arrived", request, arrival)
            if request.prompt >= self.longest:
                self._leave(request, arrival, End.REFUSED)
            else:
                self.waiting[request.id] = request

    def _step(self, plan: Plan) -> bool:
        decodes = self._decodes(plan)
        evicted = False
        while decodes and self._growth(decodes) * self.engine.block > self.kv_free:
            if not self.asked_now and not evicted:
                return False
            self._evict(self._newest())
            evicted = True
            decodes = [request for request in decodes if request.id in self.decoding]
        chunks = [] if evicted else self._chunks(plan, decodes)
        if not decodes and not chunks:
            return False
        start = self.now
        context = sum(request.prompt + request.generated for request in decodes)
        prefill = sum(tokens for _, tokens in chunks)
        behind = sum(request.kv for request, _ in chunks)
        self.now = start + self._seconds(decodes, chunks)
        for request in decodes:
            request.kv += 1
            request.generated += 1
            request.last_token = self.now
        for request, tokens in chunks:
            request.kv += tokens
            request.todo -= tokens
        kv = self.kv_total - self.kv_free
        for observer in self.observers:
            observer.stepped(Steps(start, [self.now], len(decodes), context, prefill, behind, kv))
        self._complete(chunks)
        self._finish()
        return True

    def _seconds(self, decodes: list[PlainRequest], chunks: list[tuple[PlainRequest, int]]) -> float:
        """How long these take; a test may price every request by its own position instead."""
        context = sum(request.prompt + request.generated for request in decodes)
        parts = tuple(Chunk(request.kv, tokens, tokens == request.todo) for request, tokens in chunks)
        prefill, behind = sum(part.tokens for part in parts), sum(part.start for part in parts)
        return self.engine.cost.seconds(Shape(len(decodes), context, prefill, behind, parts))

    def _decodes(self, plan: Plan) -> list[PlainRequest]:
        if plan.decode is ALL:
            return list(self.decoding.values())
        if plan.decode is NONE:
            return []
        return [request for request in self.decoding.values() if request.id in plan.decode]

    def _growth(self, decodes: list[PlainRequest]) -> int:
        return sum(self._blocks(request.kv + 1) - self._blocks(request.kv) for request in decodes)

    def _chunks(self, plan: Plan, decodes: list[PlainRequest]) -> list[tuple[PlainRequest, int]]:
        room = int(min(plan.budget, self.engine.batch_tokens) - len(decodes))
        room = int(min(room, plan.chunk))
        spare = self.kv_free // self.engine.block - self._growth(decodes)
        chunks: list[tuple[PlainRequest, int]] = []
        for id in plan.prefill:
            if room <= 0:
                break
            request = self.waiting.get(id)
            if request is not None:
                if len(self.running) >= self.engine.running or self._blocks(request.todo) > spare:
                    break
                del self.waiting[id]
                self.prefilling[id] = request
                self.admitted += 1
                request.slot = self.admitted
                self._tell("admitted", request, self.now)
            else:
                request = self.prefilling[id]
            tokens = min(room, request.todo)
            need = self._blocks(request.kv + tokens) - self._blocks(request.kv)
            if need > spare:
                if not chunks and self.asked_now:
                    self._evict(self._newest())
                break
            spare -= need
            room -= tokens
            chunks.append((request, tokens))
        return chunks

    def _complete(self, chunks: list[tuple[PlainRequest, int]]) -> None:
        for request, _ in chunks:
            if request.todo == 0:
                del self.prefilling[request.id]
                self.decoding[request.id] = request
                request.generated += 1
                request.last_token = self.now
                self._tell("prefilled", request, self.now)

    def _finish(self) -> None:
        for request in sorted(self.decoding.values(), key=lambda request: request.id):
            whole = min(request.true_output, request.limit, self.longest - request.prompt)
            if request.generated == whole:
                del self.decoding[request.id]
                stopped = request.generated == request.true_output
                self._leave(request, self.now, End.STOPPED if stopped else End.LIMIT)

    def _newest(self) -> PlainRequest:
        return max(self.running, key=lambda request: request.slot)

    def _evict(self, request: PlainRequest) -> None:
        self.decoding.pop(request.id, None)
        self.prefilling.pop(request.id, None)
        request.wasted += request.kv
        request.kv = 0
        request.todo = request.prompt + request.generated
        request.evictions += 1
        self.asked_now = False
        self.waiting = {request.id: request} | self.waiting
        self._tell("evicted", request, self.now)

    def _leave(self, request: PlainRequest, now: float, how: End) -> None:
        self.outstanding -= 1
        for observer in self.observers:
            observer.finished(request, now, how)

    def _tell(self, hook: str, request: PlainRequest, now: float) -> None:
        for observer in self.observers:
            getattr(observer, hook)(request, now)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.block)
