"""Runs long enough for the answer: longer ones until the rates neither change nor scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

from headgate.advisor.capacity.found import STAYS, Declined, Found, declined, half_width, put_together
from headgate.advisor.capacity.race import Race
from headgate.advisor.capacity.search import Progress
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import Traffic
from headgate.advisor.capacity.trials import Case, Chosen, remembered
from headgate.advisor.set_up import SetUp

REQUESTS, MOST = 1500, 24_000  # of the first runs and of the longest, unless told otherwise
TIGHT = 0.02  # half of an interval, and what twice the length may change, as shares of the rate


class Searched(NamedTuple):
    """What runs of one length gave."""

    traffic: Traffic
    found: tuple[Found, ...]
    left: int  # searches that were interrupted
    stay: float  # the longest, in seconds, of a request at a sustained rate

    def declined(self, found: Found, load: float | None = None, lasting: bool = False) -> Declined | None:
        """Why nothing can be said of it, or of the engines that the load needs."""
        return declined(found, self.traffic.requests, self.stay, load, lasting)


@dataclass(frozen=True)
class Lengthening:
    """Searches with runs of `REQUESTS`, then of twice as many from where the last ones ended, and so on.

    A short run flatters every policy: an engine that falls behind is not seen to, and seeds agree on it.
    So an interval is not enough; the answer must also stay when runs get longer. A policy that was dropped
    is not in the longer runs.
    """

    start: SetUp
    chosen: Chosen
    levels: tuple[Level, ...]
    top: float
    droppable: frozenset[str] = frozenset()
    folder: Path | None = None  # of answers from before
    known: Mapping[str, float] = field(default_factory=dict)  # rates that shorter runs gave
    brief: bool = False  # no longer than it takes to have an answer at all
    load: float | None = None  # that the answer is for

    @property
    def fixed(self) -> bool:
        """Whether the user, or the trace, says how long runs are."""
        return self.start.settings.requests is not None or self.start.traffic.recorded

    def search(self, progress: Progress) -> Searched:
        """The first length that is enough, or the longest."""
        traffic, before = self.start.traffic, None
        while True:
            found = self._at(traffic, before, progress)
            enough = self.fixed or found.left or traffic.requests >= MOST
            if enough or self._done(before, found):
                return found
            wanted = max([2 * traffic.requests, *map(ceil, [] if self.brief else self._stays(found))])
            traffic, before = replace(traffic, requests=min(MOST, wanted)), found

    def _done(self, before: Searched | None, found: Searched) -> bool:
        """Whether the answer is as good as it is wanted."""
        if self.brief:
            best = max(found.found, key=lambda each: each.rate.value)
            return found.declined(best, self.load, lasting=True) is None
        return before is not None and not self._lacks(found) and not _moved(before.found, found.found)

    def not_enough(self, found: Searched) -> list[str]:
        """What a reader must know where no length was enough, or the user's own is not."""
        lacks = self._lacks(found)
        return [f"{lack}; take more --requests or --seeds" for lack in lacks]

    def _lacks(self, found: Searched) -> list[str]:
        hopeful = [each for each in found.found if not each.dropped]
        wide = [
            f"{each.policy} ±{100 * half:.1f} %"
            for each in hopeful
            if (half := half_width(each.rate)) > TIGHT
        ]
        lacks = [f"not within ±{100 * TIGHT:.0f} %: {', '.join(wide)}"] if wide else []
        need = max(self._stays(found), default=0.0)
        if found.traffic.requests < need:
            lacks.append(
                f"runs of {found.traffic.requests:,} requests last less than {STAYS} times the longest stay "
                f"({found.stay:.0f} s) and flatter every rate: {ceil(need / 100) * 100:,} requests would do"
            )
        return lacks

    def _stays(self, found: Searched) -> list[float]:
        """Requests that make a run long enough, for each policy."""
        return [STAYS * found.stay * each.rate.value for each in found.found if not each.dropped]

    def _at(self, traffic: Traffic, before: Searched | None, progress: Progress) -> Searched:
        start, options = self.start, self.start.options
        earlier = {each.policy: each for each in before.found} if before else {}
        chosen = {
            text: own for text, own in self.chosen.items() if text not in earlier or not earlier[text].dropped
        }
        case = Case(start.engine, traffic, start.settings.watchdog, start.asynchronous)
        race = Race(
            case=case,
            top=self.top,
            precision=options.precision if not before else min(options.precision, TIGHT),
            seeds=start.seeds,
            droppable=self.droppable,
            workers=options.workers,
            progress=progress,
            memory=remembered(self.folder, case),
        )
        known = {text: each.rate.value for text, each in earlier.items()} if before else self.known
        searches, answers, dropped = race.run(chosen, known)
        left = sum(search.next() is not None for (text, _), search in searches.items() if text not in dropped)
        tried = {key: search for key, search in searches.items() if search.tried}
        found = {text: each for text, each in earlier.items() if each.dropped}
        for text in dict.fromkeys(text for text, _ in tried):
            length = traffic.requests if text in dropped else 0
            found[text] = put_together(text, tried, answers, self.top, self.levels, length)
        kept = [each for (text, *_), each in answers.items() if text not in dropped and each.ratio <= 1]
        stay = max((each.stay for each in kept), default=0.0)
        return Searched(traffic, tuple(found[text] for text in self.chosen if text in found), left, stay)


def _moved(before: Sequence[Found], found: Sequence[Found]) -> bool:
    """Whether some rate changed by more than it should."""
    pairs = zip(before, found, strict=False)
    return any(abs(new.rate.value - old.rate.value) > TIGHT * new.rate.value for old, new in pairs)
