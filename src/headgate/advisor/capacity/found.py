"""The searches of all seeds put together: the rate one policy sustains, its interval, what gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np

from headgate.advisor.capacity.race import HOPELESS
from headgate.advisor.capacity.search import ROUGH, Search
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.trials import Answers, Searches
from headgate.stats.figures import Estimate, Spread

STAYS = 10  # a run should last so many times as long as the longest request stays
WIDE, CARRIES = 0.2, 0.1  # half of an interval, as a share of the rate: too much, and what runs should reach


@dataclass(frozen=True)
class Found:
    """What one policy sustains. `values` are the levels that are checked, at the highest sustained rate."""

    policy: str
    rate: Estimate
    share: float  # of λ*
    by_seed: tuple[float, ...]
    limited_by: str  # the level that gives way first, "" when the bound is reached
    values: dict[str, float]
    runs: int
    at_edge: int = 0  # seeds whose search ended at λ*, the highest rate there is to try
    dropped: int = 0  # requests of the run, with one seed, after which it was given up; 0: it was not


def half_width(rate: Estimate) -> float:
    """Half of the interval as a share of the rate; 0 where there is none."""
    if rate.low is None or rate.high is None or not rate.value:
        return 0.0
    return max(rate.high - rate.value, rate.value - rate.low) / rate.value


def apart(one: Found, other: Found) -> bool:
    """Whether their rates differ significantly: by differences paired by seed, for all serve the same
    requests. One seed has no interval, so they must differ by more than a bracket; one that was dropped is
    judged by its bracket.
    """
    if len(one.by_seed) != len(other.by_seed):
        low, high = sorted((one.rate, other.rate), key=lambda each: each.value)
        return low.high is None or high.low is None or low.high < high.low
    pairs = np.array(one.by_seed) - np.array(other.by_seed)
    gap = Spread.of_values(pairs).estimate()
    if gap.low is None or gap.high is None:
        return abs(gap.value) > ROUGH * max(one.rate.value, other.rate.value)
    return gap.low * gap.high > 0


class Declined(NamedTuple):
    """Why runs do not carry an answer, and about how many requests each would need."""

    why: str
    requests: int

    def __str__(self) -> str:
        return f"{self.why}; about {self.requests:,} requests each would: take --requests {self.requests}"


def declined(
    found: Found, requests: int, stay: float, load: float | None = None, lasting: bool = False
) -> Declined | None:
    """None where the rate may be told: its interval is narrow enough, or both of its ends say that the load
    needs equally many engines.

    With every seed an engine served a run, as promised, while it arrived and the longest `stay` of a request:
    it can do so again and again. So few seeds do not make the low end lower than that, and where every search
    ended at λ*, without an interval, it is the low end. With `lasting`, for runs that may be longer, only
    the interval counts, and at λ* only rates at which a run lasts long enough.
    """
    rate, worst = found.rate, min(found.by_seed, default=0.0)
    served = requests / (requests / worst + stay) if worst and not lasting else 0.0
    edge = 0 < len(found.by_seed) == found.at_edge and STAYS * stay > 0
    if edge:
        known = requests / (STAYS * stay) if lasting else served
        rate = Estimate(rate.value, min(rate.value, known), rate.value)
    half, low, high = half_width(rate), rate.low or 0.0, rate.high or 0.0
    sure = max(low, served)
    if half <= WIDE or (load is not None and sure > 0 and ceil(load / sure) == ceil(load / high)):
        return None
    if edge:
        need, why = 0.0, f"runs of {requests:,} requests end before {found.policy} could fall behind"
    else:
        need, span = requests * (half / CARRIES) ** 2, f"from {low:.4g} to {high:.4g} requests/s"
        why = f"the rate of {found.policy} is {span}, which runs of {requests:,} requests do not tell better"
    return Declined(why, ceil(max(need, STAYS * stay * rate.value) / 100) * 100)


def at_the_edge(found: Sequence[Found]) -> list[str]:
    """One line where searches ended at their upper edge: their rates are then not measured but the bound."""
    stuck = [f"{each.policy} ({each.at_edge} of {len(each.by_seed)})" for each in found if each.at_edge]
    if not stuck:
        return []
    return [
        f"searches that ended at λ*, their upper edge: {'; '.join(stuck)}. These runs are too short to "
        "overload the engine; take more --requests"
    ]


def given_up(found: Sequence[Found]) -> list[str]:
    """One line for each length of runs after which policies were dropped."""
    lengths = sorted({each.dropped for each in found if each.dropped})
    names = {n: ", ".join(each.policy for each in found if each.dropped == n) for n in lengths}
    return [
        f"dropped after runs of {length:,} requests with one seed, for they miss a level at "
        f"{100 * HOPELESS:.0f} % of what the best sustains: {dropped}. Their intervals are the brackets "
        "then; name one with --policy to search it to the end"
        for length, dropped in names.items()
    ]


def put_together(
    text: str,
    searches: Searches,
    answers: Answers,
    top: float,
    levels: tuple[Level, ...],
    dropped: int = 0,
) -> Found:
    """The rates of all seeds put together, and what gave way. One that was `dropped` has its bracket."""
    mine = {seed: search for (policy, seed), search in searches.items() if policy == text}
    rates = np.array([search.answer for search in mine.values()])
    reasons, kept = Counter[str](), []
    for seed, search in mine.items():
        if search.missed <= top:
            reasons[answers[text, seed, search.missed].worst] += 1
        if search.sustained:
            kept.append(answers[text, seed, search.sustained].values)
    if dropped:
        (only,) = mine.values()
        rate = Estimate(only.answer, only.sustained, only.missed)
    else:
        rate = _no_finer_than_searched(Spread.of_values(rates).estimate().cut(), list(mine.values()))
    names = [str(level) for level in levels if level.statistic]
    return Found(
        policy=text,
        rate=rate,
        share=rate.value / top,
        by_seed=tuple(rates.tolist()),
        limited_by=reasons.most_common(1)[0][0] if reasons else "",
        values=dict(zip(names, np.mean(kept, axis=0).tolist(), strict=True)) if kept else {},
        runs=sum(len(search.tried) for search in mine.values()),
        at_edge=sum(search.sustained >= search.top for search in mine.values()),
        dropped=dropped,
    )


def _no_finer_than_searched(rate: Estimate, searches: Sequence[Search]) -> Estimate:
    """Seeds that end in the same bracket agree by the grid, not by what they measured: the interval of the
    mean is never narrower than the brackets in which the answers were interpolated. It ends at λ*.
    """
    if rate.low is None or rate.high is None:
        return rate
    if all(search.sustained >= search.top for search in searches):
        return Estimate(rate.value)  # all at the edge of the search: nothing was measured
    below = float(np.mean([search.sustained for search in searches]))
    above = float(np.mean([min(search.missed, search.top) for search in searches]))
    return replace(rate, low=min(rate.low, below), high=min(max(rate.high, above), searches[0].top))
