"""What every search starts from, what its answers have in common, and the answer with other arrival times."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headgate.advisor.capacity.search import Progress, Search
from headgate.advisor.capacity.traffic import Level, SearchTraffic, make_traffic, own_rate, shares
from headgate.advisor.capacity.trials import Case, Contender, remembered, search_rates
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.cost.card import Card, load_card
from headgate.cost.likeness import error_bar, throughput_error
from headgate.experiment.build import make_engine, make_workload, speculation_notes
from headgate.experiment.run import composes_ahead, partly
from headgate.experiment.settings import Experiment, without_clients
from headgate.experiment.workers import Workers
from headgate.methods.bounds import Bound, engine_bound, ideal_bound
from headgate.sim.engine.engine import Engine

INSTANT = 1e9  # requests per second that no engine serves
AS_RECORDED = "a trace as recorded is one sample of traffic: no interval"
BY_TENANT = "no level is judged by tenant; the trace's tenants matter to keep and to order=fair alone"


class Asked(NamedTuple):
    """What a search is to keep, how it looks, and where it tells how far it is and keeps its answers."""

    levels: tuple[Level, ...]
    options: SearchSettings
    progress: Progress = lambda label, total: nullcontext(lambda done: None)
    folder: Path | None = None  # of answers from before, which takes the new ones


@dataclass(frozen=True)
class SearchPlan:
    start: SetUp
    traffic: SearchTraffic
    notes: tuple[str, ...]
    interrupted: bool

    @property
    def error(self) -> float:
        """Of the card's throughput, relative; 0: it was measured."""
        return throughput_error(self.start.card)

    def as_dict(self) -> dict[str, Any]:
        return {
            "card": self.start.card.name,
            "workload": self.start.workload,
            "engine": self.start.engine.limits,
            "levels": [level._asdict() for level in self.traffic.levels],
            "classes": dict(self.traffic.classes),
        }

    def ending(self) -> dict[str, Any]:
        error = {"expected_error": self.error} if self.error else {}
        return {"notes": self.notes, "interrupted": self.interrupted, **error}


@dataclass(frozen=True)
class SetUp:
    settings: Experiment
    card: Card
    engine: Engine
    traffic: SearchTraffic
    asks: Asked

    @property
    def workload(self) -> str:
        drawn = "mix" if self.settings.classes else self.settings.workload
        return f"trace {self.settings.trace}" if self.settings.trace else f"{drawn} lengths"

    @property
    def unshared(self) -> str:
        return ", which share no prefix" if self.traffic.sharing_lost(self.engine) else ""

    @property
    def asynchronous(self) -> bool:
        return composes_ahead(self.settings.asynchronous, self.card.host)

    @property
    def seeds(self) -> range:
        first = self.settings.seed
        return range(first, first + (self.asks.options.seeds if self.traffic.drawn else 1))

    def case(self, traffic: SearchTraffic | None = None) -> Case:
        return Case(self.engine, traffic or self.traffic, self.settings.watchdog, self.asynchronous)

    def notes(self, fleet: bool) -> list[str]:
        alone = "" if self.traffic.drawn else AS_RECORDED
        trace = self.traffic.trace
        read = [*trace.remarks, *([BY_TENANT] if len(trace.tenants) > 1 else [])] if trace else []
        sharing, beside = self.traffic.sharing_said(self.engine), self.traffic.background_said
        prompts, most = self.traffic.rows.prompt, self.card.max_model_len
        long = prompts[(prompts > most) & (prompts < self.engine.longest)]
        beyond = len(long) and (
            f"{len(long):,} of {len(prompts):,} prompts are longer than the {most:,} tokens that card "
            f"{self.card.name} was made for, up to {long.max():,}: their steps are extrapolated"
        )
        drafts = speculation_notes(self.engine, self.card, self.settings)
        said = [*partly(self.settings, self.card, fleet), beyond, *drafts, *read, sharing, alone, beside]
        return [*error_bar(self.card), *(str(each) for each in said if each)]

    def bounds(self) -> tuple[Bound, Bound]:
        """λ*, and the same with the engine's limits."""
        engine = self.engine
        lengths = self.traffic.lengths(engine).in_steps(engine.burst)
        ideal, limited = (
            bound(engine.cost, lengths, engine.running, engine.batch_tokens, engine.kv_tokens)
            for bound in (ideal_bound, engine_bound)
        )
        if not limited.rate < INSTANT:
            raise InputError(
                f"card {self.card.name}: its steps take no time, so there is no capacity to find; fix it"
            )
        return ideal, limited


def set_up(settings: Experiment, asks: Asked, requests: int) -> SetUp:
    card, options = load_card(settings.card), asks.options
    engine = make_engine(settings, card)
    traffic = make_traffic(settings, asks.levels, options.classes, requests, options.as_recorded, engine)
    return SetUp(settings=settings, card=card, engine=engine, traffic=traffic, asks=asks)


def without_load(settings: Experiment) -> Experiment:
    if settings.rate and settings.scale_rate:
        raise InputError("--rate and --scale-rate both set the load; drop one of the two")
    return settings.model_copy(update={"rate": None, "scale_rate": None})


def offered_rate(settings: Experiment, traffic: SearchTraffic) -> float | None:
    if settings.rate:
        return settings.rate
    if traffic.trace is None or not settings.trace:
        return None
    return own_rate(traffic.trace, "give --rate") * (settings.scale_rate or 1.0)


# -- the answer with the other arrival times

APART = 0.2  # of the answer: from here on both are shown
PRECISION = 0.05  # of the other answer's bracket
REQUESTS = 3000  # of a run with the other times, or as many as the first one had


class OtherTimes(NamedTuple):
    name: str
    recorded: bool  # whether the other times are the trace's own
    answer: float
    other: float
    faster: float  # how many times as fast as it was recorded the trace runs
    shared: bool = False  # whether requests share prefixes with the trace's own times, and only then

    @property
    def apart(self) -> bool:
        return self.answer > 0 and abs(self.other / self.answer - 1) > APART


class Question(NamedTuple):
    settings: Experiment
    asks: Asked
    own: float  # the trace's own rate
    shared: bool


def other_question(settings: Experiment, asks: Asked, requests: int) -> Question | None:
    """The same with the other times and one seed; None where a trace has none, or the user chose a law.

    A trace is asked for its first `requests`, for a run of few drawn ones says little of its bursts.
    """
    if settings.trace is None or settings.arrivals or settings.burstiness:
        return None
    others = asks.options.model_copy(update={"as_recorded": not asks.options.as_recorded, "seeds": 1})
    trace, _ = make_workload(without_clients(without_load(settings)).model_copy(update={"requests": None}))
    if not trace.arrival[-1] > trace.arrival[0]:
        return None
    if others.as_recorded:
        first = min(len(trace), max(requests, REQUESTS))
        settings, trace = settings.model_copy(update={"requests": first}), trace.head(first)
    return Question(
        settings, asks._replace(options=others), own_rate(trace), settings.prefix_cache and shares(trace)
    )


def other_rate(question: Question, name: str, rate: float, contender: Contender) -> OtherTimes:
    """The rate of the policy that was found, searched again from where it was."""
    settings, asks, own, shared = question
    start = set_up(without_load(settings), asks, REQUESTS)
    top, seed = start.bounds()[0].rate, start.settings.seed
    search = Search(top, PRECISION, rate / top)
    case, searches = start.case(), {(name, seed): search}
    progress = partial(asks.progress, "the other arrival times")
    search_rates(case, {name: contender}, searches, Workers(), progress, remembered(asks.folder, case))
    if search.next() is not None:
        raise KeyboardInterrupt
    recorded = asks.options.as_recorded
    own_answer = search.answer if recorded else rate
    return OtherTimes(name, recorded, rate, search.answer, own_answer / own, shared)
