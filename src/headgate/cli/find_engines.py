"""`headgate plan capacity --find engines`: how few engines bear a load under service levels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headgate.cli.pages import Outputs, tell
from headgate.cli.progress import bar
from headgate.cli.searches import Asked
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.engines.plan import EnginesPlan
    from headgate.advisor.engines.trials import Way
    from headgate.advisor.other_times import OtherTimes


def find_engines(words: Experiment, routers: list[str], asks: Asked, outputs: Outputs) -> None:
    """Search, show, and write JSON and a report where asked; levels that no fleet keeps are refused then."""
    from headgate.advisor.engines.out_of_reach import out_of_reach
    from headgate.advisor.engines.plan import plan_engines
    from headgate.advisor.engines.ways import Serving, make_ways
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.experiment.run import DEFAULT_ROUTER
    from headgate.report.plans.capacity import apart_said, engines_page

    wanted = routers or list(words.routers) or [words.router or DEFAULT_ROUTER]
    ways = make_ways(wanted, asks.policies, words)
    found = plan_engines(words, ways, asks.levels, asks.options, Serving.of(words), bar, folder=asks.folder)
    other = _other_times(words, asks, ways, found)
    setup = assumed(words, tried_arrivals(asks.options.as_recorded, found.rate), fleet=True)
    alarms = apart_said(other, "needs", "engines"), _outside(words, found)
    document = found.as_dict() | ({"other_times": other._asdict()} if other else {})
    tell(engines_page(found, sys.argv[1:]), document, outputs, setup, found.lost, alarms)
    if found.interrupted:
        raise KeyboardInterrupt
    if advice := out_of_reach(found):
        raise InputError(advice)


def _other_times(
    words: Experiment, asks: Asked, ways: dict[str, Way], found: EnginesPlan
) -> OtherTimes | None:
    """The smallest fleet with the other arrival times; None where no fleet is enough."""
    from headgate.advisor.engines.plan import plan_engines
    from headgate.advisor.engines.ways import Serving
    from headgate.advisor.other_times import OtherTimes, other_question

    best = found.best
    question = None if found.interrupted else other_question(words, asks.options, found.requests)
    if question is None or best is None or best.engines is None:
        return None
    settings, others, own = question
    way, rate = {best.name: ways[best.name]}, {"rate": found.rate, "scale_rate": None}
    settings = settings.model_copy(update=rate)  # its first requests alone may be faster or slower
    plan = plan_engines(settings, way, asks.levels, others, Serving.of(words), bar, folder=asks.folder)
    (again,) = plan.found
    if again.engines is None:
        return None
    return OtherTimes(best.name, others.as_recorded, best.engines, again.engines, found.rate / own)


def _outside(words: Experiment, found: EnginesPlan) -> str:
    """What the card did not measure, on one engine of the smallest fleet that does."""
    from headgate.experiment.probe import outside_said

    best = found.best
    return outside_said(words, best.policy, found.rate / best.engines) if best and best.engines else ""
