"""`headgate plan capacity`: the largest rate each policy sustains, or the fewest engines for a load."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.advisor.settings import SEARCH, SearchSettings
from headgate.cli.flags import takes_settings
from headgate.cli.output import check_json, check_report
from headgate.cli.pages import Report, tell
from headgate.cli.progress import bar
from headgate.core.errors import InputError, unknown
from headgate.experiment.settings import NAMED, POLICY, Experiment

if TYPE_CHECKING:
    from headgate.advisor.capacity.plan import CapacityPlan
    from headgate.advisor.capacity.slo import Level

RATE, ENGINES = "rate", "engines"

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


def _flag(help: str, panel: str = SEARCH) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel=panel)
    return option


Levels = Annotated[list[str] | None, _flag("service levels, such as ttft=500ms@p50,tbt=100ms@p99:paying")]
Policies = Annotated[list[str] | None, _flag(f"{NAMED} or all; may be repeated", POLICY)]
Find = Annotated[str, _flag("rate: of one engine; engines: how few bear the load")]
Routers = Annotated[list[str] | None, _flag("with --find engines (default: least-loaded); may be repeated")]


@takes_settings
def capacity(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    policy: Policies = None,
    find: Find = RATE,
    router: Routers = None,
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
    search = search.model_copy(update={"jobs": search.jobs or os.cpu_count() or 1})
    if find == ENGINES:
        from headgate.cli.find_engines import find_engines

        find_engines(words, router or [], wanted, levels, search, (json, report))
        return
    if router:
        raise InputError("--router is about fleets; say --find engines, or drop it")
    _find_rate(words, wanted, levels, search, (json, report))


def _outside(words: Experiment, found: CapacityPlan) -> str:
    """What the card did not measure, at the rate of the best policy."""
    from headgate.experiment.probe import outside_said

    best = max(found.found, key=lambda each: each.rate.value, default=None)
    return "" if best is None else outside_said(words, best.policy, best.rate.value)


def _find_rate(
    words: Experiment,
    policies: list[str],
    levels: tuple[Level, ...],
    options: SearchSettings,
    outputs: tuple[str | None, str | None],
) -> None:
    """Search, show, and write JSON and a report where asked."""
    from headgate.advisor.capacity.plan import plan_capacity
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.experiment.unservable import unservable_in
    from headgate.report.plans.capacity import capacity_page

    found = plan_capacity(words, policies, levels, options, bar)
    setup = assumed(words, tried_arrivals(options.as_recorded))
    alarms = unservable_in(words), _outside(words, found)
    tell(capacity_page(found, sys.argv[1:]), found.as_dict(), *outputs, setup, *alarms)
    if found.interrupted:
        raise KeyboardInterrupt


capacity.__doc__ = EXAMPLES
