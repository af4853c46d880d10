"""The largest rate each policy sustains under service levels, beside the rate none can exceed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headgate.advisor.capacity.search import Search
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.traffic import Traffic, make_traffic
from headgate.advisor.capacity.trials import Answers, Case, Chosen, Progress, Searches, search_all
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.cost.card import load_card
from headgate.cost.error_bar import error_bar, throughput_error
from headgate.experiment.asynchrony import composes_ahead, partly
from headgate.experiment.build import make_engine
from headgate.experiment.settings import Experiment
from headgate.methods.bounds.capacity import Bound, engine_bound, ideal_bound
from headgate.methods.make import make_policy, policy_parameters, split_name
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.stats.figures import Estimate, Spread
from headgate.stats.metrics import without_nan

REQUESTS = 1500  # of each run, unless told otherwise
INSTANT = 1e9  # requests per second that no engine serves
ALL = "all"
INTERRUPTED = (
    "interrupted with {} of {} searches unfinished: their rates are what was known then, often too low"
)


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


@dataclass(frozen=True)
class CapacityPlan:
    """The answer of `headgate plan capacity`."""

    card: str
    workload: str
    engine: Engine
    levels: tuple[Level, ...]
    classes: tuple[tuple[str, float], ...]
    requests: int
    ideal: Bound
    limited: Bound  # with the engine's limits
    found: tuple[Found, ...]
    notes: tuple[str, ...]
    interrupted: bool = False
    error: float = 0.0  # of the card's throughput, relative; 0: it was measured

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, None where there is none."""
        document = {
            "card": self.card,
            "workload": self.workload,
            "engine": self.engine.limits,
            "levels": [level._asdict() for level in self.levels],
            "classes": dict(self.classes),
            "requests_per_run": self.requests,
            "bound": {**asdict(self.ideal), "seconds": self.ideal.seconds, "rate": self.ideal.rate},
            "bound_of_engine": {**asdict(self.limited), "rate": self.limited.rate},
            "policies": [asdict(each) for each in self.found],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }
        document |= {"expected_error": self.error} if self.error else {}
        plain = without_nan(document)
        assert isinstance(plain, dict)
        return plain


def plan_capacity(
    settings: Experiment,
    policies: Sequence[str],
    levels: tuple[Level, ...],
    options: SearchSettings,
    progress: Progress,
) -> CapacityPlan:
    """Search for every policy and seed at the same time, each between zero and λ*."""
    card = load_card(settings.card)
    engine = make_engine(settings, card)
    traffic = make_traffic(settings, levels, options.classes, REQUESTS, options.as_recorded, engine)
    ideal, limited = _bounds(engine, traffic, card.name)
    chosen, notes = _chosen(policies, settings, engine)
    seeds = options.seeds if traffic.drawn else 1
    notes += error_bar(card) + partly(settings, card, fleet=False)
    if sharing := traffic.sharing_said(engine):
        notes.append(sharing)
    if not traffic.drawn:
        notes.append("a trace as recorded is one sample of traffic: no interval")
    searches = {
        (text, seed): Search(ideal.rate, options.precision)
        for text in chosen
        for seed in range(settings.seed, settings.seed + seeds)
    }
    ahead = composes_ahead(settings.asynchronous, card.host)
    case = Case(engine, traffic, settings.watchdog, ahead)
    answers = search_all(case, chosen, searches, options.jobs or 1, progress)
    left = [key for key, search in searches.items() if search.next() is not None]
    if left:
        notes.append(INTERRUPTED.format(len(left), len(searches)))
    tried = {key: search for key, search in searches.items() if search.tried}
    heard = [text for text in chosen if any(text == policy for policy, _ in tried)]
    found = tuple(_found(text, tried, answers, ideal, levels) for text in heard)
    drawn = "mix" if settings.classes else settings.workload
    name = f"trace {settings.trace}" if settings.trace else f"{drawn} lengths"
    parts = (levels, traffic.classes, traffic.requests, ideal, limited, found, tuple(notes))
    return CapacityPlan(card.name, name, engine, *parts, interrupted=bool(left), error=throughput_error(card))


def _bounds(engine: Engine, traffic: Traffic, card: str) -> tuple[Bound, Bound]:
    """λ*, and the same with the engine's limits."""
    lengths = traffic.lengths(engine)
    limits = engine.running, engine.batch_tokens, engine.kv_tokens
    ideal, limited = (bound(engine.cost, lengths, *limits) for bound in (ideal_bound, engine_bound))
    if not ideal.rate < INSTANT:
        raise InputError(f"card {card}: its steps take no time, so there is no capacity to find; fix it")
    return ideal, limited


def _chosen(policies: Sequence[str], settings: Experiment, engine: Engine) -> tuple[Chosen, list[str]]:
    """The policies by what the user called them, each made once so that mistakes show before the work."""
    wanted, notes = list(policies), []
    if ALL in wanted:
        plain = [name for name in BATCH if not _needs(name)]
        wanted = [*plain, *(text for text in wanted if text != ALL and text not in plain)]
        if left_out := [name for name in BATCH if name not in plain]:
            notes.append(f"left out, for want of parameters: {', '.join(left_out)}")
    chosen: Chosen = {}
    for text in wanted:
        name, values = split_name(text)
        own = policy_parameters(name)
        values = {key: value for key, value in settings.set.items() if key in own} | values
        make_policy(name, values, engine)
        if text in chosen:
            raise InputError(f"policy {text!r} is there twice; drop one")
        chosen[text] = name, values
    return chosen, notes


def _needs(name: str) -> list[str]:
    """Parameters that neither have a default nor come from the engine."""
    free = inspect.Parameter.empty
    known = ("slots", "budget")
    return [key for key, each in policy_parameters(name).items() if each.default is free and key not in known]


def _found(text: str, searches: Searches, answers: Answers, ideal: Bound, levels: tuple[Level, ...]) -> Found:
    """The rates of all seeds put together, and what gave way."""
    mine = {seed: search for (policy, seed), search in searches.items() if policy == text}
    rates = np.array([search.answer for search in mine.values()])
    reasons, kept = Counter[str](), []
    for seed, search in mine.items():
        if search.missed <= ideal.rate:
            reasons[answers[text, seed, search.missed].worst] += 1
        if search.sustained:
            kept.append(answers[text, seed, search.sustained].values)
    rate = Spread.of_values(rates).estimate().cut()
    names = [str(level) for level in levels if level.statistic]
    values = dict(zip(names, np.mean(kept, axis=0).tolist(), strict=True)) if kept else {}
    runs = sum(len(search.tried) for search in mine.values())
    worst = reasons.most_common(1)[0][0] if reasons else ""
    return Found(text, rate, rate.value / ideal.rate, tuple(rates.tolist()), worst, values, runs)
