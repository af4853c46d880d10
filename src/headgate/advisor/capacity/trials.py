"""Runs of a policy for a search over its rate, each at a rate with a seed, and the race of many policies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.memory import AnswerFile, file_of
from headgate.advisor.capacity.search import START, Bar, Search, search_all
from headgate.advisor.capacity.traffic import SearchTraffic, measure
from headgate.core.errors import RunError
from headgate.core.policy import BatchPolicy
from headgate.experiment.library import simulate, simulate_fleet
from headgate.experiment.workers import Workers
from headgate.methods.make import make_policy
from headgate.record.tables import Run
from headgate.sim.engine.engine import Engine


class RateTrial(NamedTuple):
    policy: str
    settings: dict[str, Any]
    limits: tuple[int, int] | None  # slots and tokens of a step, where they are not the engine's
    seed: int
    rate: float


class RateOutcome(NamedTuple):
    ratio: float
    worst: str
    values: tuple[float, ...]
    stay: float = 0.0  # seconds from the arrival to the end of a request, of all but `FEW`
    tails: tuple[float, ...] = ()  # of each level that is checked the p99, then the worst of each


class Case(NamedTuple):
    engine: Engine
    traffic: SearchTraffic
    watchdog: float
    asynchronous: bool = False

    def run(self, task: RateTrial) -> RateOutcome:
        try:
            run = self.served(Contender(*task[:3]), task.rate, task.seed)
        except RunError as error:
            return RateOutcome(inf, f"the run stopped: {error}", ())
        kept = measure(run, self.traffic.levels)
        return RateOutcome(kept.ratio, str(kept.worst), kept.values, usual_stay(run), kept.tails)

    def served(self, contender: Contender, rate: float, seed: int, engines: int = 1, router: str = "") -> Run:
        slots, budget = contender.limits or (self.engine.running, self.engine.batch_tokens)
        engine = self.engine._replace(running=slots, batch_tokens=budget)
        requests = self.traffic.at(rate, seed)
        about: dict[str, Any] = {"asynchronous": self.asynchronous, "watchdog": self.watchdog}

        def policy(role: str = "") -> BatchPolicy:
            return make_policy(contender.policy, contender.settings, engine)[0]

        if engines == 1:
            return simulate(engine, policy(), requests, **about)
        return simulate_fleet(engine, policy, router, requests, engines=engines, seed=seed, **about)


FEW = 0.05  # of the requests: a promise may leave out as many, and these stay as long as a run lasts


def usual_stay(run: Run) -> float:
    stays = run.requests["finished"] - run.requests["arrival"]
    return float(np.nanquantile(stays, 1 - FEW)) if np.isfinite(stays).any() else 0.0


class Contender(NamedTuple):
    policy: str
    settings: dict[str, Any]
    limits: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        values = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.policy}:{values}" if values else self.policy


def remembered(folder: Path | None, case: Case) -> AnswerFile[RateTrial, RateOutcome] | None:
    if folder is None:
        return None
    file = file_of(folder, case.engine, case.traffic, (case.watchdog, case.asynchronous))
    return AnswerFile(file, RateOutcome, lambda t: ([t.policy], (sorted(t.settings.items()), *t[2:])))


Chosen = dict[str, Contender]  # by what the user called it
Searches = dict[tuple[str, int], Search]  # by policy and seed
Answers = dict[tuple[str, int, float], RateOutcome]  # and rate


def search_rates(
    case: Case,
    chosen: Chosen,
    searches: Searches,
    workers: Workers,
    progress: Bar,
    memory: AnswerFile[RateTrial, RateOutcome] | None = None,
) -> Answers:
    def tasks(key: tuple[str, int], rate: float) -> list[RateTrial]:
        return [RateTrial(*chosen[key[0]], seed=key[1], rate=rate)]

    values = search_all(case.run, searches, tasks, workers, progress, memory)
    return {(*tried.key, tried.value): tried.answers[0] for tried in values.values()}


# -- policies that race

HOPELESS = 0.85  # of what the best sustains with the first seed: a policy that misses here may be dropped


class Race(NamedTuple):
    """How policies are searched on one case.

    All seeds send the same law of requests, so the first seed's answer is where the others begin. A policy
    that misses a level at `HOPELESS` of what another sustains, both on the requests of the first seed, is
    dropped if it is one of `droppable`.
    """

    case: Case
    top: float
    precision: float
    seeds: range
    droppable: Collection[str]
    workers: Workers
    progress: Bar
    memory: AnswerFile[RateTrial, RateOutcome] | None = None

    def run(self, chosen: Chosen, known: Mapping[str, float]) -> tuple[Searches, Answers, frozenset[str]]:
        """What was tried, and the policies that were dropped; `known` are rates that shorter runs gave.

        Which are dropped is decided between two rounds, so the answer does not depend on how many processes
        there are. Their searches have one seed and a wide bracket.
        """
        first, *others = self.seeds
        rough = {
            (text, first): Search(self.top, self.precision, known.get(text, 0.0) / self.top or START, True)
            for text in chosen
        }
        answers = self._search(chosen, rough)
        interrupted = any(search.next() is not None for search in rough.values())
        dropped: frozenset[str] = frozenset()
        if not interrupted:
            least = HOPELESS * max(search.sustained for search in rough.values())
            missed = (text for (text, _), search in rough.items() if search.missed <= least)
            dropped = frozenset(missed) & frozenset(self.droppable)
        searches = dict(rough)
        for (text, _), search in rough.items():
            if text not in dropped:
                search.rough = False
                start = search.answer / self.top or START
                searches |= {(text, seed): Search(self.top, self.precision, start) for seed in others}
        if not interrupted:
            left = {key: search for key, search in searches.items() if key[0] not in dropped}
            answers |= self._search(chosen, left)
        return searches, answers, dropped

    def _search(self, chosen: Chosen, searches: Searches) -> Answers:
        return search_rates(self.case, chosen, searches, self.workers, self.progress, self.memory)
