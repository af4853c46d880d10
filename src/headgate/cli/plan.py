"""`headgate plan`: what the planners say, without running anything."""

from __future__ import annotations

import sys
from math import inf
from typing import Annotated

import typer

from headgate.advisor.settings import CostSettings, SearchSettings
from headgate.cli.flags import takes_settings
from headgate.cli.help import Application
from headgate.cli.output import write_json
from headgate.cli.pages import Json, Outputs, Report, resting_on, said_to, save_page, tell
from headgate.cli.plan_capacity import capacity
from headgate.cli.plan_fluid import fluid
from headgate.cli.plan_wait import wait
from headgate.cli.progress import bar
from headgate.cli.searches import Levels, asked
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment

plan = Application(
    help="Plan thresholds, flags of plain vLLM, capacity and fleets.",
)

THRESHOLD = """When to refill; whether mixed or exclusive batches serve more.

Takes the settings of a run (a card and a workload, or a trace), or step costs
as plain numbers. Without a load (--clients, --rate, a trace's own times) the
engine is taken to be saturated.

\b
Examples:
  headgate plan threshold --prompt 512 --output 256 --clients 1024 --slots 512
  headgate plan threshold --trace azure-conv --scale-rate 4 --max-gap 100ms
  headgate plan threshold --prefill-fixed 5ms --prefill-per-token 3e-5 \\
      --decode-fixed 10ms --decode-per-request 5e-5 --mixed-fixed 11ms \\
      --mixed-by-share 4.2e-5,0,0 --prompt 512 --output 256
"""

FLAGS = """What to set in plain vLLM, without a plug-in, and why.

Seats come from KV memory and the TPOT target, the token budget from that
target, the queue limit from the TTFT target. --slots and --budget, where
given, are the most to advise. With --slo the budget is computed from the
card for the promised gap, and checked by a search around it.

\b
Examples:
  headgate plan flags --trace azure-conv --tpot 50ms --ttft 500ms
  headgate plan flags --prompt 512 --output 256 --tpot 40ms --check
  headgate plan flags --trace azure-conv --slo ttft=500ms@p95,tbt=100ms@p99
"""


@plan.command()
@takes_settings
def threshold(
    words: Experiment,
    costs: CostSettings,
    max_gap: Annotated[str | None, typer.Option(help="also plan for gaps no longer than this")] = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """Plan it."""
    from headgate.advisor.situation import situation
    from headgate.advisor.threshold import plan_threshold
    from headgate.experiment.assumed import SATURATED, arrivals_said, assumed
    from headgate.experiment.probe import MIXED, outside_said
    from headgate.report.plans.threshold import threshold_page

    outputs = Outputs(json, report).checked()
    bound = _bound(max_gap)
    found = plan_threshold(situation(words, costs), bound)
    if costs.model_fields_set:
        setup = outside = ""
    else:
        setup = assumed(words, arrivals_said(words, SATURATED), run=False)
        offered = found.situation.load.rate
        outside = outside_said(words, MIXED, min(offered or inf, found.mixed.rate))
    page, lost = threshold_page(found, sys.argv[1:]), found.situation.lost
    tell(page, found.as_dict(), outputs, setup, lost, [outside])


@plan.command()
@takes_settings
def flags(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    check: Annotated[bool, typer.Option(help="simulate the advice and vLLM's defaults")] = False,
    json: Json = None,
    report: Report = None,
) -> None:
    """Advise."""
    from headgate.advisor.flags import check_flags, plan_flags
    from headgate.experiment.assumed import SATURATED, arrivals_said, assumed
    from headgate.experiment.probe import MIXED, outside_said
    from headgate.report.plans.flags import check_section, flags_page
    from headgate.report.terminal import show

    outputs = Outputs(json, report).checked()
    if slo:
        _promised(words, search, slo, check, outputs)
        return
    found = plan_flags(words)
    setup = assumed(words, arrivals_said(words, SATURATED), run=check, limits=False)
    say, page, lost = said_to(json), flags_page(found, sys.argv[1:]), found.situation.lost
    document = lost.before(found.as_dict())
    served = min(found.situation.load.rate or inf, found.rate)
    alarms = (lost.said, found.overloaded(), outside_said(words, MIXED, served))
    show(resting_on(page, setup, alarms), say)
    if check:
        runs, load = check_flags(words, found, bar)
        document["check"] = {"load": load, "runs": [run.as_dict() for run in runs]}
        checked = check_section(runs, load, found)
        print(file=say)
        show(checked, say)
        page = flags_page(found, sys.argv[1:], [checked])
    save_page(resting_on(page, setup, alarms), report, say)
    write_json(json, document)


def _promised(
    words: Experiment,
    search: SearchSettings,
    slo: list[str],
    check: bool,
    outputs: Outputs,
) -> None:
    """The same for a promise: the budget by formula, and what a search says of it."""
    from headgate.advisor.budget_search import search_flags
    from headgate.advisor.flags import plan_flags
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.experiment.probe import MIXED, outside_said
    from headgate.report.plans.flags import promised_page

    if check or words.tpot or words.ttft:
        raise InputError("--slo is checked by a search and says the targets; drop --check, --tpot and --ttft")
    asks = asked("plan flags", words, search, slo)
    found = plan_flags(words)
    tried = search_flags(words, asks.levels, asks.options, bar)
    setup = assumed(words, tried_arrivals(search.as_recorded), limits=False)
    document = {**found.as_dict(), "promise": tried.as_dict()}
    outside = "" if tried.declined else outside_said(words, MIXED, tried.best.found.rate.value)
    page = promised_page(found, tried, asks.levels, sys.argv[1:])
    tell(page, document, outputs, setup, tried.lost, [outside])


plan.command()(capacity)
plan.command()(fluid)
plan.command()(wait)
threshold.__doc__ = THRESHOLD
flags.__doc__ = FLAGS


def _bound(text: str | None) -> float | None:
    from headgate.core.durations import duration

    if text is None:
        return None
    seconds = duration(text)
    if not seconds > 0:
        raise InputError(f"--max-gap {text}: it must be above 0, or left out for no bound")
    return seconds
