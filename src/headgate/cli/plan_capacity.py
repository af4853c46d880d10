"""`headgate plan capacity`: the largest rate each policy sustains, or the fewest engines for a load."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.flags import takes_words
from headgate.cli.output import check_json, check_report, write_json
from headgate.cli.pages import Report, save_page
from headgate.cli.progress import bar
from headgate.core.errors import InputError, unknown
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.capacity.plan import Options
    from headgate.advisor.capacity.slo import Level

RATE, ENGINES = "rate", "engines"
SEARCH = "Search"
MOST_SEEDS = 100

EXAMPLES = """The largest rate under service levels, or the fewest engines for a load.

λ* is the rate beyond which every policy falls behind. Each policy is simulated
at rates between zero and λ*, by bracketing, with several seeds in parallel.
With --find engines the load is given (a trace's own, --scale-rate or --rate)
and fleets are simulated at token level, from load / λ* engines up, under every
--router with every --policy.
A level is METRIC=TIME@STATISTIC:CLASS with the metrics ttft, tbt (every gap
between two tokens), tpot and e2e, the statistics p50, p99, ... mean and max,
and a class or all requests. Without a statistic it is a promise that policies
know of and nobody checks.

\b
Examples:
  headgate plan capacity --slo ttft=500ms@p50,tbt=100ms@p99 \\
      --policy mixed --policy v0 --prompt 1000 --output 200
  headgate plan capacity --slo ttft=500ms@p50,tbt=100ms@p99:paying,tbt=500ms:free \\
      --classes paying=5%,free=95% --trace sharegpt-8k --policy sarathi --policy slai \\
      --card pub-rtx-ada-6000-mistral-7b --slots 128 --budget 512
  headgate plan capacity --slo e2e=20s@p95 --policy all --trace azure-conv --seeds 2
  headgate plan capacity --find engines --slo ttft=500ms@p95,tpot=40ms@p95 \\
      --trace azure-conv --scale-rate 30 --router least-loaded --policy mixed --policy eb+
"""


def _flag(help: str, panel: str = SEARCH, **limits: float) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel=panel, **limits)  # type: ignore[arg-type]
    return option


Levels = Annotated[list[str] | None, _flag("service levels, such as ttft=500ms@p50,tbt=100ms@p99:paying")]
Policies = Annotated[
    list[str] | None, _flag("NAME or NAME:PARAMETER=VALUE,... or all; may be repeated", "Policy")
]
Classes = Annotated[str | None, _flag("classes drawn at random, such as paying=5%,free=95%")]
Seeds = Annotated[int, _flag("so many seeds, from --seed on", min=1, max=MOST_SEEDS)]
Precision = Annotated[float, _flag("of a bracket, as a share of the rate", min=0.001, max=0.5)]
Jobs = Annotated[int | None, _flag("processes (default: one per core)", min=1)]
Recorded = Annotated[bool, _flag("a trace's own times, faster or slower, instead of Poisson")]
Find = Annotated[str, _flag("rate: of one engine; engines: how few bear the load")]
Routers = Annotated[list[str] | None, _flag("with --find engines (default: least-loaded); may be repeated")]
MostEngines = Annotated[int, _flag("with --find engines: look no further", min=1)]


@takes_words
def capacity(
    words: Experiment,
    slo: Levels = None,
    policy: Policies = None,
    classes: Classes = None,
    seeds: Seeds = 4,
    precision: Precision = 0.04,
    jobs: Jobs = None,
    as_recorded: Recorded = False,
    find: Find = RATE,
    router: Routers = None,
    most_engines: MostEngines = 512,
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
    report: Report = None,
) -> None:
    """Search."""
    from headgate.advisor.capacity.slo import parse_levels

    check_json(json)
    check_report(report)
    if not slo:
        raise InputError("plan capacity needs --slo, such as --slo ttft=500ms@p50,tbt=100ms@p99")
    if find not in (RATE, ENGINES):
        raise unknown("thing to --find", find, (RATE, ENGINES))
    wanted, levels = policy or list(words.policies) or [words.policy], parse_levels(slo)
    jobs = jobs or os.cpu_count() or 1
    if find == ENGINES:
        from headgate.advisor.engines.plan import FleetOptions
        from headgate.cli.find_engines import find_engines

        fleets = FleetOptions(classes, seeds, jobs, as_recorded, most_engines)
        find_engines(words, router or [], wanted, levels, fleets, (json, report))
        return
    if router:
        raise InputError("--router is about fleets; say --find engines, or drop it")
    from headgate.advisor.capacity.plan import Options

    _find_rate(words, wanted, levels, Options(classes, seeds, jobs, precision, as_recorded), (json, report))


def _find_rate(
    words: Experiment,
    policies: list[str],
    levels: tuple[Level, ...],
    options: Options,
    outputs: tuple[str | None, str | None],
) -> None:
    """Search, show, and write JSON and a report where asked."""
    from headgate.advisor.capacity.plan import plan_capacity
    from headgate.report.terminal.capacity import capacity_text, verdict
    from headgate.report.terminal.tables import as_text, show

    json, report = outputs
    found = plan_capacity(words, policies, levels, options, bar)
    say = sys.stderr if json == "-" else sys.stdout
    show(capacity_text(found), say)
    if report is not None:
        from headgate.report.plans.plans import capacity_page

        text = as_text(capacity_text(found))
        save_page(capacity_page(found, verdict(found), text, sys.argv[1:]), report, say)
    write_json(json, found.as_dict())
    if found.interrupted:
        raise KeyboardInterrupt


capacity.__doc__ = EXAMPLES
