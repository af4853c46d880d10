"""The largest rate each policy sustains under service levels, beside the rate none can exceed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headgate.advisor.capacity.found import Declined, Found, at_the_edge, given_up
from headgate.advisor.capacity.lengthening import REQUESTS, Lengthening
from headgate.advisor.capacity.search import Progress
from headgate.advisor.capacity.slo import Level
from headgate.advisor.capacity.trials import Chosen, Contender
from headgate.advisor.graph_size import graphs_said, small_graphs
from headgate.advisor.set_up import set_up
from headgate.advisor.settings import SearchSettings
from headgate.core.errors import InputError
from headgate.cost.error_bar import throughput_error
from headgate.experiment.settings import Experiment
from headgate.experiment.unservable import ALL_FIT, Unservable
from headgate.methods.bounds.capacity import Bound
from headgate.methods.make import make_policy, policy_parameters, split_name
from headgate.methods.names import BATCH
from headgate.sim.engine.engine import Engine
from headgate.stats.metrics import without_nan

ALL = "all"
INTERRUPTED = (
    "interrupted with {} of {} searches unfinished: their rates are what was known then, often too low"
)


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
    lost: Unservable = ALL_FIT
    declined: Declined | None = None  # why nothing can be said of the best

    @property
    def best(self) -> Found | None:
        return max(self.found, key=lambda each: each.rate.value, default=None)

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
        document |= {"declined": self.declined._asdict()} if self.declined else {}
        plain = without_nan(document)
        assert isinstance(plain, dict)
        return plain


def plan_capacity(
    settings: Experiment,
    policies: Sequence[str],
    levels: tuple[Level, ...],
    options: SearchSettings,
    progress: Progress,
    folder: Path | None = None,
) -> CapacityPlan:
    """Search every policy with every seed, each between zero and λ*; of `all`, drop the hopeless.

    `folder` has answers from before and takes the new ones.
    """
    start = set_up(settings, levels, options, REQUESTS)
    engine = start.engine
    ideal, limited = start.bounds()
    chosen, notes = choose(policies, settings, engine)
    notes += start.notes(fleet=False)
    notes += graphs_said(settings, engine, levels)
    notes += small_graphs(engine, levels, (each.policy for each in chosen.values()))
    length = Lengthening(
        start=start,
        chosen=chosen,
        levels=levels,
        top=ideal.rate,
        droppable=frozenset(chosen) - frozenset(policies),
        folder=folder,
    )
    searched = length.search(progress)
    found, left = searched.found, searched.left
    if left:
        notes.append(INTERRUPTED.format(left, len(chosen) * len(start.seeds)))
    notes += [*given_up(found), *at_the_edge(found)]
    notes += [] if left else length.not_enough(searched)
    plan = CapacityPlan(
        card=start.card.name,
        workload=start.workload,
        engine=engine,
        levels=levels,
        classes=searched.traffic.classes,
        requests=searched.traffic.requests,
        ideal=ideal,
        limited=limited,
        found=found,
        notes=tuple(notes),
        interrupted=bool(left),
        error=throughput_error(start.card),
        lost=searched.traffic.lost,
    )
    return plan if left or plan.best is None else replace(plan, declined=searched.declined(plan.best))


def choose(policies: Sequence[str], settings: Experiment, engine: Engine) -> tuple[Chosen, list[str]]:
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
        chosen[text] = Contender(name, values)
    return chosen, notes


def _needs(name: str) -> list[str]:
    """Parameters that neither have a default nor come from the engine."""
    free = inspect.Parameter.empty
    known = ("slots", "budget")
    return [key for key, each in policy_parameters(name).items() if each.default is free and key not in known]
