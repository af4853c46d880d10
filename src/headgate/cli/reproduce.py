"""`headgate reproduce`: one experiment of the literature again."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from headgate.cli.output import write_json
from headgate.cli.pages import Outputs, Report, tell
from headgate.cli.progress import bar

EXAMPLES = """Run a published experiment; print published and our numbers.

A table has the published number, ours, their ratio, and why they differ. Without a name, lists the
experiments. Nothing is written unless --json says where.

\b
Examples:
  headgate reproduce
  headgate reproduce eb-table3
  headgate reproduce eb-table10 --quick --json -
"""


def reproduce(
    name: Annotated[str | None, typer.Argument(help="the experiment, such as eb-table3")] = None,
    quick: Annotated[bool, typer.Option(help="a tenth of the requests: to try it, not to quote it")] = False,
    seed: Annotated[int, typer.Option(min=0, help="one number for all randomness")] = 0,
    json: Annotated[str | None, typer.Option(help="all numbers as JSON, to a file or - for stdout")] = None,
    report: Report = None,
) -> None:
    """Run it."""
    outputs = Outputs(json, report).checked()
    papers = _papers()
    if name is None:
        if json is not None:
            write_json(json, {key: experiment.about for key, experiment in papers.EXPERIMENTS.items()})
        if json != "-":
            for source in dict.fromkeys(experiment.source for experiment in papers.EXPERIMENTS.values()):
                print(f"Experiments of {source}:")
                for key, experiment in papers.EXPERIMENTS.items():
                    if experiment.source == source:
                        print(f"  {key:11} {experiment.about}")
        return
    options = papers.Options(seed, quick)
    jobs = papers.find(name).jobs(options)
    with bar(name, len(jobs)) as progress:
        found = papers.reproduce(name, options, jobs, progress)
    document = {"seed": seed, "quick": quick, "interrupted": found.interrupted, **found.as_dict()}
    tell(papers.published_page(found, sys.argv[1:], quick), document, outputs)
    if found.interrupted:
        raise KeyboardInterrupt


def _papers() -> Any:
    """The package of the experiments, which is not part of headgate itself."""
    from headgate.core.errors import InputError

    for point in metadata.entry_points(group="headgate.papers"):
        return point.load()
    raise InputError(
        "the experiments are in the package headgate-papers; install it: pip install ./papers in a clone"
    )


reproduce.__doc__ = EXAMPLES
