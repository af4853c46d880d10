"""The best policy, flags and number of engines for a promise, beside plain vLLM at its own best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from headgate.advisor.advise.candidates import PLAIN, candidates, plain_default
from headgate.advisor.capacity.found import Found, at_the_edge, put_together
from headgate.advisor.capacity.race import HOPELESS, Race
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import Traffic
from headgate.advisor.capacity.trials import Case, Chosen, Contender, Progress, remembered
from headgate.advisor.engines.plan import FleetFound, plan_engines
from headgate.advisor.engines.ways import Serving, make_ways
from headgate.advisor.graph_size import small_graphs, with_graphs
from headgate.advisor.other_times import OtherTimes, other_question, other_rate
from headgate.advisor.set_up import SetUp, offered_rate, set_up, without_load
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.experiment.run import DEFAULT_ROUTER
from headgate.experiment.settings import Experiment
from headgate.methods.bounds.capacity import Bound
from headgate.stats.figures import Estimate
from headgate.stats.metrics import without_nan

REQUESTS = 3000  # of a run of the final, unless told otherwise
SHORT = 3  # runs of the first round have so many times fewer requests
COARSE = 0.1  # precision of the first round
FLAGS, PLAIN_FLAGS = 1, 3  # settings of a policy, and of vLLM's own scheduling, that are tried at length
TIGHT = 0.02  # half-width of an interval, as a share of the rate, that is narrow enough
STAYS = 10  # a run should last so many times as long as the longest request stays
FLEET_SEEDS, FLEET_REQUESTS = 2, 750  # of runs of fleets: seeds, and requests for each engine of the bound


@dataclass(frozen=True)
class Advised:
    """One policy with its flags: the rate it holds on one engine, and the engines that bear the load."""

    policy: str
    settings: dict[str, Any]
    seats: int
    budget: int
    found: Found
    engines: int | None = None  # that bear the load; None where none is given, or too many are needed
    fleet: FleetFound | None = None

    @property
    def name(self) -> str:
        return self.found.policy


@dataclass(frozen=True)
class Advice:
    """The answer of `headgate advise`. `best`, `plain` and `default` are among `final`, best rates first."""

    start: SetUp
    levels: tuple[Level, ...]
    bound: Bound
    load: float | None
    most: int  # engines
    first_round: tuple[Found, ...]
    final: tuple[Advised, ...]
    notes: tuple[str, ...]
    known: int  # runs whose answers were kept from before
    other: OtherTimes | None = None  # the best one's rate with the other arrival times
    other_engines: int | None = None  # that bear the load then; only where the two rates are apart

    @property
    def best(self) -> Advised:
        """The fewest engines, then the highest rate; of equals the one that needs no plug-in."""
        ranked = sorted(self.final, key=lambda each: (each.engines or self.most + 1, -each.found.rate.value))
        return ranked[0]

    @property
    def plain(self) -> Advised:
        """VLLM's own scheduling at its best flags."""
        return max(self._plain(), key=lambda each: each.found.rate.value)

    @property
    def default(self) -> Advised:
        """VLLM's own scheduling without a flag."""
        name, _ = plain_default(self.start)
        return next(each for each in self._plain() if each.name == name)

    def _plain(self) -> list[Advised]:
        return [each for each in self.final if each.policy == PLAIN and not each.settings]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, None where there is none."""
        document: dict[str, Any] = {
            "card": self.start.card.name,
            "workload": self.start.workload,
            "levels": [level._asdict() for level in self.levels],
            "load": self.load,
            "bound": self.bound.rate,
            "best": self.best.name,
            "plain": self.plain.name,
            "default": self.default.name,
            "final": [asdict(each) for each in self.final],
            "first_round": [asdict(each) for each in self.first_round],
            "notes": list(self.notes),
        }
        if self.other:
            document["other_times"] = {**self.other._asdict(), "engines": self.other_engines}
        plain = without_nan(document)
        assert isinstance(plain, dict)
        return plain


def advise(
    settings: Experiment,
    policies: Sequence[str],
    levels: tuple[Level, ...],
    options: SearchSettings,
    progress: Progress,
    folder: Path | None,
) -> Advice:
    """Every policy with several flags on short runs, the best flags of each on long ones, then fleets."""
    if PLAIN not in policies:
        policies = [PLAIN, *policies]
    settings = with_graphs(settings, levels)
    start = set_up(without_load(settings), levels, options, REQUESTS)
    load = offered_rate(settings, start.traffic)
    bound, _ = start.bounds()
    search = Round(start, levels, bound.rate, progress, folder)
    chosen = candidates(policies, start, levels, bound)
    default, contender = plain_default(start)
    chosen.setdefault(default, contender)
    first = search.short(chosen)
    kept = _finalists(first, chosen, default)
    final = search.long({name: chosen[name] for name in kept}, first)
    advised = [_advised(found, chosen[found.policy]) for found in final]
    notes = [*start.notes(fleet=False), *_too_short(final, search, start)]
    notes += small_graphs(start.engine, levels, (each.policy for each in chosen.values()))
    if load is not None:
        advised = [_with_engines(each, load, settings, levels, options, progress, folder) for each in advised]
    ranked = tuple(sorted(advised, key=lambda each: -each.found.rate.value))
    most = options.most_engines
    advice = Advice(start, levels, bound, load, most, tuple(first), ranked, tuple(notes), search.known)
    return _at_other_times(advice, settings, options, progress, folder)


def _at_other_times(
    advice: Advice, settings: Experiment, options: SearchSettings, progress: Progress, folder: Path | None
) -> Advice:
    """The same with the rate, and where that is far off the engines, of the other arrival times."""
    best, rate = advice.best, advice.best.found.rate.value
    question = other_question(settings, options, advice.start.traffic.requests) if rate else None
    if question is None:
        return advice
    contender = Contender(best.policy, best.settings, (best.seats, best.budget))
    other = other_rate(question, advice.levels, (best.name, rate), contender, progress, folder)
    if not other.apart or advice.load is None:
        return replace(advice, other=other)
    held = replace(best, engines=None, found=replace(best.found, rate=Estimate(other.other)))
    asked = question.settings.model_copy(update={"rate": advice.load, "scale_rate": None})
    again = _with_engines(held, advice.load, asked, advice.levels, question.options, progress, folder)
    return replace(advice, other=other, other_engines=again.engines)


@dataclass
class Round:
    """Searches on one set-up, short or long."""

    start: SetUp
    levels: tuple[Level, ...]
    top: float
    progress: Progress
    folder: Path | None
    known: int = 0
    stay: float = 0.0  # the longest, in the long runs

    def short(self, chosen: Chosen) -> list[Found]:
        """All of them roughly: one seed, few requests, and a wide bracket for the hopeless. Of plain vLLM
        the best flags are wanted, hopeless or not.
        """
        traffic = self.start.traffic
        few = traffic if traffic.recorded else replace(traffic, requests=max(300, traffic.requests // SHORT))
        others = [name for name, each in chosen.items() if each.policy != PLAIN]
        return self._race(chosen, few, self.start.seeds[:1], COARSE, {}, others)

    def long(self, chosen: Chosen, before: Sequence[Found]) -> list[Found]:
        """The best of them with every seed, from where the short runs ended."""
        known = {each.policy: each.rate.value for each in before}
        return self._race(chosen, self.start.traffic, self.start.seeds, self.start.options.precision, known)

    def _race(
        self,
        chosen: Chosen,
        traffic: Traffic,
        seeds: range,
        precision: float,
        known: Mapping[str, float],
        droppable: Collection[str] = (),
    ) -> list[Found]:
        start = self.start
        case = Case(start.engine, traffic, start.settings.watchdog, start.asynchronous)
        memory = remembered(self.folder, case)
        where = droppable, start.options.workers, self.progress, memory
        searches, answers, dropped = Race(case, self.top, precision, seeds, *where).run(chosen, known)
        if any(search.next() is not None for (name, _), search in searches.items() if name not in dropped):
            raise KeyboardInterrupt
        self.known += memory.hits if memory else 0
        self.stay = max((each.stay for each in answers.values() if each.ratio <= 1), default=0.0)
        return [
            put_together(name, searches, answers, self.top, self.levels, traffic.requests * (name in dropped))
            for name in chosen
        ]


def _finalists(first: Sequence[Found], chosen: Chosen, default: str) -> list[str]:
    """The best flags of every policy that is not hopeless; of vLLM's own more, and its defaults always."""
    most = max(each.rate.value for each in first)
    taken: dict[str, int] = {}
    kept: list[str] = []
    for each in sorted(first, key=lambda each: -each.rate.value):
        contender = chosen[each.policy]
        plain = contender.policy == PLAIN
        key = f"{contender.policy} {sorted(contender.settings.items())}"
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= (PLAIN_FLAGS if plain else FLAGS) and (plain or each.rate.value >= HOPELESS * most):
            kept.append(each.policy)
    return list(dict.fromkeys([*kept, default]))


def _advised(found: Found, contender: Contender) -> Advised:
    seats, budget = contender.limits or (0, 0)
    return Advised(contender.policy, contender.settings, seats, budget, found)


def _with_engines(
    each: Advised,
    load: float,
    settings: Experiment,
    levels: tuple[Level, ...],
    options: SearchSettings,
    progress: Progress,
    folder: Path | None,
) -> Advised:
    """How many such engines bear the load: one if its rate is above it for sure, else a search of fleets."""
    low = each.found.rate.value if each.found.rate.low is None else each.found.rate.low
    if low >= load:
        return replace(each, engines=1)
    if not each.found.rate.value:
        return each
    fleet = settings.model_copy(update={"slots": each.seats, "budget": each.budget})
    few = options.model_copy(update={"seeds": min(options.seeds, FLEET_SEEDS)})
    wanted = settings.requests or FLEET_REQUESTS * max(2, ceil(load / each.found.rate.value))
    fleet = fleet if options.as_recorded else fleet.model_copy(update={"requests": wanted})
    text = each.policy + ("" if not each.settings else ":" + _settings(each.settings))
    ways = make_ways([settings.router or DEFAULT_ROUTER], [text], fleet)
    guess = ceil(0.9 * load / each.found.rate.value)
    try:
        plan = plan_engines(fleet, ways, levels, few, Serving.of(fleet), progress, guess, folder)
    except InputError:  # more engines than may be
        return each
    if plan.interrupted:
        raise KeyboardInterrupt
    (found,) = plan.found
    return replace(each, engines=found.engines, fleet=found)


def _settings(values: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in values.items())


def _too_short(final: Sequence[Found], search: Round, start: SetUp) -> list[str]:
    """Where longer runs, or more seeds, would say more."""
    notes, best = at_the_edge(final), max(final, key=lambda each: each.rate.value)
    rate = best.rate
    if rate.value and rate.low is not None and rate.high is not None:
        half = max(rate.high - rate.value, rate.value - rate.low) / rate.value
        if half > TIGHT:
            wide = f"±{100 * half:.1f} %, wider than ±{100 * TIGHT:.0f} %"
            notes.append(f"the interval of {best.policy} is {wide}: take more --requests or --seeds")
    seconds = start.traffic.requests / rate.value if rate.value else 0.0
    if rate.value and search.stay * STAYS > seconds:
        need = ceil(STAYS * search.stay * rate.value / 100) * 100
        notes.append(
            f"a run lasts {seconds:.0f} s, less than {STAYS} times the longest request "
            f"({search.stay:.0f} s), and flatters every rate: take --requests {need}"
        )
    return notes
