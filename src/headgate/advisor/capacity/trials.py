"""Many searches at once: each run of a policy at a rate and seed, here or in processes of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from math import inf
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, Protocol

import numpy as np

from headgate.advisor.capacity.memory import Kept, file_of
from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.slo import measure
from headgate.advisor.capacity.traffic import Traffic
from headgate.core.errors import RunError
from headgate.experiment.library import simulate
from headgate.experiment.workers import Workers
from headgate.methods.make import make_policy
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine

EXPECTED = 7  # rates tried by a search, for the progress bar
Progress = Callable[[str, int], Any]  # a context manager that yields a function to report to


class Task(NamedTuple):
    """One run: a policy at a rate with a seed."""

    policy: str
    settings: dict[str, Any]
    limits: tuple[int, int] | None  # seats and tokens of a step, where they are not the engine's
    seed: int
    rate: float


class Answer(NamedTuple):
    """How the run stands to its levels; a run that could not go on misses them all."""

    ratio: float
    worst: str
    values: tuple[float, ...]
    stay: float = 0.0  # seconds from the arrival to the end of a request, the longest


class Case(NamedTuple):
    """All that runs share."""

    engine: Engine
    traffic: Traffic
    watchdog: float
    asynchronous: bool = False

    def run(self, task: Task) -> Answer:
        seats, budget = task.limits or (self.engine.running, self.engine.batch_tokens)
        engine = self.engine._replace(running=seats, batch_tokens=budget)
        policy, _ = make_policy(task.policy, task.settings, engine)
        requests = self.traffic.at(task.rate, task.seed)
        try:
            run = simulate(engine, policy, requests, asynchronous=self.asynchronous, watchdog=self.watchdog)
        except RunError as error:
            return Answer(inf, f"the run stopped: {error}", ())
        kept = measure(run, self.traffic.levels)
        return Answer(kept.ratio, str(kept.worst), kept.values, longest_stay(run))

    def timed(self, task: Task) -> tuple[Answer, float]:
        """The answer, and the CPU seconds it took."""
        began = process_time()
        return self.run(task), process_time() - began


def longest_stay(run: Run) -> float:
    """Seconds from the arrival to the end of a request."""
    stays = run.requests["finished"] - run.requests["arrival"]
    return float(np.nanmax(stays)) if np.isfinite(stays).any() else 0.0


class Contender(NamedTuple):
    """What is searched for its highest rate: a policy, and seats and budget where not the engine's."""

    policy: str
    settings: dict[str, Any]
    limits: tuple[int, int] | None = None


class Memory(Protocol):
    """Answers that are known from before, and a place to keep new ones."""

    def get(self, task: Task) -> Answer | None: ...

    def put(self, task: Task, answer: Answer) -> None: ...


def remembered(folder: Path | None, case: Case) -> Kept[Task, Answer] | None:
    """What the folder knows of the case; None without a folder."""
    if folder is None:
        return None
    file = file_of(folder, case.engine, case.traffic, case.watchdog, case.asynchronous)
    return Kept(file, Answer, lambda task: ([task.policy], (sorted(task.settings.items()), *task[2:])))


Chosen = dict[str, Contender]  # by what the user called it
Searches = dict[tuple[str, int], Search]  # by policy and seed
Answers = dict[tuple[str, int, float], Answer]  # and rate


def search_all(
    case: Case,
    chosen: Chosen,
    searches: Searches,
    workers: Workers,
    progress: Progress,
    memory: Memory | None = None,
) -> Answers:
    """Every search to its end; each asks for its next rate as soon as it knows the last one's answer.

    Interrupted, it returns what was found by then; with nothing found, it passes the interrupt on.
    """
    answers: Answers = {}
    try:
        with progress("searching", EXPECTED * len(searches)) as report:
            for key, rate, answer in _answers(case, chosen, searches, workers, memory or Forgetting()):
                answers[*key, rate] = answer
                report(min(len(answers), EXPECTED * len(searches) - 1))
    except KeyboardInterrupt:
        if not answers:
            raise
    return answers


class Forgetting:
    """Nothing is known from before."""

    def get(self, task: Task) -> Answer | None:
        return None

    def put(self, task: Task, answer: Answer) -> None:
        pass


Told = Iterator[tuple[tuple[str, int], float, Answer]]


def _answers(case: Case, chosen: Chosen, searches: Searches, workers: Workers, memory: Memory) -> Told:
    """Of the runs that wait, those of the policy that took most time go first, so that none is left alone at
    the end.
    """
    ready: list[tuple[tuple[str, int], Task]] = []
    pending: dict[Future[tuple[Answer, float]], tuple[tuple[str, int], Task]] = {}
    spent: defaultdict[str, float] = defaultdict(float)

    def ask(key: tuple[str, int]) -> Told:
        """Tell what is known from before, up to the first rate that must be run."""
        while (rate := searches[key].next()) is not None:
            task = Task(*chosen[key[0]], key[1], rate)
            answer = memory.get(task)
            if answer is None:
                ready.append((key, task))
                return
            searches[key].tell(rate, answer.ratio)
            yield key, rate, answer

    with workers.start(case.timed, len(searches)) as pool:
        for key, search in searches.items():
            spent[key[0]] += search.spent
            yield from ask(key)
        while ready or pending:
            ready.sort(key=lambda each: -spent[each[0][0]])
            while ready and len(pending) < pool.ahead:
                key, task = ready.pop(0)
                pending[pool.submit(task)] = key, task
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                key, task = pending.pop(future)
                answer, seconds = future.result()
                memory.put(task, answer)
                searches[key].spent += seconds
                spent[key[0]] += seconds
                searches[key].tell(task.rate, answer.ratio)
                yield key, task.rate, answer
                yield from ask(key)
