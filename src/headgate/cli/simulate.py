"""`headgate simulate`: one policy, one workload, one card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from headgate.cli.output import check_json, run_folder, save, write_json
from headgate.cli.progress import bar
from headgate.cli.words import takes_words
from headgate.core.errors import InputError, RunError
from headgate.spec.words import Experiment

if TYPE_CHECKING:
    from headgate.results.tables import Run

EXAMPLES = """Serve a workload under one policy, in virtual time.

Writes a run folder (tables as plain numpy columns, run.json, bench.json in the schema of
`vllm bench serve`) and prints the figures with units.

\b
Examples:
  headgate simulate --policy eb --set refill=48 --clients 512 --requests 4000
  headgate simulate --policy mixed --trace azure-conv --scale-rate 3
  headgate simulate --workload geometric --prompt 256 --output 128 --rate 12 --ttft 500ms --tpot 50ms
  headgate simulate experiment.toml --policy v0 --json -
"""


@takes_words
def simulate(
    words: Experiment,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:PARAMETER=VALUE,...; see headgate doctor", rich_help_panel="Policy"),
    ] = None,
    out: Annotated[str | None, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[str | None, typer.Option(help="figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
) -> None:
    """Run it."""
    from headgate.results.tables import refuse_full
    from headgate.spec.build import make_policy, split_policy
    from headgate.spec.run import Prepared, carry_out

    if detailed and json is None:
        raise InputError("--detailed is about --json; give --json FILE or drop it")
    check_json(json)
    name, settings = split_policy(_one_policy(policy, words))
    settings = {**words.set, **settings}
    prepared = Prepared(words)
    make_policy(name, settings, prepared.engine)  # a mistake in it should not cost a folder
    say = sys.stderr if json == "-" else sys.stdout
    with run_folder(out, f"{name}-seed{words.seed}"[:100], overwrite) as folder:
        refuse_full(folder, overwrite)
        for note in prepared.notes():
            print(f"note: {note}", file=say)
        with bar(name, len(prepared.workload)) as progress:
            run = carry_out(prepared, name, settings, progress=progress)
        save(run, folder, overwrite)
    _report(run, f"{len(prepared.workload)} requests", folder, json, detailed, say)
    if run.meta["outcome"] != "finished":
        raise RunError(f"the run was {run.meta['outcome']}; what there is stands in {folder}")


def _one_policy(flags: list[str] | None, words: Experiment) -> str:
    """The policy to run; a file made for compare may name several, then a flag must choose."""
    if flags is not None and len(flags) > 1:
        raise InputError("simulate runs one policy; drop a --policy or use headgate compare")
    if flags is None and words.policies and "policy" not in words.model_fields_set:
        raise InputError("the file names policies to compare; choose one with --policy or use compare")
    return words.policy if not flags else flags[0]


def _report(run: Run, size: str, folder: Path, json: str | None, detailed: bool, say: TextIO) -> None:
    """Figures on the terminal, and as JSON where asked."""
    from headgate.results.bench import bench_result
    from headgate.results.metrics import summarise
    from headgate.results.text import show, summary_table
    from headgate.spec.coverage import warning

    metrics = summarise(run)
    show(summary_table(metrics, f"{run.meta['label']} on {run.meta['card']}, {size}"), say)
    extrapolated = warning(run)
    if extrapolated:
        print(f"note: {extrapolated}", file=say)
    print(f"run folder: {folder}", file=say)
    write_json(json, {**bench_result(run, detailed), "headgate": metrics.as_dict()})


simulate.__doc__ = EXAMPLES
