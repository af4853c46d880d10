"""Many searches at once: each run of a policy at a rate and seed, here or in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from math import inf
from typing import Any, NamedTuple

from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.slo import measure
from headgate.advisor.capacity.traffic import Traffic
from headgate.core.errors import RunError
from headgate.experiment.library import simulate
from headgate.methods.make import make_policy
from headgate.sim.engine.engine import Engine

EXPECTED = 7  # rates tried by a search, for the progress bar
Progress = Callable[[str, int], Any]  # a context manager that yields a function to report to


class Task(NamedTuple):
    """One run: a policy at a rate with a seed."""

    policy: str
    settings: dict[str, Any]
    seed: int
    rate: float


class Answer(NamedTuple):
    """How the run stands to its levels; a run that could not go on misses them all."""

    ratio: float
    worst: str
    values: tuple[float, ...]


class Case(NamedTuple):
    """All that runs share."""

    engine: Engine
    traffic: Traffic
    watchdog: float
    asynchronous: bool = False

    def run(self, task: Task) -> Answer:
        policy, _ = make_policy(task.policy, task.settings, self.engine)
        requests = self.traffic.at(task.rate, task.seed)
        try:
            run = simulate(
                self.engine, policy, requests, asynchronous=self.asynchronous, watchdog=self.watchdog
            )
        except RunError as error:
            return Answer(inf, f"the run stopped: {error}", ())
        kept = measure(run, self.traffic.levels)
        return Answer(kept.ratio, str(kept.worst), kept.values)


Chosen = dict[str, tuple[str, dict[str, Any]]]  # by what the user called it: a policy and its settings
Searches = dict[tuple[str, int], Search]  # by policy and seed
Answers = dict[tuple[str, int, float], Answer]  # and rate


def search_all(case: Case, chosen: Chosen, searches: Searches, jobs: int, progress: Progress) -> Answers:
    """Every search to its end; each asks for its next rate as soon as it knows the last one's answer.

    Interrupted, it returns what was found by then; with nothing found, it passes the interrupt on.
    """
    answers: Answers = {}
    try:
        with progress("searching", EXPECTED * len(searches)) as report:
            for key, rate, answer in (_here if jobs == 1 else _in_parallel)(case, chosen, searches, jobs):
                answers[*key, rate] = answer
                report(min(len(answers), EXPECTED * len(searches) - 1))
    except KeyboardInterrupt:
        if not answers:
            raise
    return answers


Told = Iterator[tuple[tuple[str, int], float, Answer]]


def _here(case: Case, chosen: Chosen, searches: Searches, jobs: int) -> Told:
    for (text, seed), search in searches.items():
        while (rate := search.next()) is not None:
            answer = case.run(Task(*chosen[text], seed, rate))
            search.tell(rate, answer.ratio)
            yield (text, seed), rate, answer


def _in_parallel(case: Case, chosen: Chosen, searches: Searches, jobs: int) -> Told:
    pool = ProcessPoolExecutor(min(jobs, len(searches)), initializer=_share, initargs=(case,))
    pending: dict[Future[Answer], tuple[tuple[str, int], float]] = {}

    def ask(key: tuple[str, int]) -> None:
        rate = searches[key].next()
        if rate is not None:
            pending[pool.submit(_run_shared, Task(*chosen[key[0]], key[1], rate))] = key, rate

    try:
        for key in searches:
            ask(key)
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                key, rate = pending.pop(future)
                answer = future.result()
                searches[key].tell(rate, answer.ratio)
                ask(key)
                yield key, rate, answer
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_shared: list[Case] = []  # what the tasks of this process have in common


def _share(case: Case) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and decides
    _shared[:] = [case]


def _run_shared(task: Task) -> Answer:
    return _shared[0].run(task)
