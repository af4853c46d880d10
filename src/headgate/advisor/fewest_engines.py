"""The fewest engines that keep service levels at a given load, by router and policy, beside the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headgate.advisor.capacity.memory import AnswerFile, file_of
from headgate.advisor.capacity.plan import ALL, STAYS, choose, refuse_impossible
from headgate.advisor.capacity.search import Fewest, search_all
from headgate.advisor.capacity.traffic import Level, SearchTraffic, measure, nearest
from headgate.advisor.capacity.trials import FEW, Contender, usual_stay
from headgate.advisor.flags import graphs_said, small_graphs
from headgate.advisor.set_up import Asked, SearchPlan, SetUp, offered_rate, set_up, without_load
from headgate.core.errors import InputError, RunError
from headgate.cost.card import load_card
from headgate.experiment.build import make_engine
from headgate.experiment.fleet import FleetSetup, finished, prices_of, transfer_time
from headgate.experiment.library import simulate
from headgate.experiment.run import composes_ahead, each_once
from headgate.experiment.settings import Experiment, ManyEngines
from headgate.methods.bounds import Bound
from headgate.methods.make import make_policy, router_settings
from headgate.record.tables import Run
from headgate.stats import flow
from headgate.stats.figures import Estimate, Spread
from headgate.stats.metrics import without_nan
from headgate.workloads.workload import Workload

PER_ENGINE = 1500  # requests for each engine the bound asks for, unless told otherwise
FEWEST, MOST = 1500, 200_000  # requests of a run
ROUNDING = 1e-9


class FleetOutcome(NamedTuple):
    ratio: float
    worst: str
    values: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    busy: float = 0.0  # share of the engines' time in steps
    slots: float = 0.0  # share of their slots with a decode
    stay: float = 0.0  # seconds from the arrival to the end of a request, of all but a few


Outcomes = dict[tuple[str, int], list[FleetOutcome]]  # of the seeds that count, by way and engines
FULL = 0.95  # of λ*: beyond, a backlog grows too slowly for a short run to show it


@dataclass(frozen=True)
class Size:
    engines: int
    kept: int
    stopped: int  # seeds with which the run did not reach its end
    seeds: int
    shares: dict[str, Estimate]  # of requests, or gaps, within each limit
    values: dict[str, float]
    busy: Estimate  # share of the engines' time in steps
    slots: Estimate  # share of their slots with a decode
    load: float  # of what they could serve at most, λ*
    highest: dict[str, float]  # value of each level over seeds
    stay: float = 0.0  # in seconds, of all but a few requests


@dataclass(frozen=True)
class FleetFound:
    """The answer for one router and policy. `engines` is None when `most` were too few."""

    name: str
    router: str
    policy: str
    engines: int | None
    gives_way: str  # the level that is missed with one engine fewer, "" where the bound is reached
    sizes: tuple[Size, ...]  # all that were tried, by number of engines

    def size(self, engines: int) -> Size | None:
        return next((size for size in self.sizes if size.engines == engines), None)

    @property
    def crowded(self) -> float:
        """The load of the answer, as a share of λ*, where it is too near; else 0."""
        size = self.size(self.engines or 0)
        return size.load if size and size.load > FULL else 0.0


@dataclass(frozen=True)
class EnginesPlan(SearchPlan):
    rate: float
    bound: Bound  # λ* of one engine with its limits
    found: tuple[FleetFound, ...]

    @property
    def least(self) -> int:
        return least_engines(self.rate, self.bound)

    @property
    def best(self) -> FleetFound | None:
        enough = [fleet for fleet in self.found if fleet.engines]
        return min(enough, key=lambda fleet: fleet.engines or 0, default=None)

    def as_dict(self) -> dict[str, Any]:
        document = super().as_dict() | {
            "rate": self.rate,
            "requests_per_run": self.traffic.requests,
            "seeds": len(self.start.seeds),
            "bound_of_engine": {**asdict(self.bound), "rate": self.bound.rate},
            "least_engines": self.least,
            "fleets": [asdict(fleet) for fleet in self.found],
        }
        return dict(without_nan(document | self.ending()))


def least_engines(rate: float, bound: Bound) -> int:
    return max(1, ceil(rate / bound.rate - ROUNDING))


def within_reach(rate: float, bound: Bound, most: int, flag: str = "--most-engines") -> int:
    least = least_engines(rate, bound)
    if least > most:
        raise InputError(
            f"{rate:g} requests/s need at least {least} engines, more than {flag} {most}; raise it, or ask "
            "for less"
        )
    return least


def plan_engines(
    settings: Experiment,
    ways: dict[str, Way],
    asks: Asked,
    serve: Serve | None = None,
    possible: bool = False,
) -> EnginesPlan:
    """Search every way for itself, from the bound up, on the same requests; `possible`: one engine keeps the
    levels at some rate, as is known.
    """
    serve = serve or Serving.of(settings)
    names = settings.model_fields_set - set(ManyEngines.model_fields)
    settings = Experiment.model_construct(names, **{name: getattr(settings, name) for name in names})
    start = set_up(without_load(settings), asks, FEWEST)
    rate = offered_rate(settings, start.traffic)
    if rate is None:
        raise InputError("--find engines needs a load: give --rate, or a trace with its own times")
    _, bound = start.bounds()
    least = within_reach(rate, bound, asks.options.most_engines)
    if not possible:
        refuse_impossible(start, bound.rate)
    traffic, fixed = start.traffic, bool(settings.requests or start.traffic.recorded)
    if not fixed:  # so many requests that every engine is busy for a while
        traffic = replace(traffic, requests=min(MOST, max(FEWEST, PER_ENGINE * least)))
    case = FleetCase(serve=serve, traffic=traffic, rate=rate, slots=start.engine.running)
    counted = CountSearch(ways=ways, start=start).search(case, least, longer=not fixed)
    notes = start.notes(fleet=True) + graphs_said(settings, start.engine, asks.levels)
    notes += small_graphs(start.engine, asks.levels, (way.policy for way in ways.values()))
    fleets = tuple(_fleets(counted, ways, asks.levels, rate / bound.rate))
    return EnginesPlan(
        start=start,
        traffic=replace(traffic, requests=counted.requests),
        notes=(*notes, *counted.notes(), *_too_short(fleets, counted.requests / rate, rate)),
        interrupted=bool(counted.left),
        rate=rate,
        bound=bound,
        found=fleets,
    )


# -- the search


class Way(NamedTuple):
    router: str
    policy: str
    router_settings: dict[str, Any]
    settings: dict[str, Any]


class CountSearch(NamedTuple):
    """Searches for the fewest engines, with longer runs until the count stays.

    Short runs flatter every fleet: a backlog that grows slowly is not seen in them, with any seed.
    """

    ways: dict[str, Way]
    start: SetUp

    def search(self, case: FleetCase, least: int, longer: bool) -> CountsTried:
        """From `least` up. Each way for itself, so that its answer does not depend on the others."""
        most = self.start.asks.options.most_engines
        open_ = {name: Fewest(least, most) for name in self.ways}
        outcomes = self._run(case, open_)
        found = CountsTried(open_, outcomes, _unfinished(open_), case.traffic.requests)
        while longer and not found.left and open_ and case.traffic.requests < MOST:
            twice = replace(case.traffic, requests=min(MOST, 2 * case.traffic.requests))
            case = case._replace(traffic=twice)
            before = {name: count for name, each in open_.items() if (count := each.enough) is not None}
            open_ = {name: Fewest(count, most) for name, count in before.items()}
            try:
                ran = self._run(case, open_)
            except KeyboardInterrupt:
                return found._replace(left=list(open_))
            for name, search in open_.items():
                for count, ratio in search.tried.items():
                    found.searches[name].tell(count, ratio)
            outcomes = outcomes | ran
            found = CountsTried(found.searches, outcomes, _unfinished(open_), case.traffic.requests)
            open_ = {name: each for name, each in open_.items() if each.enough != before[name]}
        return found

    def _run(self, case: FleetCase, searches: dict[str, Fewest]) -> Outcomes:
        """A count is enough when it is enough with every seed. Seeds after the first that misses are not run,
        except with one engine fewer than the answer, or the most, which are shown.
        """

        def trials(key: tuple[str], count: int) -> list[FleetTrial]:
            return [FleetTrial(way=self.ways[key[0]], engines=count, seed=seed) for seed in self.start.seeds]

        _, options, progress, folder = self.start.asks
        memory = remembered(folder, case.serve, case) if isinstance(case.serve, Serving) else None
        keyed, seeds = {(name,): search for name, search in searches.items()}, len(self.start.seeds)
        progress = partial(progress, "counting engines")
        values = search_all(case.run, keyed, trials, options.workers, progress, memory, seeds)
        return {(*tried.key, tried.value): tried.judged for tried in values.values()}


class FleetTrial(NamedTuple):
    way: Way
    engines: int
    seed: int


class FleetCase(NamedTuple):
    serve: Serve
    traffic: SearchTraffic
    rate: float
    slots: int  # of an engine

    def run(self, trial: FleetTrial) -> FleetOutcome:
        requests = self.traffic.at(self.rate, trial.seed)
        try:
            run = self.serve(trial.way, trial.engines, trial.seed, requests)
            kept = measure(run, self.traffic.levels)
        except RunError as error:
            return FleetOutcome(inf, f"the run stopped: {error}")
        busy, slots = utilisation(run, trial.engines, self.slots)
        stay = usual_stay(run)
        return FleetOutcome(kept.ratio, str(kept.worst), kept.values, kept.shares, busy, slots, stay)


def utilisation(run: Run, engines: int, slots: int) -> tuple[float, float]:
    window = flow.choose(run)
    start, seconds = run.steps["start"], run.steps["seconds"]
    inside = np.minimum(start + seconds, window.high) - np.maximum(start, window.low)
    inside = np.maximum(inside, 0.0) / (engines * max(window.seconds, np.finfo(float).tiny))
    return float(inside.sum()), float((inside * run.steps["decodes"]).sum()) / slots


class CountsTried(NamedTuple):
    """What was tried; of counts that were tried with runs of several lengths the longest."""

    searches: dict[str, Fewest]
    outcomes: Outcomes
    left: list[str]  # ways whose search was interrupted
    requests: int  # of the longest runs

    @property
    def tried(self) -> dict[str, Fewest]:
        return {name: search for name, search in self.searches.items() if search.tried}

    def notes(self) -> Iterator[str]:
        yield from (f"interrupted: the search for {name} is unfinished" for name in self.left)
        for name, search in self.tried.items():
            largest = max(search.tried)
            runs = self.outcomes[name, largest]
            if search.enough is None and not any(run.shares for run in runs):
                yield f"{name} with {largest} engines: {runs[0].worst}"


def _unfinished(searches: dict[str, Fewest]) -> list[str]:
    return [name for name, search in searches.items() if search.next() is not None]


def _too_short(found: Sequence[FleetFound], seconds: float, rate: float) -> Iterator[str]:
    answers = {fleet.name: size for fleet in found if (size := fleet.size(fleet.engines or 0))}
    full = {fleet.name: fleet.crowded for fleet in found if fleet.crowded}
    for load in sorted({*full.values()}):
        names = [name for name in full if full[name] == load]
        count = answers[names[0]].engines
        yield (
            f"{', '.join(names)}: {count} engines run at {100 * load:.0f} % of λ*, where {seconds:.0f} s of "
            f"traffic do not show a backlog that grows slowly; {count + 1} are on the safe side"
        )
    stay = max((size.stay for name, size in answers.items() if name not in full), default=0.0)
    if seconds < STAYS * stay:
        need = ceil(4 / 3 * STAYS * stay * rate / 100) * 100  # longer runs have longer queues
        yield (
            f"runs of {seconds:.0f} s last less than {STAYS} times as long as {100 * (1 - FEW):.0f} % of the "
            f"requests stay ({stay:.0f} s) and flatter every fleet: take --requests {need}"
        )


def _fleets(
    counted: CountsTried, ways: dict[str, Way], levels: Sequence[Level], least: float
) -> Iterator[FleetFound]:
    names = [str(level) for level in levels if level.statistic]
    for name, search in counted.tried.items():
        runs = {count: counted.outcomes[name, count] for count in sorted(search.tried)}
        missed = Counter(run.worst for run in runs.get(search.too_few, ()) if not run.ratio <= 1)
        gives_way = missed.most_common(1)[0][0] if missed else ""
        sizes = tuple(_size(count, own, names, least / count) for count, own in runs.items())
        policy = Contender(ways[name].policy, ways[name].settings).text
        yield FleetFound(name, ways[name].router, policy, search.enough, gives_way, sizes)


def _size(engines: int, runs: Sequence[FleetOutcome], names: Sequence[str], load: float) -> Size:
    whole = [run for run in runs if run.shares]
    values = {name: [run.values[place] for run in whole] for place, name in enumerate(names)}
    return Size(
        engines=engines,
        kept=sum(run.ratio <= 1 for run in runs),
        stopped=len(runs) - len(whole),
        seeds=len(runs),
        shares={name: _mean([run.shares[place] for run in whole]) for place, name in enumerate(names)},
        values={name: _mean(own).value for name, own in values.items()},
        busy=_mean([run.busy for run in whole]),
        slots=_mean([run.slots for run in whole]),
        load=load,
        highest={name: max(own) for name, own in values.items() if own},
        stay=max((run.stay for run in whole), default=0.0),
    )


def _mean(values: Sequence[float]) -> Estimate:
    if not values or not isfinite(sum(values)):
        return Estimate(float(np.mean(values)) if values else float("nan"))
    return Spread.of_values(np.array(values)).estimate()


# -- levels that no fleet keeps


def out_of_reach(plan: EnginesPlan) -> str:
    if plan.interrupted or any(fleet.engines is not None for fleet in plan.found):
        return ""
    checked = [level for level in plan.traffic.levels if level.statistic]
    best = min(plan.found, key=lambda found: _ratio(found.sizes[-1], checked))
    size = best.sizes[-1]
    engines = f"{size.engines} engine{'s' if size.engines > 1 else ''}"
    more = f"raise --most-engines (now {plan.start.asks.options.most_engines})"
    if size.stopped:
        return f"{engines} with {best.name}: {best.gives_way}"
    if not isfinite(_ratio(size, checked)):
        return f"{engines} leave requests unserved with {best.name}; {more}"
    return f"{engines} with {best.name} cannot keep {nearest(checked, size.highest)}, or {more}"


def _ratio(size: Size, levels: list[Level]) -> float:
    """How far it is from keeping the level it misses most; nothing can be proposed where a run stopped."""
    if size.stopped:
        return inf
    return max((size.highest.get(str(level), inf) / level.limit for level in levels), default=inf)


# -- ways to serve

SPREADS = ("round-robin", "least-loaded")


@dataclass(frozen=True)
class Serving:
    """Runs any way to serve on any number of engines; it can be sent to another process."""

    setup: FleetSetup  # of one engine

    @classmethod
    def of(cls, settings: Experiment) -> Serving:
        card = load_card(settings.card)
        engine, transfer = make_engine(settings, card), transfer_time(settings, card.send)
        ahead = composes_ahead(settings.asynchronous, engine.cost.host)
        return cls(FleetSetup(engine, 1, transfer, prices_of(settings), settings.watchdog, ahead))

    def __call__(self, way: Way, engines: int, seed: int, requests: Workload) -> Run:
        """One run; one that could not go on is an error, and so is a fleet too small for its router.

        A router that only spreads requests has nothing to do with one engine, which is then simulated as
        `plan capacity` does, for that has all of asynchronous scheduling.
        """
        setup = replace(self.setup, engines=engines)
        if engines == 1 and way.router in SPREADS:
            alone, _ = make_policy(way.policy, way.settings, setup.engine)
            ahead, watchdog = setup.asynchronous, setup.watchdog
            return simulate(setup.engine, alone, requests, asynchronous=ahead, watchdog=watchdog)
        try:
            router, _ = setup.router(way.router, way.router_settings, requests, seed)
        except InputError as error:
            raise RunError(str(error)) from None
        run = setup.run(lambda role: make_policy(way.policy, way.settings, setup.engine)[0], router, requests)
        return finished(run)


def remembered(
    folder: Path | None, serving: Serving, case: FleetCase
) -> AnswerFile[FleetTrial, FleetOutcome] | None:
    if folder is None:
        return None
    setup = serving.setup
    shared = case.rate, setup.transfer, setup.prices, setup.watchdog, setup.asynchronous

    def known_as(trial: FleetTrial) -> tuple[list[str], object]:
        router, policy, *settings = trial.way
        return [router, policy], (tuple(sorted(each.items()) for each in settings), *trial[1:])

    return AnswerFile(file_of(folder, setup.engine, case.traffic, shared), FleetOutcome, known_as)


def make_ways(routers: Sequence[str], policies: Sequence[str], settings: Experiment) -> dict[str, Way]:
    if ALL in policies:
        raise InputError("--policy all is too much for a search over fleets; name the policies to try")
    engine = make_engine(settings, load_card(settings.card))
    chosen, _ = choose(policies, settings, engine)
    behind = each_once("router", routers, settings.set_router, lambda *own: (own, router_settings(*own)))
    return {
        f"{place} + {text}": Way(router, each.policy, router_settings(router, own), each.settings)
        for place, (router, own) in behind.items()
        for text, each in chosen.items()
    }


Serve = Callable[[Way, int, int, Workload], Run]  # way, engines, seed, requests
