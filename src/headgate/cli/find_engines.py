"""`headgate plan capacity --find engines`: how few engines bear a load under service levels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from headgate.advisor.settings import SearchSettings
from headgate.cli.output import write_json
from headgate.cli.pages import save_page
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
    from headgate.experiment.run import DEFAULT_ROUTER
    from headgate.report.terminal.engines import engines_text, engines_verdict
    from headgate.report.terminal.tables import as_text, show

    json, report = outputs
    say: TextIO = sys.stderr if json == "-" else sys.stdout
    wanted = routers or list(words.routers) or [words.router or DEFAULT_ROUTER]
    ways = make_ways(wanted, policies, words)
    found = plan_engines(words, ways, levels, options, Serving.of(words), bar)
    show(engines_text(found), say)
    if report is not None:
        from headgate.report.plans.engines import fewest_page

        printed = as_text(engines_text(found))
        save_page(fewest_page(found, engines_verdict(found), printed, sys.argv[1:]), report, say)
    write_json(json, found.as_dict())
    if found.interrupted:
        raise KeyboardInterrupt
    if advice := out_of_reach(found):
        raise InputError(advice)
