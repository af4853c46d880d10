"""KV kept for other engines, and KV that comes from them, beside what the engine's own requests hold."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf

from headgate.live.emulate.job import Job
from headgate.sim.engine.replica import Replica


class Memory:
    """Blocks of an engine that belong to no running request.

    A prompt done for another engine keeps its blocks until they have been read or their lease ends. A request
    that comes with its KV takes blocks before the copy begins, and joins the queue when it is complete: with
    one prompt token left to compute, as in vLLM.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._kept: dict[int, int] = {}  # job number to blocks
        self._wanted: deque[Job] = deque()  # their KV has no blocks here yet
        self._copies: list[tuple[float, int, Job]] = []  # a heap by the end of the copy
        self._order = 0
        self.fixed, self.per_token = 0.002, 147456 / 50e9  # seconds of a copy

    def seconds(self, tokens: int) -> float:
        """To copy the KV of so many tokens."""
        return self.fixed + self.per_token * tokens

    @property
    def busy(self) -> bool:
        """Is KV on its way?"""
        return bool(self._wanted or self._copies)

    @property
    def kept(self) -> int:
        """Blocks kept for other engines."""
        return sum(self._kept.values())

    @property
    def next_time(self) -> float:
        """When the next copy is complete."""
        return self._copies[0][0] if self._copies else inf

    # -- for other engines ---------------------------------------------------------------------------------

    def keep(self, job: Job) -> None:
        """Its prompt's blocks, which have just been given back, stay."""
        blocks, cache = self._replica.blocks, self._replica.cache
        need = blocks.of(job.prompt)
        if cache is None:
            blocks.take(need)
        else:
            assert job.entry is not None
            found = cache.find(job.content, job.prompt + 1)
            cache.hold(job.entry, job.content, found)
            cache.take(need - found.blocks)
        self._kept[job.id] = need

    def release(self, id: int) -> bool:
        """They have been read, or nobody wants them; False: they are gone already."""
        need = self._kept.pop(id, None)
        if need is None:
            return False
        if self._replica.cache is None:
            self._replica.blocks.give(need)
        else:
            self._replica.cache.release(id, 0, need)
        self._replica.lease.ended = True
        return True

    # -- from other engines --------------------------------------------------------------------------------

    def expect(self, job: Job) -> None:
        """Its KV is to come here."""
        self._wanted.append(job)

    def landed(self, now: float) -> list[Job]:
        """Begin the copies there is room for; those that are complete by now."""
        blocks, ledger = self._replica.blocks, self._replica.ledger
        while self._wanted:
            job = self._wanted[0]
            need = blocks.of(job.loaded)
            if need > blocks.total:
                job.loaded = 0  # it will be refused
            elif need > blocks.free - ledger.rolling:
                break
            blocks.take(need if job.loaded else 0)
            self._wanted.popleft()
            self._order += 1
            heappush(self._copies, (max(now, job.arrival) + self.seconds(job.loaded), self._order, job))
        done = []
        while self._copies and self._copies[0][0] <= now:
            done.append(heappop(self._copies)[2])
        return done

    def forget(self, job: Job) -> None:
        """Its client hung up before its KV was here; a copy that has begun gives its blocks back."""
        if job in self._wanted:
            self._wanted.remove(job)
            return
        copies = [each for each in self._copies if each[2] is not job]
        if len(copies) < len(self._copies):
            self._copies = sorted(copies)
            self._replica.blocks.give(self._replica.blocks.of(job.loaded))
            self._replica.lease.ended = True

    def unblock(self) -> bool:
        """Nothing runs because KV that waits for a seat fills the memory: the newest is computed again."""
        ledger, blocks = self._replica.ledger, self._replica.blocks
        head = next(iter(ledger.waiting.values()), None)
        if head is None or ledger.decoding or ledger.prefilling or blocks.of(head.room) <= blocks.free:
            return False
        for entry in reversed(ledger.waiting.values()):
            if held := entry.held_kv:
                blocks.give(blocks.of(held))
                entry.wasted += held
                entry.todo, entry.cached = entry.prompt + entry.generated, 0
                self._replica.lease.ended = True
                return True
        return False
