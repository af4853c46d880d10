"""Runs long enough for the answer: longer ones until the rates neither change nor scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from headgate.advisor.capacity.found import Found, put_together
from headgate.advisor.capacity.search import START, Search
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import Traffic
from headgate.advisor.capacity.trials import Case, Chosen, Progress, search_all
from headgate.advisor.set_up import SetUp

REQUESTS, MOST = 1500, 24_000  # of the first runs and of the longest, unless told otherwise
TIGHT = 0.02  # half of an interval, and what twice the length may change, as shares of the rate
STAYS = 10  # a run lasts so many times as long as the longest request stays


class Searched(NamedTuple):
    """What runs of one length gave."""

    traffic: Traffic
    found: tuple[Found, ...]
    left: int  # searches that were interrupted
    stay: float  # the longest, in seconds, of a request at a sustained rate


@dataclass(frozen=True)
class Lengthening:
    """Searches with runs of `REQUESTS`, then of twice as many from where the last ones ended, and so on.

    A short run flatters every policy: an engine that falls behind is not seen to, and seeds agree on it.
    So an interval is not enough; the answer must also stay when runs get longer.
    """

    start: SetUp
    chosen: Chosen
    levels: tuple[Level, ...]
    top: float

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
            if enough or (before and not self._lacks(found) and not _moved(before.found, found.found)):
                return found
            wanted = max([2 * traffic.requests, *map(ceil, self._stays(found))])
            traffic, before = replace(traffic, requests=min(MOST, wanted)), found

    def not_enough(self, found: Searched) -> list[str]:
        """What a reader must know where no length was enough, or the user's own is not."""
        lacks = self._lacks(found)
        return [f"{lack}; take more --requests or --seeds" for lack in lacks]

    def _lacks(self, found: Searched) -> list[str]:
        wide = [f"{each.policy} ±{100 * half:.1f} %" for each in found.found if (half := _half(each)) > TIGHT]
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
        return [STAYS * found.stay * each.rate.value for each in found.found]

    def _at(self, traffic: Traffic, before: Searched | None, progress: Progress) -> Searched:
        start, options = self.start, self.start.options
        known = {each.policy: each.rate.value / self.top for each in before.found} if before else {}
        precision = options.precision if not before else min(options.precision, TIGHT)
        searches = {
            (text, seed): Search(self.top, precision, known.get(text) or START)
            for text in self.chosen
            for seed in start.seeds
        }
        case = Case(start.engine, traffic, start.settings.watchdog, start.asynchronous)
        answers = search_all(case, self.chosen, searches, options.workers, progress)
        left = sum(search.next() is not None for search in searches.values())
        tried = {key: search for key, search in searches.items() if search.tried}
        heard = [text for text in self.chosen if any(text == policy for policy, _ in tried)]
        found = tuple(put_together(text, tried, answers, self.top, self.levels) for text in heard)
        stay = max((each.stay for each in answers.values() if each.ratio <= 1), default=0.0)
        return Searched(traffic, found, left, stay)


def _half(found: Found) -> float:
    """Half of the interval as a share of the rate; 0 where there is none."""
    rate = found.rate
    if rate.low is None or rate.high is None or not rate.value:
        return 0.0
    return max(rate.high - rate.value, rate.value - rate.low) / rate.value


def _moved(before: Sequence[Found], found: Sequence[Found]) -> bool:
    """Whether some rate changed by more than it should."""
    pairs = zip(before, found, strict=False)
    return any(abs(new.rate.value - old.rate.value) > TIGHT * new.rate.value for old, new in pairs)
