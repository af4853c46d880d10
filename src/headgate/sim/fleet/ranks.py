"""Data-parallel ranks that step together, as vLLM's do for models with experts: one clock, each step as long
as the longest, so the prompt of one rank is a gap of all.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from headgate.core.errors import InputError, RunError
from headgate.core.ledger import Entry, Watchdog
from headgate.core.policy import BatchPolicy
from headgate.record.recorder import FleetRecorder
from headgate.sim.engine.bursts import bursts_of
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.replica import VirtualEngine
from headgate.sim.engine.simulator import PATIENT_DOG, REPORT_EVERY, arrivals_of, guarded
from headgate.workloads.workload import Workload

WAITING = 4  # what a waiting request counts beside a running one, as in vLLM's balancer of ranks


class Rank(VirtualEngine):
    """One rank: a step is composed first, and ends when all ranks have done theirs."""

    step: tuple[float, float, int, int, int, int] | None = None  # composed: start, own end, and what is in it

    def compose(self) -> bool:
        """Choose its next step; False: it has none now, and takes part with an empty one."""
        self._done: list[Entry] = []
        while self.occupied:
            self.ask()
            if self.advance():
                return True
            if self.asked_now:
                return False
        return False

    def land(self, end: float) -> None:
        assert self.step is not None
        start, _, decodes, context, prefill, behind = self.step
        self.step = None
        VirtualEngine._ran_prompts(self, start, end, decodes, context, prefill, behind)
        for entry in self._done:
            VirtualEngine._complete(self, entry)
        self.settle()

    def _ran_prompts(
        self, start: float, end: float, decodes: int, context: int, prefill: int, behind: int
    ) -> None:
        self.step = start, end, decodes, context, prefill, behind

    def _run_decodes(self, start: float, decodes: int, context: int, most: int, stop: float) -> None:
        end = self._pace.decode_ends(decodes, context, 1, start, stop)[0]
        self.step = start, end, decodes, context, 0, 0

    def _complete(self, entry: Entry) -> None:
        self._done.append(entry)


class RankSimulator:
    """Ranks of one kind, each with its policy. A request goes to the rank with the least of 4 x waiting +
    running, as in vLLM. The host and the padding of batches to the largest rank's are not simulated.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: int,
        policy: Callable[[], BatchPolicy],
        workload: Workload,
        *,
        watchdog: float = PATIENT_DOG,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if min(workload.patience.min(), workload.abort.min()) < inf:
            raise InputError(
                "ranks that step together serve every request to its end; drop --patience and --abort"
            )
        self.arrivals = arrivals_of(workload, engine.prefix_cache)
        self.recorder = FleetRecorder([kind.name for kind in workload.kinds], ranks)
        numbered = self.arrivals.numbered
        lengths = numbered(workload.output.tolist())
        contents = numbered(workload.pieces()) if engine.prefix_cache else None
        bursts = bursts_of(engine, workload, numbered)
        self.now = 0.0
        self._progress = progress
        self._dogs = [Watchdog(watchdog) for _ in range(ranks)]
        self.ranks = [
            Rank(engine, policy(), lengths, (recorder,), False, self.arrivals.returned, contents, bursts)
            for recorder in self.recorder.engines
        ]

    def run(self) -> None:
        """Serve all requests. Whatever goes wrong in a policy's own code is a RunError."""
        guarded(self._serve, lambda: f"a policy broke at {self.now:.6f} s")
        if self.arrivals.outstanding:
            raise RunError(f"{self.arrivals.outstanding} requests are left unserved at {self.now:.6f} s")

    def _serve(self) -> None:
        arrivals, ranks = self.arrivals, self.ranks
        while True:
            while arrivals.next_time <= self.now:
                self._arrive()
            stepping = [rank for rank in ranks if rank.compose()]
            if stepping:
                self.now = max(rank.step[1] for rank in stepping if rank.step is not None)
                for rank in stepping:
                    rank.land(self.now)
            elif not self._idle():
                return
            for rank, dog in zip(ranks, self._dogs, strict=True):
                rank.now = self.now
                if self.now >= dog.next_look and (starving := dog.look(rank.ledger, self.now)):
                    raise RunError(f"policy {type(rank.policy).__name__} at {self.now:.3f} s: {starving}")

    def _idle(self) -> bool:
        waits = [rank.plan.until.time for rank in self.ranks if rank.occupied]
        until = min(self.arrivals.next_time, *waits, inf)
        if until == inf or any(rank.waits_forever() for rank in self.ranks if rank.occupied):
            return False
        self.now = max(self.now, until)
        return True

    def _arrive(self) -> None:
        rank = min(self.ranks, key=_load)
        entry = self.arrivals.take(rank.ledger)
        self.recorder.rows.arrived(entry, entry.arrival)
        if self._progress and entry.id % REPORT_EVERY == 0:
            self._progress(entry.id)
        rank.receive(entry)


def _load(rank: Rank) -> int:
    ledger = rank.ledger
    return WAITING * len(ledger.waiting) + len(ledger.prefilling) + len(ledger.decoding)
