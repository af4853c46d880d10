"""`headgate compare`: several policies on the same requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headgate.cli.output import check_json, run_folder, save, write_json
from headgate.cli.progress import bar
from headgate.cli.words import takes_words
from headgate.core.errors import InputError, RunError
from headgate.spec.words import Experiment

if TYPE_CHECKING:
    from headgate.results.tables import Run
    from headgate.spec.run import Prepared

EXAMPLES = """Serve the same requests under several policies and print paired differences with intervals.

The first policy is the baseline. With several seeds, runs are paired by seed; with one, by request.

\b
Examples:
  headgate compare --policy mixed --policy v0 --policy eb:refill=48 --clients 1024 --slots 512
  headgate compare --policy mixed --policy eb:refill=16 --trace azure-conv --scale-rate 4
  headgate compare --policy mixed --policy eb:refill=64 --workload geometric --rate 20 --seeds 5
"""


@takes_words
def compare(
    words: Experiment,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:PARAMETER=VALUE,...; may be repeated", rich_help_panel="Policy"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="so many seeds, from --seed on")] = 1,
    out: Annotated[str | None, typer.Option(help="folder for the runs (default: runs/NNNN-compare)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace run folders that exist")] = False,
    json: Annotated[str | None, typer.Option(help="the comparison as JSON, to a file or -")] = None,
) -> None:
    """Run them."""
    from headgate.results.compare import compare as compare_runs
    from headgate.results.overview import overview_table
    from headgate.results.text import comparison_table, show
    from headgate.spec.run import Prepared

    check_json(json)
    wanted = policy or list(words.policies)
    if len(wanted) < 2 or len(set(wanted)) < len(wanted):
        raise InputError("compare needs at least two different policies; pass --policy mixed --policy v0")
    folder = run_folder(out, "compare", overwrite)
    prepared = Prepared(words)
    if seeds > 1 and prepared.requests(words.seed) == prepared.requests(words.seed + 1):
        raise InputError("a trace at its own times is the same for every seed; drop --seeds")
    say = sys.stderr if json == "-" else sys.stdout
    for note in prepared.notes():
        print(f"note: {note}", file=say)
    runs = run_all(prepared, wanted, seeds, folder, overwrite)
    result = compare_runs(runs, wanted[0])
    show(overview_table(result), say)
    print(file=say)
    show(comparison_table(result), say)
    print(f"run folders: {folder}", file=say)
    write_json(json, result.as_dict())


compare.__doc__ = EXAMPLES


def run_all(
    prepared: Prepared, policies: list[str], seeds: int, folder: Path, overwrite: bool = False
) -> dict[str, list[Run]]:
    """Every policy on every seed, each into its own run folder."""
    from headgate.spec.build import make_policy, split_policy
    from headgate.spec.run import carry_out

    words = prepared.words
    chosen = {text: split_policy(text) for text in policies}
    for name, settings in chosen.values():  # a mistake in the last policy should not cost the others' time
        make_policy(name, settings, prepared.engine)
    runs: dict[str, list[Run]] = {text: [] for text in policies}
    for text, (name, settings) in chosen.items():
        for seed in range(words.seed, words.seed + seeds):
            with bar(f"{text} seed {seed}", len(prepared.workload)) as progress:
                run = carry_out(prepared, name, settings, seed, label=text, progress=progress)
            where = folder / (
                text.replace(":", "-").replace(",", "-") + (f"-seed{seed}" if seeds > 1 else "")
            )
            save(run, where, overwrite)
            if run.meta["outcome"] != "finished":
                raise RunError(f"{text}: the run was {run.meta['outcome']}; what there is stands in {where}")
            runs[text].append(run)
    return runs
