"""Commands that show what there is: `report` of runs, `trace` of a live engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headgate.cli import output
from headgate.cli.flags import option
from headgate.cli.help import Text, Texts
from headgate.core.errors import InputError, unknown
from headgate.experiment.settings import Experiment, experiment

if TYPE_CHECKING:
    from headgate.record.tables import Run
    from headgate.report.runs.scenes import Scene


def report(
    runs: Annotated[list[str], typer.Argument(help="run folders, folders of them, or live traces")],
    out: Annotated[str, output.report_option("the file to write")] = output.REPORT,
    baseline: Annotated[Text, typer.Option(help="the policy or router others are compared with")] = None,
    title: Annotated[str, typer.Option(help="heading of the report")] = "",
    json: Annotated[Text, output.json_option("verdicts and comparisons as JSON, to a file or -")] = None,
) -> None:
    """Show runs in one HTML file that needs nothing but a browser.

    Takes run folders, folders of them (what compare, demo and sweep write), and step traces of a live engine
    (.jsonl). Runs on the same requests are compared; runs at several loads are drawn against load.

    Examples:
      headgate report runs/0001-compare
      headgate report runs/0003-mixed-seed0 runs/0004-eb-seed0 --out both.html
      headgate report runs/0002-demo --baseline mixed
      headgate report serve.jsonl
    """
    from headgate.record.tables import Run
    from headgate.report.runs.page import runs_page
    from headgate.report.runs.scenes import gather
    from headgate.report.terminal import show

    places, loaded = [place for run in runs for place in find_runs(run)], list[Run]()
    with output.bar("reading runs", len(places)) as progress:
        for place in places:
            loaded.append(Run.load(place))
            progress(len(loaded))
    scenes = gather(loaded)
    if baseline is not None:
        for scene in scenes:
            if baseline not in scene.runs:
                raise unknown("name among these runs", baseline, scene.runs)
        scenes = [replace(each, runs={baseline: each.runs[baseline], **each.runs}) for each in scenes]
    output.summed_up(scenes)
    page = runs_page(scenes, sys.argv[1:], title)
    say = output.said_to(json)
    for chapter in page.chapters:
        show(f"{chapter.title}: {chapter.verdict}", say)
    output.save_page(page, out, say)
    output.write_json(json, _document(out, scenes))


def find_runs(text: str) -> list[Path]:
    from headgate.record.tables import RECORD

    place = Path(text)
    if place.suffix == ".jsonl" or (place / RECORD).is_file() or not place.is_dir():
        return [place]
    found = sorted(place.rglob(RECORD), key=lambda record: (record.stat().st_mtime_ns, str(record)))
    if not found:
        raise InputError(f"no run in folder {place}; give a folder that simulate, compare or demo wrote")
    return [record.parent for record in found]


def _document(out: str, scenes: list[Scene]) -> dict[str, Any]:
    from headgate.report.runs.verdict import scene_verdict
    from headgate.stats.comparison import Comparison

    def one(scene: Scene) -> dict[str, Any]:
        found = scene.comparison
        return {
            "title": scene.title,
            "load": scene.load.text,
            "verdict": scene_verdict(scene),
            "bound": scene.bound.rate if scene.bound else None,
            "comparison": found.as_dict() if isinstance(found, Comparison) else found,
            "runs": {name: metrics.as_dict() for name, metrics in scene.metrics.items()},
        }

    return {"report": out, "scenes": [one(scene) for scene in scenes]}


# -- trace


def trace(
    file: Annotated[str, typer.Argument(help="a trace that `headgate serve --trace FILE` wrote, or convert")],
    files: Annotated[Texts, typer.Argument(help="with convert: IN OUT.jsonl")] = None,
    out: Annotated[Text, typer.Option(help="run folder (default: runs/NNNN-...)")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run folder that exists")] = False,
    json: Annotated[Text, output.json_option("figures as JSON, to a file or - for stdout")] = None,
    detailed: Annotated[bool, typer.Option(help="with --json: every request's TTFT and ITLs")] = False,
    format: Annotated[Text, option(Experiment, "format")] = None,
    columns: Annotated[Text, option(Experiment, "columns")] = None,
    times: Annotated[Text, option(Experiment, "times")] = None,
    slice: Annotated[Text, option(Experiment, "slice")] = None,
    skip_bad_rows: Annotated[bool, option(Experiment, "skip_bad_rows")] = False,
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
    given["skip_bad_rows"] = skip_bad_rows
    if file == "convert":
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
    run = read_route_trace(file) if is_route_trace(file) else read_live_trace(file)
    found = Measured(run)
    say = output.said_to(json)
    with output.run_folder(out, f"trace-{Path(file).stem}"[:100], overwrite) as folder:
        refuse_full(folder, overwrite)
        output.save(found, folder, overwrite)
    where = f"{run.meta['label']} on vLLM, {len(run.requests['id'])} requests"
    show(scene_chapter(scene_of({run.meta["label"]: [found]}, where)), say)
    for note in notes(run):
        print(f"note: {note}", file=say)
    print(f"run folder: {folder}", file=say)
    output.write_json(json, {**bench_result(found, detailed), "headgate": found.metrics.as_dict()})


def notes(run: Run) -> list[str]:
    meta, steps = run.meta, run.steps
    found = [f"the trace is {meta['outcome']}"] if meta["outcome"] != "finished" else []
    found += ["policy {policy} took over at {at:.1f} s".format(**line) for line in meta["policies"]]
    found += ["the policy was disabled at {at:.1f} s: {reason}".format(**line) for line in meta["fallbacks"]]
    if ranks := meta.get("lockstep"):
        found.append(f"{ranks} data-parallel ranks stepped together: prompts of any lengthen gaps of all")
    if any(kind.get("between_tokens") for kind in run.kinds):
        found.append(
            "promised gaps are the engine's: what clients are promised less --delivery (20 ms unless told "
            "otherwise, at most a fifth)"
        )
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
    from headgate.experiment.build import make_workload
    from headgate.workloads.traces import write_mooncake

    workload, bad = make_workload(settings.model_copy(update={"trace": source}))
    write_mooncake(workload, target)
    if "times" in workload.origin:
        print(f"note: {workload.origin['times']}", file=sys.stderr)
    left = f", {bad.count} bad rows left out" if bad.count else ""
    print(f"{target}: {len(workload):,} requests in Mooncake's format{left}")
