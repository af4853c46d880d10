"""`headgate plan capacity`: the largest rate each policy sustains, or the fewest engines for a load."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from headgate.advisor.settings import SearchSettings
from headgate.cli.flags import takes_settings
from headgate.cli.pages import Json, Outputs, Report, tell
from headgate.cli.progress import bar
from headgate.cli.searches import Asked, Cache, Levels, Policies, asked, flag
from headgate.core.errors import InputError, unknown
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.capacity.plan import CapacityPlan
    from headgate.advisor.other_times import OtherTimes

RATE, ENGINES = "rate", "engines"

EXAMPLES = """The largest rate or the fewest engines for service levels.

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


Find = Annotated[str, flag("rate: of one engine; engines: how few bear the load")]
Routers = Annotated[list[str] | None, flag("with --find engines (default: least-loaded); may be repeated")]


@takes_settings
def capacity(
    words: Experiment,
    search: SearchSettings,
    slo: Levels = None,
    policy: Policies = None,
    find: Find = RATE,
    router: Routers = None,
    cache: Cache = None,
    json: Json = None,
    report: Report = None,
) -> None:
    """Search."""
    from headgate.advisor.graph_size import with_graphs

    outputs = Outputs(json, report).checked()
    asks = asked("plan capacity", words, search, slo, policy, cache)
    asks = asks._replace(policies=asks.policies or [words.policy])
    words = with_graphs(words, asks.levels)
    if find not in (RATE, ENGINES):
        raise unknown("thing to --find", find, (RATE, ENGINES))
    if find == ENGINES:
        from headgate.cli.find_engines import find_engines

        find_engines(words, router or [], asks, outputs)
        return
    if router:
        raise InputError("--router is about fleets; say --find engines, or drop it")
    _find_rate(words, asks, outputs)


def _outside(words: Experiment, found: CapacityPlan) -> str:
    """What the card did not measure, at the rate of the best policy."""
    from headgate.experiment.probe import outside_said

    best = None if found.declined else found.best
    return "" if best is None else outside_said(words, best.policy, best.rate.value)


def _other_times(words: Experiment, asks: Asked, found: CapacityPlan) -> OtherTimes | None:
    """The best policy with the other arrival times."""
    from headgate.advisor.capacity.plan import choose
    from headgate.advisor.other_times import other_question, other_rate

    best = found.best
    if best is None or not best.rate.value or found.interrupted or found.declined:
        return None
    question = other_question(words, asks.options, found.requests)
    if question is None:
        return None
    chosen, _ = choose([best.policy], words, found.engine)
    named = best.policy, best.rate.value
    return other_rate(question, asks.levels, named, chosen[best.policy], bar, asks.folder)


def _find_rate(words: Experiment, asks: Asked, outputs: Outputs) -> None:
    """Search, show, and write JSON and a report where asked."""
    from headgate.advisor.capacity.plan import plan_capacity
    from headgate.experiment.assumed import assumed, tried_arrivals
    from headgate.report.plans.capacity import apart_said, capacity_page

    found = plan_capacity(words, asks.policies, asks.levels, asks.options, bar, asks.folder)
    other = _other_times(words, asks, found)
    setup = assumed(words, tried_arrivals(asks.options.as_recorded))
    alarms = apart_said(other, "sustains"), _outside(words, found)
    document = found.as_dict() | ({"other_times": other._asdict()} if other else {})
    tell(capacity_page(found, sys.argv[1:]), document, outputs, setup, found.lost, alarms)
    if found.interrupted:
        raise KeyboardInterrupt


capacity.__doc__ = EXAMPLES
