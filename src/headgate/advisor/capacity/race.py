"""Searches that share what they learn: every policy roughly with one seed, then the hopeful with all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from headgate.advisor.capacity.search import START, Memory, Progress, Search
from headgate.advisor.capacity.trials import Answer, Answers, Case, Chosen, Searches, Task, search_rates
from headgate.experiment.workers import Workers

HOPELESS = 0.85  # of what the best sustains with the first seed: a policy that misses here may be dropped


class Raced(NamedTuple):
    """What all searches tried; those of the dropped have one seed and a wide bracket."""

    searches: Searches
    answers: Answers
    dropped: frozenset[str]


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
    progress: Progress
    memory: Memory[Task, Answer] | None = None

    def run(self, chosen: Chosen, known: Mapping[str, float]) -> Raced:
        """Every policy; `known` are rates that shorter runs gave. Which are dropped is decided between two
        rounds, so the answer does not depend on how many processes there are.
        """
        first, *others = self.seeds
        rough = {
            (text, first): Search(self.top, self.precision, known.get(text, 0.0) / self.top or START, True)
            for text in chosen
        }
        answers = self._search(chosen, rough)
        interrupted = any(search.next() is not None for search in rough.values())
        dropped = frozenset() if interrupted else self._hopeless(rough)
        searches = dict(rough)
        for (text, _), search in rough.items():
            if text not in dropped:
                search.rough = False
                start = search.answer / self.top or START
                searches |= {(text, seed): Search(self.top, self.precision, start) for seed in others}
        if not interrupted:
            left = {key: search for key, search in searches.items() if key[0] not in dropped}
            answers |= self._search(chosen, left)
        return Raced(searches, answers, dropped)

    def _search(self, chosen: Chosen, searches: Searches) -> Answers:
        return search_rates(self.case, chosen, searches, self.workers, self.progress, self.memory)

    def _hopeless(self, rough: Searches) -> frozenset[str]:
        best = max(search.sustained for search in rough.values())
        return frozenset(
            text
            for (text, _), search in rough.items()
            if text in self.droppable and search.missed <= HOPELESS * best
        )
