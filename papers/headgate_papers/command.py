"""`headgate reproduce`: an experiment by name, its table, its numbers as JSON."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import headgate_papers as papers
from headgate.cli import output
from headgate.cli.help import Text


def reproduce(
    name: Annotated[Text, typer.Argument(help="the experiment, such as eb-table3")] = None,
    quick: Annotated[bool, typer.Option(help="a tenth of the requests: to try it, not to quote it")] = False,
    seed: Annotated[int, typer.Option(min=0, help="one number for all randomness")] = 0,
    json: Annotated[Text, output.json_option("all numbers as JSON, to a file or - for stdout")] = None,
    report: output.Report = None,
) -> None:
    """Run a published experiment; print published and our numbers.

    A table has the published number, ours, their ratio, and why they differ. Without a name, lists the
    experiments. Nothing is written unless --json says where.

    Examples:
      headgate reproduce
      headgate reproduce eb-table3
      headgate reproduce eb-table10 --quick --json -
    """
    if name is None:
        every = papers.EXPERIMENTS
        output.write_json(json, {key: experiment.about for key, experiment in every.items()})
        for source in dict.fromkeys(experiment.source for experiment in every.values() if json != "-"):
            print(f"Experiments of {source}:")
            own = (item for item in every.items() if item[1].source == source)
            print(*(f"  {key:11} {experiment.about}" for key, experiment in own), sep="\n")
        return
    options = papers.Options(seed, quick)
    jobs = papers.find(name).jobs(options)
    with output.bar(name, len(jobs)) as progress:
        found = papers.reproduce(name, options, jobs, progress)
    document = {"seed": seed, "quick": quick, "interrupted": found.interrupted, **found.as_dict()}
    page = papers.published_page(found, sys.argv[1:], quick)
    output.tell(page, document, output.Outputs(json, report))
    if found.interrupted:
        raise KeyboardInterrupt
