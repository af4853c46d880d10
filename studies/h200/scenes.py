"""Two ways to meet an engine: serve a fixed queue to its end, or keep it busy and change the policy live."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from headgate.sim.engine.engine import Engine
from studies.h200.arms import PLAIN, fallen, switch
from studies.h200.figures import figures
from studies.h200.loads import Load
from studies.h200.record import Record

Line = dict[str, Any]


@dataclass
class Session:
    """One engine in this process, its record, and the number of the next request."""

    llm: Any
    engine: Engine
    vocabulary: int
    record: Record = field(init=False)
    next: int = 0
    alive: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.record = Record(self.core.scheduler)
        self._rng = np.random.default_rng(7)

    def queue(self, prompt: int, output: int) -> None:
        """One more request, with made-up tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=int(output),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.queue_tokens(self._rng.integers(2, self.vocabulary, int(prompt)).tolist(), params)

    def queue_tokens(self, tokens: list[int], params: Any) -> str:
        """One more request; its name in the engine's answers."""
        name = str(self.next)
        inner = self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
        self.record.queued(self.next, inner, len(tokens))
        self.alive.add(name)
        self.next += 1
        return name

    def step(self) -> int:
        """One step of the engine; how many requests it ended."""
        ended = [each.request_id for each in self.llm.llm_engine.step() if each.finished]
        self.alive.difference_update(ended)
        return len(ended)

    def empty(self) -> None:
        """End what is still there, and let steps in flight run out."""
        if self.alive:
            self.llm.llm_engine.abort_request(sorted(self.alive))
            self.alive.clear()
        while self.core.scheduler.has_requests() or getattr(self.core, "batch_queue", None):
            self.llm.llm_engine.step()

    def switch(self, arm: str) -> None:
        """From the next step on this arm rules."""
        switch(self.core.scheduler, arm, self.engine)

    def line(self, load: Load, arm: str, begin: float, end: float) -> Line:
        """The figures of a stretch of time."""
        found = figures(self.record, load, self.engine, begin, end)
        return {"workload": load.name, "arm": arm, "fallen": fallen(self.core.scheduler), **found}


def whole(session: Session, load: Load, arm: str, count: int) -> Line:
    """Queue `count` requests, serve them all."""
    session.empty()
    session.record.forget()
    session.switch(arm)
    first = session.next
    for prompt, output in zip(load.prompts[:count], load.outputs[:count], strict=True):
        session.queue(prompt, output)
    session.record.restart_clock(first)
    begin = perf_counter()
    while session.alive:
        session.step()
    line = session.line(load, arm, begin, perf_counter())
    return {**line, "balanced_requests_per_s": count / line["seconds"]}  # nothing to balance: all were served


@dataclass
class Busy:
    """An engine that always has `clients` requests, begun in the state in which it stays."""

    session: Session
    load: Load
    clients: int
    next: int = 0

    def fill(self) -> None:
        """Plain vLLM takes in a batch of requests under way; the rest wait."""
        session, slots = self.session, self.session.engine.running
        session.empty()
        session.record.forget()
        session.switch(PLAIN)
        first = session.next
        for prompt, output in zip(*self.load.under_way(slots, seed=1), strict=True):
            session.queue(prompt, output)
        for _ in range(self.clients - slots):
            self._another()
        while np.isnan(session.record.first[first : first + slots]).any():
            self._step()

    def segment(self, arm: str, settle: float, measure: float) -> Line:
        """Change to `arm`, let it settle, measure."""
        session = self.session
        session.record.forget()
        session.switch(arm)
        self._serve(settle)
        begin = session.record.rows[-1].ended if session.record.rows else perf_counter()
        self._serve(measure)
        return session.line(self.load, arm, begin, session.record.rows[-1].ended)

    def _serve(self, seconds: float) -> None:
        end = perf_counter() + seconds
        while perf_counter() < end:
            self._step()

    def _step(self) -> None:
        for _ in range(self.session.step()):
            self._another()

    def _another(self) -> None:
        self.session.queue(self.load.prompts[self.next], self.load.outputs[self.next])
        self.next += 1
