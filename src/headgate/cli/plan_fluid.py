"""`headgate plan fluid`: how a fleet should split its engines, whom to serve, and what that is worth."""

from __future__ import annotations

import sys

from headgate.advisor.settings import FleetSettings, LevelSettings, StepSettings
from headgate.cli.flags import takes_settings
from headgate.cli.pages import Json, Outputs, Report, tell
from headgate.experiment.settings import Experiment

EXAMPLES = """Split a fleet between prompts and decodes; what an engine adds.

Says which requests to serve. Solves the steady-state linear program of gate-and-route for classes of
requests: --class flags, the classes of an experiment file with --rate, a trace cut into classes by prompt
and output length, or the log of a router. Rates are those of the whole fleet. One percent of a price, a
seat or a step time: what it changes.

\b
Examples:
  headgate plan fluid --engines 20 --mixed-fixed 17.4ms \\
      --mixed-per-token 6.2e-5 --solo-step 22ms --patience 10s \\
      --class code:prompt=300,output=1000,rate=10 \\
      --class paper:prompt=3000,output=400,rate=10
  headgate plan fluid --engines 8 --trace azure-conv --scale-rate 30 --clusters 4
  headgate plan fluid --engines 8 --slots 128 --trace azure-code --scale-rate 20 \\
      --tpot 30ms --frontier tpot
  headgate plan fluid --engines 8 --from-log router.jsonl
"""


@takes_settings
def fluid(
    words: Experiment,
    fleet: FleetSettings,
    steps: StepSettings,
    levels: LevelSettings,
    json: Json = None,
    report: Report = None,
) -> None:
    """Plan it."""
    from headgate.advisor.fluid.plan import make_fluid_plan
    from headgate.experiment.assumed import arrivals_said, assumed
    from headgate.experiment.probe import MIXED, outside_said
    from headgate.report.plans.fluid import fluid_page

    outputs = Outputs(json, report).checked()
    found = make_fluid_plan(words, fleet, steps, levels)
    setup = "" if steps.costs else assumed(words, arrivals_said(words, "rates of the classes"), run=False)
    described = not (steps.costs or fleet.classes or fleet.from_log)  # by settings that a run can take
    outside = outside_said(words, MIXED, found.per_engine) if described else ""
    page, lost = fluid_page(found, levels.frontier, sys.argv[1:]), found.demand.lost
    tell(page, found.as_dict(), outputs, setup, lost, [outside])


fluid.__doc__ = EXAMPLES
