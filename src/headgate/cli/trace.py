"""`headgate trace`: what a live engine wrote down, as a run folder and the usual figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli.flags import option
from headgate.cli.output import check_json, run_folder, said_to, save, write_json
from headgate.core.errors import InputError
from headgate.experiment.build import make_workload
from headgate.experiment.settings import Experiment, experiment
from headgate.workloads.traces import write_mooncake

if TYPE_CHECKING:
    from headgate.record.tables import Run

CONVERT = "convert"


def trace(
    file: Annotated[str, typer.Argument(help="a trace that `headgate serve --trace FILE` wrote, or convert")],
    files: Annotated[list[str] | None, typer.Argument(help="with convert: IN OUT.jsonl")] = None,
    out: Annotated[str | None, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[str | None, typer.Option(help="figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
    format: Annotated[str | None, option(Experiment, "format")] = None,
    columns: Annotated[str | None, option(Experiment, "columns")] = None,
    times: Annotated[str | None, option(Experiment, "times")] = None,
    slice: Annotated[str | None, option(Experiment, "slice")] = None,
    skip_bad_rows: Annotated[bool, option(Experiment, "skip_bad_rows")] = False,
    sort: Annotated[bool, option(Experiment, "sort")] = False,
) -> None:
    """Read the step trace of a live engine and say what happened.

    The run folder has the same tables, so whatever reads simulated runs reads it too. A trace that is still
    being written, or whose last line was cut off, is read as far as it goes. A trace of `headgate route` is
    read as well; it tells of requests, not of steps.

    `headgate trace convert IN OUT` writes any trace that headgate reads as Mooncake's JSON lines.

    Examples:
      headgate trace serve.jsonl --out live
      headgate trace convert mine.csv mine.jsonl --columns arrival=ts,prompt=input,output=out
    """
    given: dict[str, Any] = {"format": format, "columns": columns, "times": times, "slice": slice}
    given |= {"skip_bad_rows": skip_bad_rows, "sort": sort}
    if file == CONVERT:
        named = {name: value for name, value in given.items() if value}
        convert(files or [], experiment({"trace": "", **named}), overwrite)
        return
    if files or any(given.values()):
        raise InputError(
            "headgate trace reads one step trace; write headgate trace convert IN OUT to convert"
        )
    from headgate.record.live_trace import is_route_trace, read_live_trace, read_route_trace
    from headgate.record.tables import refuse_full
    from headgate.report.runs.page import scene_chapter
    from headgate.report.runs.scenes import scene_of
    from headgate.report.terminal import show
    from headgate.stats.measured import Measured
    from headgate.stats.vllm_bench import bench_result

    if detailed and json is None:
        raise InputError("--detailed is about --json; give --json FILE or drop it")
    check_json(json)
    run = read_route_trace(file) if is_route_trace(file) else read_live_trace(file)
    found = Measured(run)
    say = said_to(json)
    with run_folder(out, f"trace-{Path(file).stem}"[:100], overwrite) as folder:
        refuse_full(folder, overwrite)
        save(found, folder, overwrite)
    where = f"{run.meta['label']} on vLLM, {len(run.requests['id'])} requests"
    show(scene_chapter(scene_of({run.meta["label"]: [found]}, where)), say)
    for note in notes(run):
        print(f"note: {note}", file=say)
    print(f"run folder: {folder}", file=say)
    write_json(json, {**bench_result(found, detailed), "headgate": found.metrics.as_dict()})


def notes(run: Run) -> list[str]:
    meta, steps = run.meta, run.steps
    found: list[str] = []
    if meta["outcome"] != "finished":
        found.append(f"the trace is {meta['outcome']}")
    for word, told in (("policies", "policy {policy} took over at {at:.1f} s"),
                       ("fallbacks", "the policy was disabled at {at:.1f} s: {reason}")):  # fmt: skip
        lines = meta[word]
        assert isinstance(lines, list)
        found += [told.format(**line) for line in lines]
    if "lockstep" in meta:
        ranks = meta["lockstep"]
        found.append(f"{ranks} data-parallel ranks stepped together: prompts of any lengthen gaps of all")
    if "queries" in steps:
        decodes = max(1, (steps["decodes"] * steps["count"]).sum())
        queries = (steps["queries"] * steps["count"]).sum()
        firsts = (run.requests["first_token"] > 0).sum() + (run.stays["gap"] > 0).sum()  # came with prompts
        got = run.requests["output"].sum() - firsts
        found.append(
            f"a decode computed {queries / decodes:.2f} tokens in a step, drafts included, and got "
            f"{got / decodes:.2f}; gaps (ITL) are between deliveries, TPOT is per token"
        )
    return found


def convert(names: list[str], settings: Experiment, overwrite: bool) -> None:
    if len(names) != 2:
        raise InputError("trace convert takes two files; write headgate trace convert IN OUT.jsonl")
    source, target = names
    if Path(target).exists() and not overwrite:
        raise InputError(f"{target} exists; choose another name or pass --overwrite")
    workload, bad = make_workload(settings.model_copy(update={"trace": source}))
    write_mooncake(workload, target)
    if "times" in workload.origin:
        print(f"note: {workload.origin['times']}", file=sys.stderr)
    left = f", {bad.count} bad rows left out" if bad.count else ""
    print(f"{target}: {len(workload):,} requests in Mooncake's format{left}")
