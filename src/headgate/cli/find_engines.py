"""`headgate plan capacity --find engines`: how few engines bear a load under service levels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headgate.advisor.settings import SearchSettings
from headgate.cli.pages import tell
from headgate.cli.progress import bar
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.capacity.slo import Level
    from headgate.advisor.engines.plan import EnginesPlan


def find_engines(
    words: Experiment,
    routers: list[str],
    policies: list[str],
    levels: tuple[Level, ...],
    options: SearchSettings,
    outputs: tuple[str | None, str | None],
) -> None:
    """Search, show, and write JSON and a report where asked; levels that no fleet keeps are refused then."""
    from headgate.advisor.engines.out_of_reach import out_of_reach
    from headgate.advisor.engines.plan import plan_engines
    from headgate.advisor.engines.ways import Serving, make_ways
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.experiment.run import DEFAULT_ROUTER
    from headgate.experiment.unservable import unservable_in
    from headgate.report.plans.capacity import engines_page

    wanted = routers or list(words.routers) or [words.router or DEFAULT_ROUTER]
    ways = make_ways(wanted, policies, words)
    found = plan_engines(words, ways, levels, options, Serving.of(words), bar)
    setup = assumed(words, tried_arrivals(options.as_recorded, found.rate), fleet=True)
    alarms = unservable_in(words), _outside(words, found)
    tell(engines_page(found, sys.argv[1:]), found.as_dict(), *outputs, setup, *alarms)
    if found.interrupted:
        raise KeyboardInterrupt
    if advice := out_of_reach(found):
        raise InputError(advice)


def _outside(words: Experiment, found: EnginesPlan) -> str:
    """What the card did not measure, on one engine of the smallest fleet that does."""
    from headgate.experiment.probe import outside_said

    enough = [each for each in found.found if each.engines]
    best = min(enough, key=lambda each: each.engines or 0, default=None)
    return outside_said(words, best.policy, found.rate / best.engines) if best and best.engines else ""
