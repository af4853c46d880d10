"""`headgate plan fluid`: how a fleet should split its engines, whom to serve, and what that is worth."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.advisor.settings import FleetSettings, LevelSettings, StepSettings
from headgate.cli.flags import takes_settings
from headgate.cli.output import check_json, check_report, write_json
from headgate.cli.pages import Report, save_page
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.fluid.plan import FluidAnswer

EXAMPLES = """Split a fleet between prompts and decodes: whom to serve, and what one more engine adds.

Solves the steady-state linear program of gate-and-route for classes of
requests: --class flags, the classes of an experiment file with --rate, or a
trace cut into classes by prompt and output length. Rates are those of the
whole fleet. One percent of a price, a seat or a step time: what it changes.

\b
Examples:
  headgate plan fluid --engines 20 --mixed-fixed 17.4ms \\
      --mixed-per-token 6.2e-5 --solo-step 22ms --patience 10s \\
      --class code:prompt=300,output=1000,rate=10 \\
      --class paper:prompt=3000,output=400,rate=10
  headgate plan fluid --engines 8 --trace azure-conv --scale-rate 30 --clusters 4
  headgate plan fluid --engines 8 --slots 128 --trace azure-code --scale-rate 20 \\
      --tpot 30ms --frontier tpot
"""


@takes_settings
def fluid(
    words: Experiment,
    fleet: FleetSettings,
    steps: StepSettings,
    levels: LevelSettings,
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
    report: Report = None,
) -> None:
    """Plan it."""
    from headgate.advisor.fluid.plan import make_fluid_plan

    check_json(json)
    check_report(report)
    _tell(make_fluid_plan(words, fleet, steps, levels), levels.frontier, json, report)


def _tell(answer: FluidAnswer, frontier: str | None, json: str | None, report: str | None) -> None:
    """Show it, and write JSON and a report where asked."""
    from headgate.report.terminal.fluid import fluid_text
    from headgate.report.terminal.tables import as_text, show

    say = sys.stderr if json == "-" else sys.stdout
    show(fluid_text(answer), say)
    if report is not None:
        from headgate.report.plans.plans import fluid_page

        save_page(fluid_page(answer, frontier, as_text(fluid_text(answer)), sys.argv[1:]), report, say)
    write_json(json, answer.as_dict())


fluid.__doc__ = EXAMPLES
