"""`headgate simulate`: one policy, one workload, one card."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headgate.cli.output import check_json, run_folder, save, write_json
from headgate.cli.progress import bar
from headgate.cli.words import takes_words
from headgate.core.errors import RunError
from headgate.spec.words import Experiment

EXAMPLES = """Serve a workload under one policy, in virtual time.

Writes a run folder (tables as plain numpy columns, run.json, bench.json in the schema of
`vllm bench serve`) and prints the figures with units.

\b
Examples:
  headgate simulate --policy eb --set refill=48 --clients 2048 --requests 4000 --slots 512
  headgate simulate --policy mixed --trace azure-conv --scale-rate 3
  headgate simulate --workload geometric --prompt 256 --output 128 --rate 12 --ttft 500ms --tpot 50ms
  headgate simulate experiment.toml --policy v0 --json -
"""


@takes_words
def simulate(
    words: Experiment,
    policy: Annotated[
        str | None, typer.Option(help="mixed, eb, v0, request-level", rich_help_panel="Policy")
    ] = None,
    out: Annotated[str | None, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[str | None, typer.Option(help="figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
) -> None:
    """Run it."""
    from headgate.results.bench import bench_result
    from headgate.results.metrics import summarise
    from headgate.results.text import show, summary_table
    from headgate.spec.build import split_policy
    from headgate.spec.run import Prepared, carry_out

    check_json(json)
    name, settings = split_policy(policy or words.policy)
    folder = run_folder(out, f"{name}-seed{words.seed}", overwrite)
    prepared = Prepared(words)
    say = sys.stderr if json == "-" else sys.stdout
    for note in prepared.notes():
        print(f"note: {note}", file=say)
    with bar(name, len(prepared.workload)) as progress:
        run = carry_out(prepared, name, {**words.set, **settings}, progress=progress)
    save(run, folder, overwrite)
    metrics = summarise(run)
    title = f"{run.meta['label']} on {run.meta['card']}, {len(prepared.workload)} requests"
    show(summary_table(metrics, title), say)
    print(f"run folder: {folder}", file=say)
    write_json(json, {**bench_result(run, detailed), "headgate": metrics.as_dict()})
    if run.meta["outcome"] != "finished":
        raise RunError(f"the run was {run.meta['outcome']}; what there is stands in {folder}")


simulate.__doc__ = EXAMPLES
