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
    tell(engines_page(found, sys.argv[1:]), found.as_dict(), *outputs, setup, unservable_in(words))
    if found.interrupted:
        raise KeyboardInterrupt
    if advice := out_of_reach(found):
        raise InputError(advice)
