"""Runs of a policy for a search over its rate: each at a rate with a seed."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.memory import Kept, file_of
from headgate.advisor.capacity.search import Memory, Progress, Search, search_all
from headgate.advisor.capacity.slo import measure
from headgate.advisor.capacity.traffic import Traffic
from headgate.core.errors import RunError
from headgate.experiment.library import simulate
from headgate.experiment.workers import Workers
from headgate.methods.make import make_policy
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine


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


def longest_stay(run: Run) -> float:
    """Seconds from the arrival to the end of a request."""
    stays = run.requests["finished"] - run.requests["arrival"]
    return float(np.nanmax(stays)) if np.isfinite(stays).any() else 0.0


class Contender(NamedTuple):
    """What is searched for its highest rate: a policy, and seats and budget where not the engine's."""

    policy: str
    settings: dict[str, Any]
    limits: tuple[int, int] | None = None


def remembered(folder: Path | None, case: Case) -> Kept[Task, Answer] | None:
    """What the folder knows of the case; None without a folder."""
    if folder is None:
        return None
    file = file_of(folder, case.engine, case.traffic, (case.watchdog, case.asynchronous))
    return Kept(file, Answer, lambda task: ([task.policy], (sorted(task.settings.items()), *task[2:])))


Chosen = dict[str, Contender]  # by what the user called it
Searches = dict[tuple[str, int], Search]  # by policy and seed
Answers = dict[tuple[str, int, float], Answer]  # and rate


def search_rates(
    case: Case,
    chosen: Chosen,
    searches: Searches,
    workers: Workers,
    progress: Progress,
    memory: Memory[Task, Answer] | None = None,
) -> Answers:
    """Every search to its end, each for one policy and seed."""

    def tasks(key: tuple[str, int], rate: float) -> list[Task]:
        return [Task(*chosen[key[0]], seed=key[1], rate=rate)]

    values = search_all(case.run, searches, tasks, workers, progress, memory)
    return {(*tried.key, tried.value): tried.answers[0] for tried in values.values()}
