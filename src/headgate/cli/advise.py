"""`headgate advise`: from a trace and a promise to a command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate.advisor.settings import SEARCH, SearchSettings
from headgate.cli.flags import takes_settings
from headgate.cli.pages import Json, Outputs, Report, tell
from headgate.cli.progress import bar
from headgate.cli.searches import Cache, Levels, Policies, asked
from headgate.experiment.settings import Experiment

EXAMPLES = """Say which policy, flags and engines keep your latency promises.

Prints the lines to paste. Tries policies (mixed, keep, slai and eb+ unless --policy names others) with
several max_num_seqs and max_num_batched_tokens on short runs, then the best flags of each on long ones, and
the fewest engines where one does not bear the load: a trace's own, --scale-rate or --rate. Plain vLLM at
its own best flags and at its defaults stands beside the answer. Answers are kept under ~/.cache/headgate,
so that a second question is quick. A level is METRIC=TIME@STATISTIC:CLASS, as for `headgate plan capacity`.

\b
Examples:
  headgate advise --trace azure-conv --slo ttft=1s@p95,tbt=100ms@p99
  headgate advise --trace azure-conv --scale-rate 10 --slo ttft=1s@p95,tbt=100ms@p99 --engines-at-most 32
  headgate advise --prompt 1000 --output 200 --rate 15 --slo ttft=500ms@p95 --policy keep --policy slai
"""

EnginesAtMost = Annotated[
    int | None, typer.Option(min=1, help="look no further (default: 32)", rich_help_panel=SEARCH)
]
Model = Annotated[str | None, typer.Option(help="the model, for the lines to paste (default: the card's)")]
MOST_ENGINES = 32


@takes_settings
def advise(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    policy: Policies = None,
    engines_at_most: EnginesAtMost = None,
    model: Model = None,
    cache: Cache = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """Advise."""
    from headgate.advisor.advise.candidates import POLICIES
    from headgate.advisor.advise.plan import advise as find
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.report.plans.advise import advice_page, other_said

    outputs = Outputs(json, report).checked()
    asks = asked("advise", words, search, slo, policy, cache)
    told = search.most_engines if "most_engines" in search.model_fields_set else MOST_ENGINES
    options = asks.options.model_copy(update={"most_engines": engines_at_most or told})
    found = find(words, asks.policies or list(POLICIES), asks.levels, options, bar, asks.folder)
    setup = assumed(words, tried_arrivals(search.as_recorded), limits=False)
    page = advice_page(found, model, sys.argv[1:])
    tell(page, found.as_dict(), outputs, setup, found.start.traffic.lost, [other_said(found)])


advise.__doc__ = EXAMPLES
