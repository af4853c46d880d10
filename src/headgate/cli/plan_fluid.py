"""`headgate plan fluid`: how a fleet should split its engines, whom to serve, and what that is worth."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.flags import takes_words
from headgate.cli.output import check_json, check_report, write_json
from headgate.cli.pages import Report, save_page
from headgate.experiment.settings import Experiment

if TYPE_CHECKING:
    from headgate.advisor.fluid.plan import FluidAnswer

FAIRNESS = "largest difference of"
FLEET, COSTS, LEVELS = "Fleet", "Step costs as numbers, instead of a card", "Service levels"

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


def _fleet(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=FLEET)


def _cost(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=COSTS)


def _level(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=LEVELS)


Classes = Annotated[
    list[str] | None,
    typer.Option(
        "--class", help="NAME:prompt=P,output=D,rate=R[,patience=10s]; repeated", rich_help_panel=FLEET
    ),
]


@takes_words
def fluid(
    words: Experiment,
    classes: Classes = None,
    engines: Annotated[int | None, _fleet("engines in the fleet (default: 1)")] = None,
    clusters: Annotated[int, _fleet("classes to cut a trace into, at most")] = 3,
    mixed: Annotated[int | None, _fleet("engines that take prompts (default: as planned)")] = None,
    solo: Annotated[int | None, _fleet("engines that only decode (default: as planned)")] = None,
    prompt_price: Annotated[float | None, _fleet("of a prompt token (default: 1)")] = None,
    output_price: Annotated[float | None, _fleet("of an output token (default: 2)")] = None,
    separate: Annotated[bool, _fleet("each finished stage pays, not only finished requests")] = False,
    chunk: Annotated[int | None, _cost("prompt tokens in a mixed step (default: 512; 256)")] = None,
    whole_chunks: Annotated[bool, _cost("a prompt takes whole steps, not P/C of one")] = False,
    mixed_fixed: Annotated[str | None, _cost("of a step with a prompt, such as 17.4ms")] = None,
    mixed_per_token: Annotated[str | None, _cost("per prompt token in it, such as 6.2e-5")] = None,
    solo_step: Annotated[str | None, _cost("of a step without a prompt, such as 22ms")] = None,
    prefill_fairness: Annotated[float | None, _level(f"{FAIRNESS} prefill shares of two classes")] = None,
    decode_fairness: Annotated[float | None, _level(f"{FAIRNESS} solo decodes, per engine")] = None,
    tpot_over: Annotated[str, _level("--tpot caps the mean over tokens or, as published, slots")] = "tokens",
    serve: Annotated[list[str] | None, _level("CLASS=SHARE, at least; repeated")] = None,
    frontier: Annotated[str | None, _level("revenue along prefill-fairness, decode-fairness, tpot")] = None,
    json: Annotated[str | None, typer.Option(help="as JSON, to a file or - for stdout")] = None,
    report: Report = None,
) -> None:
    """Plan it."""
    from headgate.advisor.fluid.plan import make_fluid_plan
    from headgate.advisor.fluid.settings import LevelWords, StepWords, fleet_words

    check_json(json)
    check_report(report)
    roles, prices = (mixed, solo), (prompt_price, output_price)
    fleet = fleet_words(words, tuple(classes or ()), engines, clusters, roles, prices, separate)
    steps = StepWords(chunk, whole_chunks, mixed_fixed, mixed_per_token, solo_step)
    levels = LevelWords(prefill_fairness, decode_fairness, tpot_over, tuple(serve or ()), frontier)
    _tell(make_fluid_plan(words, fleet, steps, levels), frontier, json, report)


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
