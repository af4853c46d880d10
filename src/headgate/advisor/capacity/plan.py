"""The largest rate each policy sustains under service levels, beside the rate none can exceed.

Runs get longer until the rates neither change nor scatter; where they still do, the answer is declined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.search import LEAST, ROUGH, Search
from headgate.advisor.capacity.traffic import Level, SearchTraffic, nearest
from headgate.advisor.capacity.trials import (
    FEW,
    HOPELESS,
    Answers,
    Chosen,
    Contender,
    Race,
    RateTrial,
    Searches,
    remembered,
)
from headgate.advisor.flags import graphs_said, small_graphs
from headgate.advisor.set_up import Asked, SearchPlan, SetUp, set_up
from headgate.core.errors import InputError
from headgate.cost.likeness import throughput_error
from headgate.experiment.run import each_once
from headgate.experiment.settings import Experiment
from headgate.methods.bounds import Bound
from headgate.methods.make import make_policy, policy_parameters
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import Estimate, Spread
from headgate.stats.metrics import without_nan

ALL = "all"
PLAIN = "mixed"  # what vLLM does without a plug-in
INTERRUPTED = (
    "interrupted with {} of {} searches unfinished: their rates are what was known then, often too low"
)


@dataclass(frozen=True)
class PolicyRate:
    """What one policy sustains. `values` are the levels that are checked, at the highest sustained rate, or
    where there is none the worst of any seed at the lowest rate tried.
    """

    policy: str
    rate: Estimate
    share: float  # of λ*
    by_seed: tuple[float, ...]
    limited_by: str  # the level that gives way first, "" when the bound is reached
    values: dict[str, float]
    runs: int
    at_edge: int = 0  # seeds whose search ended at λ*, the highest rate there is to try
    dropped: int = 0  # requests of the run, with one seed, after which it was given up; 0: it was not
    tails: dict[str, tuple[float, float]] = field(default_factory=dict)  # p99 and worst, as `values`

    @property
    def stuck(self) -> bool:
        return 0 < len(self.by_seed) == self.at_edge


class Declined(NamedTuple):
    why: str
    requests: int
    remedy: str = ""

    def __str__(self) -> str:
        longer = f"about {self.requests:,} requests each would: take --requests {self.requests}"
        return f"{self.why}; {self.remedy or longer}"


@dataclass(frozen=True)
class CapacityPlan(SearchPlan):
    ideal: Bound
    limited: Bound  # with the engine's limits
    found: tuple[PolicyRate, ...]
    declined: Declined | None = None  # why nothing can be said of the best

    @property
    def best(self) -> PolicyRate | None:
        return max(self.found, key=lambda each: each.rate.value, default=None)

    def as_dict(self) -> dict[str, Any]:
        document = super().as_dict() | {
            "requests_per_run": self.traffic.requests,
            "bound": {**asdict(self.ideal), "seconds": self.ideal.seconds, "rate": self.ideal.rate},
            "bound_of_engine": {**asdict(self.limited), "rate": self.limited.rate},
            "policies": [asdict(each) for each in self.found],
        }
        declined = {"declined": self.declined._asdict()} if self.declined else {}
        return dict(without_nan(document | self.ending() | declined))


def plan_capacity(settings: Experiment, policies: Sequence[str], asks: Asked) -> CapacityPlan:
    """Search every policy with every seed, each between zero and λ*; of `all`, drop the hopeless."""
    start = set_up(settings, asks, REQUESTS)
    ideal, limited = start.bounds()
    chosen, notes = choose(policies, settings, start.engine)
    notes += start.notes(fleet=False)
    notes += graphs_said(settings, start.engine, asks.levels)
    notes += small_graphs(start.engine, asks.levels, (each.policy for each in chosen.values()))
    refuse_impossible(start, ideal.rate)
    length = Lengthening(start, chosen, ideal.rate, frozenset(chosen) - {*policies})
    searched = length.search()
    found, left = searched.found, searched.left
    if left:
        notes.append(INTERRUPTED.format(left, len(chosen) * len(start.seeds)))
    notes += [*given_up(found), *at_the_edge(found)]
    notes += [] if left else length.not_enough(searched)
    plan = CapacityPlan(start, searched.traffic, tuple(notes), bool(left), ideal, limited, found)
    return plan if left or plan.best is None else replace(plan, declined=searched.declined(plan.best))


def choose(policies: Sequence[str], settings: Experiment, engine: Engine) -> tuple[Chosen, list[str]]:
    wanted, notes = list(policies), []
    if ALL in wanted:
        plain = [name for name in BATCH if not _needs(name)]
        wanted = [*plain, *(text for text in wanted if text != ALL and text not in plain)]
        if left_out := [name for name in BATCH if name not in plain]:
            notes.append(f"left out, for want of parameters: {', '.join(left_out)}")
    made = lambda name, own: (Contender(name, own), make_policy(name, own, engine)[1])  # noqa: E731
    return each_once("policy", wanted, settings.set, made), notes


def _needs(name: str) -> bool:
    parameters = policy_parameters(name).items()
    return any(own.default is own.empty and key not in ("slots", "budget") for key, own in parameters)


# -- the seeds of one policy put together

STAYS = 10  # a run should last so many times as long as all but a few requests stay
WIDE, CARRIES = 0.2, 0.1  # half of an interval, as a share of the rate: too much, and what runs should reach


def half_width(rate: Estimate) -> float:
    if rate.low is None or rate.high is None or not rate.value:
        return 0.0
    return max(rate.high - rate.value, rate.value - rate.low) / rate.value


def apart(one: PolicyRate, other: PolicyRate) -> bool:
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


def better(one: PolicyRate, other: PolicyRate, error: float) -> bool:
    """Significantly, and by more than the card may be off."""
    return apart(one, other) and other.rate.value < (1 - error) * one.rate.value


def declined(
    found: PolicyRate, requests: int, stay: float, load: float | None = None, lasting: bool = False
) -> Declined | None:
    """None where the rate may be told: its interval is narrow enough, or both of its ends say that the load
    needs equally many engines.

    With every seed an engine served a run, as promised, while it arrived and the `stay` of all but a few
    requests: it can do so again and again. So few seeds do not make the low end lower than that, and where
    every search ended at λ*, without an interval, it is the low end. With `lasting`, for runs that may be
    longer, only the interval counts, and at λ* only rates at which a run lasts long enough.
    """
    rate, worst = found.rate, min(found.by_seed, default=0.0)
    served = requests / (requests / worst + stay) if worst and not lasting else 0.0
    edge = found.stuck and stay > 0
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


def at_the_edge(found: Sequence[PolicyRate]) -> list[str]:
    stuck = [f"{each.policy} ({each.at_edge} of {len(each.by_seed)})" for each in found if each.at_edge]
    said = f"searches that ended at λ*, their upper edge: {'; '.join(stuck)}: such rates are at most these"
    return [said] if stuck else []


def given_up(found: Sequence[PolicyRate]) -> list[str]:
    lengths = sorted({each.dropped for each in found if each.dropped})
    names = {n: ", ".join(each.policy for each in found if each.dropped == n) for n in lengths}
    return [
        f"dropped after runs of {length:,} requests with one seed, for they miss a level at "
        f"{100 * HOPELESS:.0f} % of what the best sustains: {dropped}. Their intervals are the brackets "
        "then; name one with --policy to search it to the end"
        for length, dropped in names.items()
    ]


def put_together(
    text: str, searches: Searches, answers: Answers, top: float, levels: tuple[Level, ...], dropped: int = 0
) -> PolicyRate:
    """The rates of all seeds put together, and what gave way. One that was `dropped` has its bracket."""
    mine = {seed: search for (policy, seed), search in searches.items() if policy == text}
    rates = np.array([search.answer for search in mine.values()])
    reasons, kept, idle, tails = Counter[str](), [], [], []
    for seed, search in mine.items():
        if search.missed <= top:
            reasons[answers[text, seed, search.missed].worst] += 1
            idle += [values] if (values := answers[text, seed, search.missed].values) else []
        if search.sustained:
            kept.append(answers[text, seed, search.sustained].values)
            tails.append(answers[text, seed, search.sustained].tails)
    if dropped:
        (only,) = mine.values()
        rate = Estimate(only.answer, only.sustained, only.missed)
    else:
        rate = _no_finer_than_searched(Spread.of_values(rates).estimate().cut(), list(mine.values()))
    names = [str(level) for level in levels if level.statistic]
    values = np.mean(kept, axis=0) if kept else np.max(idle, axis=0, initial=0.0)
    beyond = np.max(tails, axis=0, initial=0.0).tolist() if tails else []
    return PolicyRate(
        policy=text,
        rate=rate,
        share=rate.value / top,
        by_seed=tuple(rates.tolist()),
        limited_by=reasons.most_common(1)[0][0] if reasons else "",
        values=dict(zip(names, values.tolist(), strict=True)) if kept or idle else {},
        runs=sum(len(search.tried) for search in mine.values()),
        at_edge=sum(search.sustained >= search.top for search in mine.values()),
        dropped=dropped,
        tails=dict(zip(names, zip(beyond, beyond[len(names) :], strict=False), strict=False)),
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


def refuse_idle(found: Sequence[PolicyRate], levels: Sequence[Level]) -> None:
    checked = [level for level in levels if level.statistic]

    def ratio(each: PolicyRate) -> float:
        return max(each.values.get(str(level), inf) / level.limit for level in checked)

    if not found or any(each.rate.value for each in found):
        return
    best = min(found, key=ratio)
    if ratio(best) == inf:
        raise InputError(f"one engine keeps {'; '.join(map(str, checked))} at no rate; ask for less")
    said = nearest(checked, best.values)
    raise InputError(f"one engine that is almost idle cannot keep {said}")


SURE = 1.5  # what requests miss by so much, each alone on the engine, no policy keeps


def refuse_impossible(start: SetUp, top: float) -> None:
    """Before any search: levels that even requests that are alone on the engine miss by far."""
    if start.traffic.recorded:
        return
    case, levels = start.case(start.traffic.at_rate), start.traffic.levels
    task = RateTrial(PLAIN, {}, None, start.settings.seed, LEAST * top)
    memory = remembered(start.asks.folder, case)
    kept = memory.get(task) if memory else None
    if kept is None:
        kept = case.run(task)
        if memory:
            memory.put(task, kept)
    if isfinite(kept.ratio) and kept.ratio > SURE:
        levels = tuple(level for level in levels if level.statistic)
        values = dict(zip(map(str, levels), kept.values, strict=True))
        raise InputError(f"one engine that is almost idle cannot keep {nearest(levels, values)}")


# -- runs long enough for the answer

REQUESTS, MOST = 1500, 24_000  # of the first runs and of the longest, unless told otherwise
LENGTHENS = "leave out --requests and --seeds: runs then get longer until there is an answer"
LONGER_TRACE = "take a longer trace, or leave out --as-recorded"
TIGHT = 0.02  # half of an interval, and what twice the length may change, as shares of the rate


class Searched(NamedTuple):
    traffic: SearchTraffic
    found: tuple[PolicyRate, ...]
    left: int  # searches that were interrupted
    stay: float  # in seconds at a sustained rate, of all but a few requests
    steady: bool = False  # runs of half as many requests or fewer gave the same rates

    def declined(
        self, found: PolicyRate, load: float | None = None, lasting: bool = False
    ) -> Declined | None:
        said = declined(found, self.traffic.requests, self.stay, load, lasting)
        remedy = LONGER_TRACE if self.traffic.recorded else LENGTHENS
        given = self.traffic.recorded or self.traffic.words.requests
        return said._replace(remedy=remedy) if said and given else said


@dataclass(frozen=True)
class Lengthening:
    """Searches with runs of `REQUESTS`, then of twice as many from where the last ones ended, and so on.

    A short run flatters every policy: an engine that falls behind is not seen to, and seeds agree on it.
    So an interval is not enough; the answer must also stay when runs get longer. A policy that was dropped
    is not in the longer runs.
    """

    start: SetUp
    chosen: Chosen
    top: float
    droppable: frozenset[str] = frozenset()
    known: Mapping[str, float] = field(default_factory=dict)  # rates that shorter runs gave
    plain: frozenset[str] = frozenset()  # that are the answer where none is significantly better; runs are
    # then no longer than it takes to have one
    load: float | None = None  # that the answer is for

    def search(self) -> Searched:
        traffic, before = self.start.traffic, None
        fixed = self.start.settings.requests is not None or traffic.recorded
        while True:
            found = self._at(traffic, before)
            rates = [[each.rate.value for each in one.found] for one in (before or found, found)]
            same = all(abs(new - old) <= TIGHT * new for old, new in zip(*rates, strict=False))
            found = found._replace(steady=before is not None and same)
            enough = fixed or found.left or traffic.requests >= MOST
            if enough or self._done(found):
                return found
            wanted = max(2 * traffic.requests, 0 if self.plain else self._needs(found))
            traffic, before = replace(traffic, requests=min(MOST, wanted)), found

    def _done(self, found: Searched) -> bool:
        if self.plain:
            best = max(found.found, key=lambda each: each.rate.value)
            plain = max(
                (each for each in found.found if each.policy in self.plain), key=lambda each: each.rate.value
            )
            answer = best if better(best, plain, throughput_error(self.start.card)) else plain
            return found.declined(answer, self.load, lasting=True) is None
        long = found.traffic.requests >= self._needs(found) or not any(each.stuck for each in found.found)
        return found.steady and long and not self._wide(found)

    def not_enough(self, found: Searched) -> list[str]:
        wide, need, notes = self._wide(found), self._needs(found), list[str]()
        if wide and not self.plain:  # there the intervals stand beside the rates
            notes.append(f"not within ±{100 * TIGHT:.0f} %: {wide}; take more --requests or --seeds")
        if found.traffic.requests < need:
            said = f"runs of {found.traffic.requests:,} requests last less than {STAYS} times as long as "
            said += f"{100 * (1 - FEW):.0f} % of them stay ({found.stay:.0f} s)"
            enough = found.steady and not any(each.stuck for each in found.found)
            same = f", but half as many gave the same rates within {100 * TIGHT:.0f} %: they are enough"
            more = f" and flatter every rate: {need:,} would do; take more --requests"
            notes.append(said + (same if enough else more))
        return notes

    def _wide(self, found: Searched) -> str:
        halves = {each.policy: half_width(each.rate) for each in found.found if not each.dropped}
        return ", ".join(f"{name} ±{100 * half:.1f} %" for name, half in halves.items() if half > TIGHT)

    def _needs(self, found: Searched) -> int:
        most = max((each.rate.value for each in found.found if not each.dropped), default=0.0)
        return ceil(STAYS * found.stay * most / 100) * 100

    def _at(self, traffic: SearchTraffic, before: Searched | None) -> Searched:
        _, options, progress, folder = self.start.asks
        earlier = {each.policy: each for each in before.found} if before else {}
        found = {text: each for text, each in earlier.items() if each.dropped}
        chosen = {text: own for text, own in self.chosen.items() if text not in found}
        case = self.start.case(traffic)
        precision = options.precision if not before else min(options.precision, TIGHT)
        memory, seeds = remembered(folder, case), self.start.seeds
        progress = partial(progress, f"runs of {traffic.requests:,} requests")
        race = Race(case, self.top, precision, seeds, self.droppable, options.workers, progress, memory)
        known = {text: each.rate.value for text, each in earlier.items()} if before else self.known
        searches, answers, dropped = race.run(chosen, known)
        left = sum(search.next() is not None for (text, _), search in searches.items() if text not in dropped)
        tried = {key: search for key, search in searches.items() if search.tried}
        for text in dict.fromkeys(text for text, _ in tried):
            length = traffic.requests if text in dropped else 0
            found[text] = put_together(text, tried, answers, self.top, traffic.levels, length)
        kept = [each for (text, *_), each in answers.items() if text not in dropped and each.ratio <= 1]
        stay = max((each.stay for each in kept), default=0.0)
        return Searched(traffic, tuple(found[text] for text in self.chosen if text in found), left, stay)
